"""The weight types the ops take: what is on disk (`QuantizedWeight`) and what a kernel reads (`PackedLinear`)."""

from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

from nibblelm import _cpu

PAGE: int = _cpu.PAGE
"""Positions of a page of the KV cache."""

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


Weight = Tensor | QuantizedWeight
"""A full fp32 / bf16 / fp16 (N, K) tensor, or a quantized one."""


@dataclass(frozen=True)
class PackedLinear:
    """One (N, K) weight repacked into the tiling of a device's kernels by `ops.pack_linear`.

    `data` is owned by the device's module and means nothing to anyone else.
    `bits` is 4, 8, 16 or 32; `nbytes` is what one decode step streams for it. `pairs`: of two parts, 8 rows of the
    first are followed by the same 8 of the second, so that a kernel that has a gate also has its up.
    """

    shape: tuple[int, int]
    bits: int
    group_size: int
    nbytes: int
    device: torch.device
    data: Any
    pairs: bool = False


@dataclass(frozen=True)
class LinearStep:
    """One step of `ops.cuda.linear_chain`: `linear`, or with a gain `norm_linear`."""

    weight: PackedLinear
    bias: Tensor | None = None
    gain: Tensor | None = None  # (K,) fp32: the residual stream takes the step's input and is normed
    eps: float = 0.0
    gated: bool = False  # with a gain: then `swiglu`
    plus_one: bool = False  # the gain is 1 + `gain`


@dataclass(frozen=True)
class SamplingState:
    """What `ops.sample` reads and updates, a row per sequence; (M,) tensors on one device unless said otherwise.

    The parameters are those of `SamplingParams`; a captured program takes new ones by writing into the tensors.
    """

    temperature: Tensor  # fp32; 0: greedy
    top_k: Tensor  # int32; 0: off
    top_p: Tensor  # fp32; 1: off
    min_p: Tensor  # fp32; 0: off
    repetition: Tensor  # fp32; 1: off
    presence: Tensor  # fp32; 0: off
    frequency: Tensor  # fp32; 0: off
    seeds: Tensor  # int64, the bits of an unsigned seed
    steps: Tensor  # int64, output tokens drawn so far; `sample` adds 1
    bias: Tensor | None = None  # fp32 (M, V), added to the logits
    prompt: Tensor | None = None  # uint8 (M, V), 1 where the prompt has the token
    counts: Tensor | None = None  # int32 (M, V), how often the output has the token; `sample` counts its result

    @classmethod
    def greedy(cls, rows: int, device: torch.device, vocab_size: int = 0) -> "SamplingState":
        """Everything off, temperature 0; with a `vocab_size` also room for bias, prompt and counts."""

        def filled(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        off, on = filled(0, torch.float32), filled(1, torch.float32)
        whole = [filled(0, dtype) for dtype in (torch.int32, torch.int64, torch.int64)]
        wide: list[Tensor | None] = [None, None, None]
        if vocab_size:
            dtypes = (torch.float32, torch.uint8, torch.int32)
            wide = [torch.zeros(rows, vocab_size, dtype=dtype, device=device) for dtype in dtypes]
        return cls(off, whole[0], on, off.clone(), on.clone(), off.clone(), off.clone(), whole[1], whole[2], *wide)

    @property
    def rows(self) -> int:
        """M."""
        return self.temperature.shape[0]

    @property
    def vocab_size(self) -> int:
        """V of the tensors that have one, 0 without any."""
        wide = [t for t in (self.bias, self.prompt, self.counts) if t is not None]
        return wide[0].shape[1] if wide else 0

    def tensors(self) -> list[Tensor | None]:
        """All fields in their order."""
        return [getattr(self, field.name) for field in fields(self)]
