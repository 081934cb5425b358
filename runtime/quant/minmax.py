"""Round to nearest over the full range of each row or group."""

import torch
from torch import Tensor

from nibblelm.quant.affine import scale_and_zero, weight_range


def choose(weight: Tensor, bits: int, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scale and zero-point (..., 1) in fp64 of fp32 groups (..., K); a group of zeros gets scale 1.

    dtype  of the stored scale; the zero-point is chosen against the scale rounded to it
    """
    low, high = weight_range(weight)
    scale, zero = scale_and_zero(low, high, bits, symmetric, dtype)
    empty = (low == 0) & (high == 0)
    return scale.masked_fill(empty, 1.0), zero.masked_fill(empty, 2 ** (bits - 1))
