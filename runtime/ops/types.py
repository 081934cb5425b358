"""The weight types the ops take: what is on disk (`QuantizedWeight`) and what a kernel reads (`PackedLinear`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from nibblelm import _cpu

PAGE: int = _cpu.PAGE
"""Positions of a page of the KV cache."""

PROMPT_TILE = 128
"""Most rows of a tile of prompts."""

ActivationBits = Literal[8, 16, 24]


@dataclass(frozen=True)
class QuantizedWeight:
    """An (N, K) matrix of unsigned int4 or int8 codes: `w[n, k] = scale[n, g] * (code[n, k] - zero[n, g])`.

    g = k // group_size; one group per row when `group_size` is -1. In the minimum form ("NoZero")
    `w[n, k] = scale[n, g] * code[n, k] + minimum[n, g]` and `zero_point` is None.

    codes       int32 (N, ceil(K / (32 / bits))), the compressed-tensors `weight_packed`: dense along K, low code first
    scale       fp16 / bf16 / fp32 (N, G)
    zero_point  int32 (ceil(N / (32 / bits)), G), packed along dimension 0 in the same way; None means symmetric
                (zero = 8 or 128) unless `minimum` is given
    minimum     the dtype of scale, (N, G), or None
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    bits: Literal[4, 8]
    group_size: int
    shape: tuple[int, int]
    minimum: Tensor | None = None

    @property
    def groups(self) -> int:
        """G, the number of groups along K."""
        return 1 if self.group_size == -1 else -(-self.shape[1] // self.group_size)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero-points together."""
        parts = (self.codes, self.scale, self.zero_point, self.minimum)
        return sum(p.numel() * p.element_size() for p in parts if p is not None)


@dataclass(frozen=True)
class Int8Pages:
    """A layer's pool of keys or values, (P, Hkv, PAGE, D), with a scale for each position and head:
    `x[p, h, i, d] = scales[p, h, i] * codes[p, h, i, d]`.

    codes     int8 (P, Hkv, PAGE, D), from -127 to 127
    scales    fp32 (P, Hkv, PAGE): the largest magnitude of the D values over 127; if one is not finite, neither is this
    unpacked  bf16 (P, Hkv, PAGE, D), which layers may share: where CUDA has pages for attention of prompts, which read
              them many times. None: a pool for each call
    """

    codes: Tensor
    scales: Tensor
    unpacked: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """(P, Hkv, PAGE, D)."""
        return self.codes.shape

    @property
    def dtype(self) -> torch.dtype:
        """torch.int8."""
        return self.codes.dtype


Pages = Tensor | Int8Pages
"""A layer's pool of pages: fp32 or bf16 (P, Hkv, PAGE, D), or int8."""

Weight = Tensor | QuantizedWeight
"""A full fp32 / bf16 / fp16 (N, K) tensor, or a quantized one."""


@dataclass(frozen=True)
class PackedLinear:
    """One (N, K) weight repacked into the tiling of a device's kernels by `ops.pack_linear`.

    `data` is owned by the device's module and means nothing to anyone else.
    `bits` is 4, 8, 16 or 32; `nbytes` is what one decode step streams for it. `pairs`: of two parts or
    halves, 8 rows of the first are followed by the same 8 of the second, so that a kernel with a gate has its up.
    """

    shape: tuple[int, int]
    bits: int
    group_size: int
    nbytes: int
    device: torch.device
    data: Any
    pairs: bool = False


Gate = Literal["silu", "tanh"]
"""What a linear of a gate and its up, in pairs, may end with: `swiglu`, or `geglu` of that form."""

After = Literal["gelu_tanh", "gelu_erf", "relu"]
"""What a linear after a norm may end with, number by number."""

PostNorm = tuple[Tensor, float]
"""Gain (K,) fp32 and eps of an RMSNorm that a layer's output takes before it is added to the residual stream."""


@dataclass(frozen=True)
class LinearStep:
    """One step of `ops.cuda.linear_chain`: `linear`, or with a gain or a post `norm_linear`, whose options these are.

    `x`, `residual` and `addend` are names: of what the chain is given, or "y0" for what step 0 gives and "h0" for the
    sum that its norm read.
    """

    weight: PackedLinear
    bias: Tensor | None = None
    gain: Tensor | None = None
    eps: float = 0.0
    gate: Gate | None = None
    plus_one: bool = False
    post: PostNorm | None = None
    centred: bool = False
    gain_bias: Tensor | None = None
    after: After | None = None
    x: str = "x"
    residual: str | None = None
    addend: str | None = None

    @property
    def norms(self) -> bool:
        """Whether it is a `norm_linear`."""
        return self.gain is not None or self.post is not None


def scheme(weight: Weight) -> tuple[object, ...]:
    """What weights have in common that `ops.pack_linear` can stack: how they are stored, and K."""
    if isinstance(weight, Tensor):
        return weight.dtype, weight.shape[-1]
    form = "minimum" if weight.minimum is not None else "symmetric" if weight.zero_point is None else "zero-point"
    return weight.bits, weight.group_size, weight.scale.dtype, form, weight.shape[1]


def prompt_tiles(counts: Sequence[int]) -> list[tuple[int, int]]:
    """The `tiles` of `ops.attention` for prompts of that many rows, one behind the other."""
    tiles, end = [], 0
    for count in counts:
        tiles += [(end + at, min(PROMPT_TILE, count - at)) for at in range(0, count, PROMPT_TILE)]
        end += count
    return tiles
