"""The op contract. Every op has a float32 reference (`ops.reference`) and kernels per device.

Shapes use M tokens (rows), N outputs, K inputs, H heads, D = head_dim, S = sequence slots. Activations are fp32 on
the CPU; fp32 or bf16 on CUDA. Rows of activations are contiguous in their last dimension and may be strided in the
first. Positions, slots, tables and token ids are int32 tensors on the device: one captured step serves every position.

A layer's KV cache is two pools of pages, (P, Hkv, PAGE, D) fp32, bf16 or `Int8Pages`; `tables` (S, W) int32 is for all
layers: position p of slot s is row p % PAGE of page tables[s, p // PAGE]. Entries for positions that no row touches may
be anything, and which pages a slot has changes no result. Nothing inside a captured program may write the tables.

Ops allocate and return their result unless the docstring says "in place". All raise `ValueError` with the shapes
and dtypes they got when the contract is broken.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Literal, Protocol

import torch
from torch import Tensor

from nibblelm.ops import reference
from nibblelm.ops.devices import backend
from nibblelm.ops.logprobs import top_logprobs
from nibblelm.ops.sampling_state import SamplingState
from nibblelm.ops.types import (
    PAGE,
    PROMPT_TILE,
    ActivationBits,
    Int8Pages,
    PackedLinear,
    Pages,
    QuantizedWeight,
    Weight,
    prompt_tiles,
    scheme,
)

__all__ = [
    "PAGE",
    "PROMPT_TILE",
    "ActivationBits",
    "Int8Pages",
    "PackedLinear",
    "Pages",
    "Program",
    "QuantizedWeight",
    "SamplingState",
    "Weight",
    "backend",
    "prompt_tiles",
    "top_logprobs",
]


def _kernels(device: torch.device, op: str) -> ModuleType:
    """The module that has `op` for a device; on the CPU the reference where no kernel is written for it."""
    module = backend(device)
    return reference if device.type == "cpu" and not hasattr(module, op) else module


def cuda_available() -> tuple[bool, str]:
    """Whether the CUDA kernels can run here, and if not, the reason."""
    try:
        from nibblelm.ops import cuda
    except ImportError as error:
        return False, f"the CUDA extension cannot be loaded: {error}"
    return cuda.available()


def set_threads(count: int) -> None:
    """Set how many CPU threads the kernels use, 1 or more."""
    if count < 1:
        raise ValueError(f"threads must be at least 1, got {count}")
    backend(torch.device("cpu")).set_threads(count)


class Program(Protocol):
    """A recorded sequence of ops; it keeps every tensor that the sequence reads or writes."""

    def replay(self) -> None:
        """Run the recorded ops again on the same tensors, with what these hold now."""
        ...


def capture(device: torch.device, pool: object = None) -> AbstractContextManager[Program]:
    """Record the ops of this module called inside the block, to be replayed in one call without Python.

    Inputs are read again at replay, so positions, slots, tables and ids are changed by writing into their tensors;
    results appear in the tensors that the ops returned while they were recorded. Only ops of this module count:
    other torch calls inside the block are not recorded. The results of the block itself are undefined until the
    first `replay`. Recording is per thread, cannot be nested (RuntimeError), and is dropped on an exception.

    pool  on CUDA a `cuda.Pool` of programs that share the memory of what they leave behind: results are read before
          another of them runs
    """
    return backend(device).capture(device, pool)


def to_device(t: Tensor, device: torch.device, out: Tensor | None = None) -> Tensor:
    """A CPU tensor on `device`, through pinned memory where there is a bus to cross; on the CPU it stays as it is.

    out  contiguous, of its shape and dtype, on `device`: written behind what is under way there
    """
    if device.type == "cpu":
        return t if out is None else out.copy_(t)
    return backend(device).upload([t], device, out)


def pack_linear(parts: Sequence[Weight], device: torch.device, pairs: bool = False) -> PackedLinear:
    """Repack weights for `linear`; several parts of one scheme are stacked along N (fused q/k/v, gate/up).

    parts    full (N_i, K) tensors of one dtype, or quantized weights of equal bits, group size, scale dtype, K and form
    pairs    the parts are gate and up of one MLP: a device may interleave their rows (`PackedLinear.pairs`)
    returns  the packed (sum N_i, K) weight on `device`
    """
    if len({scheme(part) for part in parts}) != 1:
        raise ValueError(f"parts of one linear must be of one scheme and K, got {[scheme(part) for part in parts]}")
    return backend(device).pack_linear(parts, device, pairs)


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, (M, N) each of one dtype, rounded once."""
    return backend(x.device).add(x, y)


