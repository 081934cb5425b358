"""Inverse frequencies of rotary embedding under each context-extension rule, and the cos / sin tables.

Computed in fp32 in the same order as the source implementations, so that positions in the ten thousands agree too.
"""

import math

import torch
from torch import Tensor

from nibblelm.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, width: int, choice: int = 0) -> tuple[Tensor, float]:
    """Frequencies (width / 2,) in radians per position, fp32, and the factor on cos and sin.

    choice  `RopeConfig.choice` of the request's prompt
    """
    base = 1.0 / (rope.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    if rope.type == "linear":
        return base / _numbers(rope, "factor")[0], 1.0
    if rope.type == "llama3":
        return _llama3(base, rope), 1.0
    if rope.type == "yarn":
        return _yarn(base, rope, width)
    if rope.type == "longrope":
        return _longrope(rope, width, choice)
    if rope.type == "dynamic" and choice:
        return _dynamic(rope, width, choice), 1.0
    return base, 1.0


def _numbers(rope: RopeConfig, *names: str) -> list[float]:
    return [float(rope.parameters[name] or 0.0) for name in names]


def _llama3(base: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are slowed by `factor`, short ones kept, those between interpolated."""
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, original = _numbers(rope, *names)
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * base / factor + smooth * base
    slow = torch.where(wavelength > original / low, base / factor, between)
    return torch.where(wavelength < original / high, base, slow)


def _yarn(base: Tensor, rope: RopeConfig, width: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al. 2023): a ramp over dimensions from extrapolation to interpolation, and an attention factor."""
    factor, original, mscale, mscale_all = _numbers(
        rope, "factor", "original_max_position_embeddings", "mscale", "mscale_all_dim"
    )
    fast, slow = rope.parameters["beta_fast"] or 32.0, rope.parameters["beta_slow"] or 1.0

    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original context."""
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(fast), dimension(slow)
    if rope.parameters["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = high - low or 0.001
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    attention = rope.parameters["attention_factor"]
    if attention is None:
        attention = (
            _temperature(factor, mscale) / _temperature(factor, mscale_all)
            if mscale and mscale_all
            else _temperature(factor, 1.0)
        )
    return base / factor * ramp + base * (1 - ramp), float(attention)


def _dynamic(rope: RopeConfig, width: int, length: int) -> Tensor:
    """Dynamic NTK (bloc97, emozilla 2023): a base that grows with the length of the prompt."""
    factor, original = _numbers(rope, "factor", "original_max_position_embeddings")
    longer = factor * torch.tensor(length) / original - (factor - 1)
    theta = rope.theta * longer ** (width / (width - 2))
    return 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width))


def _longrope(rope: RopeConfig, width: int, choice: int) -> tuple[Tensor, float]:
    """LongRoPE (Ding et al. 2024): a factor for each frequency, others beyond the original context."""
    factors = torch.tensor(rope.parameters["long_factor" if choice else "short_factor"], dtype=torch.float32)
    powers = rope.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    factor, original = _numbers(rope, "factor", "original_max_position_embeddings")
    attention = rope.parameters["attention_factor"]
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (factors * powers), float(attention)


def _temperature(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def growth(beta: float, period: float, first: int, last: int) -> Tensor:
    """(last - first, 1): what q is multiplied by at each position, 1 + beta log(1 + floor(position / period))."""
    return 1 + beta * torch.log(1 + torch.floor(torch.arange(first, last)[:, None] / period))


def tables(rope: RopeConfig, width: int, first: int, last: int, choice: int = 0) -> tuple[Tensor, Tensor]:
    """cos and sin (last - first, width / 2) of the positions from `first` to before `last`, fp32."""
    frequencies, factor = inverse_frequencies(rope, width, choice)
    angles = torch.arange(first, last, dtype=torch.float32)[:, None] * frequencies[None, :]
    return angles.cos() * factor, angles.sin() * factor
