"""The clip of least squared error, searched per row or group.

First the whole range, then the range clipped symmetrically to +-c for c a quarter octave smaller each time (an end
inside the clip stays where it is, so a lone outlier on one side moves only that side), then scale and zero-point
around the best by sixteenths and sixty-fourths of an octave. A candidate replaces the best only when its error is
lower, so no row is worse than with min/max.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from nibblelm.quant import minmax
from nibblelm.quant.affine import round_scale, scale_and_zero, squared_error, weight_range

QUARTER_OCTAVE = 0.8408964152537145
COARSE = 16
FINE = (1.0442737824274138, 1.0108892860517005)
REACH = 3


def choose(
    weight: Tensor, bits: int, symmetric: bool, dtype: torch.dtype, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Scale and zero-point (..., 1) in fp64 of fp32 groups (..., K). The C++ kernel makes the same choices.

    importance  factors of the squared errors (`squared_error`), which the kernel does not have
    """
    scale, zero = minmax.choose(weight, bits, symmetric, dtype)
    error = squared_error(weight, scale, zero, bits, importance)

    def keep_better(candidate_scale: Tensor, candidate_zero: Tensor) -> None:
        nonlocal scale, zero, error
        candidate_error = squared_error(weight, candidate_scale, candidate_zero, bits, importance)
        better = candidate_error < error
        scale = torch.where(better, candidate_scale, scale)
        zero = torch.where(better, candidate_zero, zero)
        error = torch.where(better, candidate_error, error)

    for candidate in _coarse(weight, bits, symmetric, dtype):
        keep_better(*candidate)
    for ratio in FINE:
        centre_scale, centre_zero = scale, zero
        for shift in (0,) if symmetric else (-1, 0, 1):
            step = centre_scale
            for _ in range(REACH):
                step = step / ratio
            for _ in range(2 * REACH + 1):
                keep_better(round_scale(step, dtype), (centre_zero + shift).clamp(0, 2**bits - 1))
                step = step * ratio
    return scale, zero


def _coarse(weight: Tensor, bits: int, symmetric: bool, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    low, high = weight_range(weight)
    clip = torch.maximum(-low, high)
    # Constant and ternary rows are exact with the magnitude itself as the scale.
    middle = torch.full_like(low, 2 ** (bits - 1))
    yield round_scale(clip, dtype), middle if symmetric else (low < 0).double()
    for _ in range(COARSE):
        clip = clip * QUARTER_OCTAVE
        yield scale_and_zero(torch.maximum(low, -clip), torch.minimum(high, clip), bits, symmetric, dtype)