def linear(
    x: Tensor,
    weight: PackedLinear,
    bias: Tensor | None = None,
    activation_bits: ActivationBits = 24,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`x @ weight.T + bias`. Source: the affine form in `QuantizedWeight`.

    x     (M, K); bias (N,) in fp32, or None; out (M, N), may be a column slice of a wider buffer and may be fp32
          where x is bf16 (the head's logits); without `out` the result is of `dtype`, by default that of x
    activation_bits  for quantized weights: x is rounded per row and part of K to 8-, 16- or 24-bit fixed point (int8
                     digits), then the dot product is exact in int32. 24 is as accurate as an fp32 dot product. CUDA
                     takes 8, else what x holds: 16 bits of bf16, 24 of fp32. On the CPU, of each part of K two blocks
                     of 8 values whose largest stand out have 16 bits where 8 are asked for. Ignored for full weights,
                     which take fp32 products.
    A row's result does not depend on the other rows, nor, with quantized weights or on CUDA, on how many there are.
    """
    if out is None:
        out = x.new_empty(x.shape[0], weight.shape[0], dtype=dtype)
    return backend(x.device).linear(x, weight, bias, activation_bits, out)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, plus_one: bool = False
) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension, with fused residual add (Zhang & Sennrich 2019).

    x (M, H) or (M, heads, D) for QK-norm, weight (H,) or (D,) fp32; residual like x or None
    returns (norm(h) * weight, h) with h = x + residual (h is x itself without residual);
    plus_one multiplies by (1 + weight) instead
    """
    return backend(x.device).rms_norm(x, weight, eps, residual, plus_one)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """LayerNorm over the last dimension, with fused residual add (Ba et al. 2016).

    x (M, H) or (M, heads, D), weight (H,) or (D,) fp32, or (heads, D) where each head has its own; bias (H,) or (D,)
    fp32 or None, residual like x or None
    returns (norm(h) * weight + bias, h) with h = x + residual (h is x itself without residual)
    """
    return backend(x.device).layer_norm(x, weight, bias, eps, residual)


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding, in place (Su et al. 2021).

    x (M, H, D), any stride in the first dimension; positions (M,) int32; cos, sin (T, R / 2) fp32 tables of the
    rotated width R <= D (the scaling variants are in the tables); half-split pairs (i, i + R/2), or
    (2i, 2i + 1) when interleaved. Returns x.

    Two-dimensional (ChatGLM-6B): positions (2, M) rotate the first half of each head by stream 0 and the second
    half by stream 1, with tables of R <= D / 2.
    """
    return backend(x.device).rope(x, positions, cos, sin, interleaved)


def rope_append(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    tables: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Pages,
    v_cache: Pages,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    interleaved: bool = False,
    places: Tensor | None = None,
) -> Tensor:
    """From the fused projection to attention's inputs: QK-norm, `rope` of q and k, `kv_append`: in one kernel on
    CUDA, kernel by kernel on the CPU.

    qkv (M, H + 2 Hkv, D) in the order q, k, v, in place; positions (M,) in the cache; places (M,) or (2, M) int32: what
    `rope` has as positions, where that is not the same; q_norm, k_norm (D,) fp32 or None; else as in the ops it fuses.
    Returns the rotated q, (M, H, D), a view of qkv. The k and v rows of qkv are undefined afterwards.
    """
    norms = (q_norm, k_norm, eps, plus_one)
    angles = positions if places is None else places
    return backend(qkv.device).rope_append(
        qkv, positions, angles, slots, tables, cos, sin, k_cache, v_cache, *norms, interleaved
    )


def kv_append(
    k: Tensor, v: Tensor, k_cache: Pages, v_cache: Pages, slots: Tensor, positions: Tensor, tables: Tensor
) -> None:
    """Write new keys and values into the cache, in place, rounded to nearest (ties to even).

    k, v (M, Hkv, D), any stride in the first dimension; caches (P, Hkv, PAGE, D); slots, positions (M,)
    In int8 the scale is top / 127 and codes are x * (127 / top), in fp32, with the largest |x| of a head, at least
    2^-100, as top.
    """
    backend(k.device).kv_append(k, v, k_cache, v_cache, slots, positions, tables)


def attention(
    q: Tensor,
    k_cache: Pages,
    v_cache: Pages,
    slots: Tensor,
    positions: Tensor,
    tables: Tensor,
    scale: float,
    window: int = 0,
    *,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    prefix_lengths: Tensor | None = None,
    starts: Tensor | None = None,
    mask: Tensor | None = None,
    tiles: Tensor | None = None,
    generated: int = 0,
) -> Tensor:
    """Causal attention of new tokens against the cache, by online softmax (Milakov & Gimelshein 2018).

    q (M, H, D), any stride in the first dimension; caches (P, Hkv, PAGE, D), H a multiple of Hkv;
    row m attends to positions p of slot slots[m] with p <= positions[m] and, if window > 0,
    p > positions[m] - window. returns (M, H * D)

    The score of a pair is q . k * scale; softcap > 0 makes it softcap * tanh(score / softcap). Then are added
    alibi_slopes (H,) fp32 times (p - positions[m]) and mask[m, p], an fp32 (M, columns) additive mask; positions
    beyond its columns are not attended. prefix_lengths (M,) int32: row m also sees p < prefix_lengths[m] (a
    bidirectional prompt). starts (S,) int32: the first valid position of each slot (left padding). A row that
    may attend to nothing gives zeros.

    tiles  (T, 2) int32, the first row and the number of rows of each tile: the rows are prompts, and those of a tile
           belong to one slot, so that a device may take its tiled prefill kernel. A tile has at most PROMPT_TILE rows,
           or none; the result of a row in no tile is undefined. A device may not see whether this holds
    generated  with tiles, no prefix_lengths and no mask: so many rows behind all of theirs are as without tiles
    """
    options = (softcap, alibi_slopes, prefix_lengths, starts, mask)
    inputs = (q, k_cache, v_cache, slots, positions, tables, scale, window)
    return backend(q.device).attention(*inputs, *options, tiles, generated)


def attention_mask(scores: Tensor, mask: Tensor, value: float = -10000.0) -> Tensor:
    """Set scores to `value` where the mask is above 0.99, in place. CPU: through the reference.

    scores (B, H, Q, K) fp32 or bf16; mask (B, Q, K) of the same dtype, 1 where attention is forbidden.
    Returns scores.
    """
    return _kernels(scores.device, "attention_mask").attention_mask(scores, mask, value)


def alibi_mask(scores: Tensor, slopes: Tensor, value: float = -10000.0) -> Tensor:
    """Causal ALiBi (Press et al. 2022) on a score matrix, in place. CPU: through the reference.

    scores (B, H, Q, K) fp32 or bf16, slopes (H,) fp32. Query row i is position K - Q + i: columns up to it get
    slope * column added, later ones become `value`. Returns scores.
    """
    return _kernels(scores.device, "alibi_mask").alibi_mask(scores, slopes, value)


def swiglu(gate_up: Tensor, pairs: bool = False) -> Tensor:
    """silu(gate) * up on the concatenated projection (Shazeer 2020): (M, 2 I) -> (M, I).

    pairs  the columns are as a weight with `PackedLinear.pairs` leaves them: 8 gates, their 8 ups, and so on. CUDA only
    """
    if gate_up.device.type == "cpu":
        assert not pairs
        return backend(gate_up.device).swiglu(gate_up)
    return backend(gate_up.device).swiglu(gate_up, pairs)


Gelu = Literal["tanh", "erf"]
"""The two forms of GELU in use: the tanh approximation and the exact one (Hendrycks & Gimpel 2016)."""


def geglu(gate_up: Tensor, form: Gelu = "tanh", pairs: bool = False) -> Tensor:
    """gelu(gate) * up on the concatenated projection: (M, 2 I) -> (M, I); pairs as in `swiglu`."""
    if gate_up.device.type == "cpu":
        assert not pairs
        return backend(gate_up.device).geglu(gate_up, form)
    return backend(gate_up.device).geglu(gate_up, form, pairs)


def gelu(x: Tensor, form: Gelu = "tanh") -> Tensor:
    """GELU of every element of (M, N)."""
    return backend(x.device).gelu(x, form)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) of every element of (M, N)."""
    return backend(x.device).silu(x)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) of every element of (M, N), cap > 0 (Bello et al. 2016)."""
    return backend(x.device).softcap(x, cap)


def relu(x: Tensor) -> Tensor:
    """max(x, 0) of every element of (M, N)."""
    return backend(x.device).relu(x)


def scale(x: Tensor, factor: float) -> Tensor:
    """x * factor of every element of (M, N)."""
    return backend(x.device).scale(x, factor)


def embedding(ids: Tensor, table: Weight, dtype: torch.dtype = torch.float32, multiplier: float = 1.0) -> Tensor:
    """Rows of a full or quantized (V, H) table, times `multiplier`: ids (M,) int32 -> (M, H) in `dtype`."""
    return backend(ids.device).embedding(ids, table, dtype, multiplier)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension of (M, N), any N >= 1; a row of -inf gives zeros, not NaN."""
    return backend(x.device).softmax(x)


def log_softmax(x: Tensor) -> Tensor:
    """Logarithm of softmax over the last dimension of (M, N); a row of -inf gives -inf."""
    return backend(x.device).log_softmax(x)


def argmax(x: Tensor) -> Tensor:
    """Index of the largest of each row of (M, N) -> (M,) int32; ties go to the lowest index."""
    return backend(x.device).argmax(x)


def mask_logits(x: Tensor, mask: Tensor) -> Tensor:
    """x (M, V) fp32 with -inf where a token is not allowed, a new tensor; mask (M, ceil(V / 32)) int32, contiguous:
    bit v % 32 of word v // 32 says whether v is."""
    return backend(x.device).mask_logits(x, mask)


def sample(
    logits: Tensor,
    state: SamplingState,
    out: Tensor | None = None,
    positions: Tensor | None = None,
    host_ids: Tensor | None = None,
) -> Tensor:
    """The next token of each row: logits (M, V) fp32 -> ids (M,) int32, -1 where no logit is finite.

    Penalties, temperature, top-k, top-p, min-p and the draw are those of `nibblelm.sampler`, to rounding; the
    random numbers are a function of seed and step alone. Updates `state.steps` and `state.counts`, so a captured
    call goes on by itself. CPU: through the reference.

    out        (M,) int32, contiguous: where the ids go, so that the next step's inputs are written here; returned
    positions  (M,) int32, contiguous: 1 is added to each, in place
    host_ids   (2, M) int32 in pinned host memory: host_ids[state.steps[m] % 2, m], by the steps before this one, gets
               the id too, so that a host at most one step behind needs no copy
    """
    return _kernels(logits.device, "sample").sample(logits, state, out, positions, host_ids)
