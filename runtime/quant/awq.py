"""Activation-aware scaling (AWQ, Lin et al. 2024): columns that see large inputs get larger weights before rounding.

Column k of the matrices that read an input is multiplied by s_k and what makes the input divides by it, which changes
nothing but the rounding. s = magnitude^alpha, with the alpha of least error in the output.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from nibblelm.checkpoint import Scheme
from nibblelm.quant import minmax
from nibblelm.quant.affine import round_codes

STEPS = 20


def search(
    weights: Sequence[tuple[Tensor, Scheme | None]], moment: Tensor, magnitude: Tensor, dtype: torch.dtype
) -> Tensor:
    """The factors s (K,) fp64 of (N, K) matrices that read one input.

    moment (K, K) is the input's second moment, magnitude (K,) its mean absolute value; dtype  of the stored scales
    """
    best, least = torch.ones_like(magnitude, dtype=torch.float64), float("inf")
    floor = magnitude.double().clamp(min=1e-4 * float(magnitude.max()) + 1e-30)
    for step in range(STEPS):
        factors = floor ** (step / STEPS)
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = sum(
            _error(weight, factors.float(), scheme, moment.float(), dtype)
            for weight, scheme in weights
            if scheme is not None
        )
        if error < least:
            best, least = factors, error
    return best


def _error(weight: Tensor, factors: Tensor, scheme: Scheme, moment: Tensor, dtype: torch.dtype) -> float:
    """Sum over rows of e H e^T after rounding to nearest."""
    scaled = (weight * factors).view(len(weight), -1, weight.shape[1] if scheme.group_size == -1 else scheme.group_size)
    scale, zero = minmax.choose(scaled, scheme.bits, scheme.symmetric, dtype)
    rounded = round_codes(scaled, scale, zero, scheme.bits) * scale.float()
    error = weight - rounded.view(weight.shape) / factors
    return float((error @ moment * error).sum())
