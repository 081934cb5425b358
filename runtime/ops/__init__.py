"""The op contract. Every op has a float32 reference (`ops.reference`) and kernels per device.

Shapes use M tokens (rows), N outputs, K inputs, H heads, D = head_dim, T = KV capacity in positions,
S = sequence slots. Activations are fp32 on the CPU; fp32 or bf16 on CUDA. Rows of activations are contiguous
in their last dimension and may be strided in the first. Positions, slots and token ids are int32 tensors on the
device, so one captured step serves every position.

Ops allocate and return their result unless the docstring says "in place". All raise `ValueError` with the shapes
and dtypes they got when the contract is broken.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from nibblelm.errors import DeviceError
from nibblelm.ops.types import ActivationBits, PackedLinear, QuantizedWeight, Weight

__all__ = ["ActivationBits", "PackedLinear", "Program", "QuantizedWeight", "Weight"]


def backend(device: torch.device) -> ModuleType:
    """The kernel module of a device: `ops.cpu` or `ops.cuda`."""
    if device.type == "cpu":
        from nibblelm.ops import cpu

        return cpu
    if device.type == "cuda":
        from nibblelm.ops import cuda

        return cuda
    raise DeviceError(f"device {device.type!r} is not supported; use cpu or cuda")


class Program(Protocol):
    """A recorded sequence of ops; it keeps every tensor that the sequence reads or writes."""

    def replay(self) -> None:
        """Run the recorded ops again on the same tensors, with what these hold now."""
        ...


def capture(device: torch.device) -> AbstractContextManager[Program]:
    """Record the ops of this module called inside the block, to be replayed in one call without Python.

    Inputs are read again at replay, so positions, slots and ids are changed by writing into their tensors;
    results appear in the tensors that the ops returned while they were recorded. Only ops of this module count:
    other torch calls inside the block are not recorded. The results of the block itself are undefined until the
    first `replay`. Recording is per thread, cannot be nested (RuntimeError), and is dropped on an exception.
    """
    return backend(device).capture(device)


def pack_linear(parts: Sequence[Weight], device: torch.device) -> PackedLinear:
    """Repack weights for `linear`; several parts of one scheme are stacked along N (fused q/k/v, gate/up).

    parts    full (N_i, K) tensors of one dtype, or quantized weights of equal bits, group size, scale dtype, K
    returns  the packed (sum N_i, K) weight on `device`
    """
    return backend(device).pack_linear(parts, device)


def linear(
    x: Tensor,
    weight: PackedLinear,
    bias: Tensor | None = None,
    activation_bits: ActivationBits = 24,
    out: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias`. Source: the affine form in `QuantizedWeight`.

    x     (M, K); bias (N,) in fp32, or None; out (M, N), may be a column slice of a wider buffer and may be fp32
          where x is bf16 (the head's logits)
    activation_bits  for quantized weights on the CPU: x is rounded per row and group of K to 8-, 16- or 24-bit
                     fixed point (int8 digits), then the dot product is exact in int32. 24 is as accurate as an
                     fp32 dot product. Ignored for full weights, which take fp32 products.
    """
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


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary embedding, in place (Su et al. 2021).

    x (M, H, D), any stride in the first dimension; positions (M,) int32; cos, sin (T, R / 2) fp32 tables of the
    rotated width R <= D (the scaling variants are in the tables); half-split pairs (i, i + R/2), or
    (2i, 2i + 1) when interleaved. Returns x.
    """
    return backend(x.device).rope(x, positions, cos, sin, interleaved)


def kv_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Write new keys and values into the cache, in place.

    k, v (M, Hkv, D), any stride in the first dimension; caches (S, Hkv, T, D) fp32 or bf16; slots, positions (M,)
    """
    backend(k.device).kv_append(k, v, k_cache, v_cache, slots, positions)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    scale: float,
    window: int = 0,
) -> Tensor:
    """Causal attention of new tokens against the cache, by online softmax (Milakov & Gimelshein 2018).

    q (M, H, D), any stride in the first dimension; caches (S, Hkv, T, D), H a multiple of Hkv;
    row m attends to positions p of cache slots[m] with p <= positions[m] and, if window > 0,
    p > positions[m] - window. returns (M, H * D)
    """
    return backend(q.device).attention(q, k_cache, v_cache, slots, positions, scale, window)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up on the concatenated projection (Shazeer 2020): (M, 2 I) -> (M, I)."""
    return backend(gate_up.device).swiglu(gate_up)


def embedding(ids: Tensor, table: Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of a full or quantized (V, H) table: ids (M,) int32 -> (M, H) in `dtype`."""
    return backend(ids.device).embedding(ids, table, dtype)


def softmax(x: Tensor) -> Tensor:
    """Softmax over the last dimension of (M, N), any N >= 1; a row of -inf gives zeros, not NaN."""
    return backend(x.device).softmax(x)


def log_softmax(x: Tensor) -> Tensor:
    """Logarithm of softmax over the last dimension of (M, N); a row of -inf gives -inf."""
    return backend(x.device).log_softmax(x)


def argmax(x: Tensor) -> Tensor:
    """Index of the largest of each row of (M, N) -> (M,) int32; ties go to the lowest index."""
    return backend(x.device).argmax(x)
