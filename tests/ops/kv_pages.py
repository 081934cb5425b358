"""A cache in positions, (S, Hkv, T, D), as the pages that ops take, and back: written apart from the code it tests."""

import torch
from torch import Tensor

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
    """The pool that has each slot's positions on the pages of its table; NaN where nothing is."""
    slots, heads, capacity, width = cache.shape
    pool = torch.full((tables.numel() + 1, heads, PAGE, width), torch.nan, dtype=cache.dtype, device=cache.device)
    for slot in range(slots):
        for first in range(0, capacity, PAGE):
            part = cache[slot, :, first : first + PAGE]
            pool[int(tables[slot, first // PAGE]), :, : part.shape[1]] = part
    return pool


def positions_of(pool: Tensor, tables: Tensor) -> Tensor:
    """The inverse: (S, Hkv, W * PAGE, D)."""
    return torch.stack([torch.cat([pool[page] for page in row], 1) for row in tables.tolist()])
