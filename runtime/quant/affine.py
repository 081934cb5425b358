"""The executable definition of the on-disk weight format, in plain PyTorch.

Source: the compressed-tensors `pack-quantized` layout. Codes and zero-points are the unsigned packed values, the
library's signed ones + 2^(bits-1). A zero-point lies in [0, 2^bits - 1], so every row or group can represent 0.
"""

from typing import Literal

import torch
from torch import Tensor

from nibblelm.ops.reference import unpack_codes
from nibblelm.ops.types import QuantizedWeight

SMALLEST_SCALE = {
    torch.float32: torch.finfo(torch.float32).tiny,
    torch.bfloat16: torch.finfo(torch.bfloat16).tiny,
    torch.float16: 2.0**-24,
}
"""Smallest scale written per dtype: its reciprocal must be finite in fp32 (which fp16 subnormals satisfy)."""


def round_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Positive fp64 scales rounded as they will be stored, still fp64: every reader sees exactly these."""
    rounded = scale.float().to(dtype).double()
    return rounded.clamp(SMALLEST_SCALE[dtype], torch.finfo(dtype).max)


def weight_range(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(..., K) -> minimum and maximum (..., 1) in fp64, widened to include 0."""
    low, high = weight.double().aminmax(dim=-1, keepdim=True)
    return low.clamp(max=0.0), high.clamp(min=0.0)


def scale_and_zero(low: Tensor, high: Tensor, bits: int, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The smallest scale whose codes cover [low, high], rounded to `dtype`, and the zero-point that goes with it.

    low <= 0 <= high  fp64, any shape; returns scale and zero-point as fp64 of that shape
    """
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scale = round_scale(torch.maximum(high / (top - middle), -low / middle), dtype)
        return scale, torch.full_like(scale, middle)
    scale = round_scale((high - low) / top, dtype)
    return scale, (-low / scale).round().clamp(0, top)


def round_codes(weight: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Nearest signed steps `code - zero` (ties to even) of fp32 weights, fp32.

    weight (..., K) fp32; scale and zero (..., 1). The reciprocal is taken first, as the kernel does.
    """
    steps = weight * (1.0 / scale.float())
    return torch.minimum(torch.maximum(steps, -zero.float()), 2**bits - 1 - zero.float()).round()


def squared_error(weight: Tensor, scale: Tensor, zero: Tensor, bits: int, importance: Tensor | None = None) -> Tensor:
    """Sum over the last dimension of (weight - dequantized)^2, fp64 (..., 1); differences are taken in fp32.

    importance  fp64 factors of the squares, of a shape that fits (..., K)
    """
    difference = weight - round_codes(weight, scale, zero, bits) * scale.float()
    squares = difference.double().square()
    return (squares if importance is None else squares * importance).sum(-1, keepdim=True)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes (R, C) -> int32 words (R, ceil(C / (32 / bits))), low code first; the tail is 0."""
    padded = torch.nn.functional.pad(codes.int(), (0, -codes.shape[1] % (32 // bits)))
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=codes.device)
    return (padded.view(codes.shape[0], -1, 32 // bits) << shifts).sum(-1, dtype=torch.int32)


def pack_zero_point(zero: Tensor, bits: int) -> Tensor:
    """Unsigned zero-points (N, G) -> int32 (ceil(N / (32 / bits)), G), packed along dimension 0."""
    return pack_codes(zero.T, bits).T.contiguous()


def pack(weight: Tensor, scale: Tensor, zero: Tensor | None, bits: Literal[4, 8], group_size: int) -> QuantizedWeight:
    """Quantize a real matrix with given scales and zero-points.

    weight (N, K) fp32 / bf16 / fp16; scale (N, G) in the dtype to store; zero (N, G) integers, None if symmetric
    """
    n, k = weight.shape
    width = k if group_size == -1 else group_size
    points = torch.full(scale.shape, 2 ** (bits - 1)) if zero is None else zero.int()
    column_scale = scale.repeat_interleave(width, 1)[:, :k]
    column_zero = points.repeat_interleave(width, 1)[:, :k]
    codes = round_codes(weight.float(), column_scale, column_zero, bits).int() + column_zero
    packed_zero = None if zero is None else pack_zero_point(points, bits)
    return QuantizedWeight(pack_codes(codes, bits), scale, packed_zero, bits, group_size, (n, k))


def unpack(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of packing: codes (N, K) int32, scale (N, G) as stored, zero-points (N, G) int32."""
    n, k = weight.shape
    codes = unpack_codes(weight.codes, weight.bits, k)
    if weight.zero_point is None:
        return codes, weight.scale, torch.full(weight.scale.shape, 2 ** (weight.bits - 1), dtype=torch.int32)
    return codes, weight.scale, unpack_codes(weight.zero_point.T.contiguous(), weight.bits, n).T
