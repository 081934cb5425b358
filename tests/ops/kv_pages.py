"""A cache in positions, (S, Hkv, T, D), as the pages that ops take, and back: written apart from the code it tests."""

import numpy as np
import torch
from torch import Tensor

from nibblelm.ops import Int8Pages

PAGE = 64


def table_of(slots: int, capacity: int, device: torch.device | str = "cpu", seed: int | None = 0) -> Tensor:
    """A table for `capacity` positions of each slot: all pages of a pool in random order, or in theirs without a seed.

    One page of the pool belongs to no slot.
    """
    width = -(-capacity // PAGE)
    if seed is None:
        pages = torch.arange(slots * width)
    else:
        pages = torch.randperm(slots * width + 1, generator=torch.Generator().manual_seed(seed))[: slots * width]
    return pages.int().view(slots, width).to(device)


def paged(cache: Tensor, tables: Tensor) -> Tensor:
    """The pool that has each slot's positions on the pages of its table; NaN (codes: 77) where nothing is."""
    slots, heads, capacity, width = cache.shape
    nothing = torch.nan if cache.is_floating_point() else 77
    pool = torch.full((tables.numel() + 1, heads, PAGE, width), nothing, dtype=cache.dtype, device=cache.device)
    for slot in range(slots):
        for first in range(0, capacity, PAGE):
            part = cache[slot, :, first : first + PAGE]
            pool[int(tables[slot, first // PAGE]), :, : part.shape[1]] = part
    return pool


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows (..., D) by the format's definition, in NumPy: fp32, ties to even."""
    rows = x.detach().cpu().float().numpy()
    with np.errstate(invalid="ignore"):
        top = np.maximum(np.abs(rows).max(-1), np.float32(2.0**-100))  # NaN wins
        codes = np.rint(rows * (np.float32(127) / top)[..., None])
    codes = np.where(np.isfinite(top)[..., None], codes, 0).astype(np.int8)
    return torch.from_numpy(codes).to(x.device), torch.from_numpy(top / np.float32(127)).to(x.device)


def paged_int8(cache: Tensor, tables: Tensor) -> tuple[Int8Pages, Tensor]:
    """`paged` in int8, a row of NaN at a time where nothing is; and the cache that it stands for, in float64."""
    codes, scales = quantized(cache)
    pools = (paged(t, tables) for t in (codes, scales.unsqueeze(-1)))
    return Int8Pages(next(pools), next(pools).squeeze(-1)), codes.double() * scales.double().unsqueeze(-1)


def positions_of(pool: Tensor, tables: Tensor) -> Tensor:
    """The inverse: (S, Hkv, W * PAGE, D)."""
    return torch.stack([torch.cat([pool[page] for page in row], 1) for row in tables.tolist()])
