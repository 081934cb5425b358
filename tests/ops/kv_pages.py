"""A cache in positions, (S, Hkv, T, D), as the pages that ops take, and back: written apart from the code it tests."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from nibblelm.ops import Int8Pages, Pages

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
    _, heads, capacity, width = cache.shape
    nothing = torch.nan if cache.is_floating_point() else 77
    pool = torch.full((tables.numel() + 1, heads, PAGE, width), nothing, dtype=cache.dtype, device=cache.device)
    whole = torch.nn.functional.pad(cache, (0, 0, 0, tables.shape[1] * PAGE - capacity), value=nothing)
    pool[tables.flatten().long()] = whole.unflatten(2, (-1, PAGE)).transpose(1, 2).flatten(0, 1)
    return pool


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows (..., D) by the format's definition, in NumPy: fp32, ties to even."""
    rows = x.detach().cpu().float().numpy()
    with np.errstate(invalid="ignore"):
        top = np.maximum(np.abs(rows).max(-1), np.float32(2.0**-100))  # NaN wins
        codes = np.rint(rows * (np.float32(127) / top)[..., None])
    codes = np.where(np.isfinite(top)[..., None], codes, 0).astype(np.int8)
    return torch.from_numpy(codes).to(x.device), torch.from_numpy(top / np.float32(127)).to(x.device)


def paged_int8(cache: Tensor, tables: Tensor) -> Int8Pages:
    """`paged` in int8, with scales of NaN where nothing is."""
    codes, scales = (paged(t, tables) for t in _with_columns(*quantized(cache)))
    return Int8Pages(codes, scales.squeeze(-1))


def positions_of(pool: Pages, tables: Tensor) -> Tensor:
    """The inverse: (S, Hkv, W * PAGE, D); of int8 what it stands for, in float64."""
    if isinstance(pool, Int8Pages):
        codes, scales = (positions_of(t, tables) for t in _with_columns(pool.codes, pool.scales))
        return codes.double() * scales.double()
    return pool[tables.long()].transpose(1, 2).flatten(2, 3)


def moved(pool: Pages, tables: Tensor, to: Tensor) -> Pages:
    """The same positions on the pages of another table."""
    if isinstance(pool, Int8Pages):
        codes, scales = (paged(positions_of(t, tables), to) for t in _with_columns(pool.codes, pool.scales))
        return Int8Pages(codes, scales.squeeze(-1))
    return paged(positions_of(pool, tables), to)


def stored(pool: Pages) -> list[Tensor]:
    """The tensors of a pool."""
    return [pool.codes, pool.scales] if isinstance(pool, Int8Pages) else [pool]


def copied(pool: Pages) -> Any:
    return Int8Pages(*(t.clone() for t in stored(pool))) if isinstance(pool, Int8Pages) else pool.clone()


def same_bits(a: Pages, b: Pages) -> bool:
    """NaN too."""
    return all(torch.equal(x.view(torch.int8), y.view(torch.int8)) for x, y in zip(stored(a), stored(b), strict=True))


def _with_columns(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    return codes, scales.unsqueeze(-1)
