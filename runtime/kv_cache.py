"""Keys and values of past tokens: per layer two pools of pages, and for each sequence a table of its pages."""

from collections.abc import Mapping, Sequence
from copy import copy

import torch
from torch import Tensor

from nibblelm.memory import reserved
from nibblelm.ops import PAGE, Int8Pages, Pages, to_device
from nibblelm.pages import NO_PAGE, page_count

FEW = 3
"""Slots whose tables go to a device one by one: as many calls as one copy of them all and the kernels behind it."""


class KVCache:
    """A pool of pages for `slots` sequences of up to `capacity` positions, rounded up to whole pages.

    `keys[layer]` and `values[layer]` are (pages, kv heads, PAGE, head_dim) of `dtype`; torch.int8 makes them Int8Pages.
    `tables` (slots, W) int32 says which page has which positions of a slot (`nibblelm.ops`): NO_PAGE after the last;
    entries beyond mean nothing, and on the CPU take no memory. Without `pages` there are enough for all slots, which
    have them in their order; else no slot has any until `set_pages`. On the CPU the pool is reserved address space, and
    memory is taken as pages are written, so a long context limit costs nothing until it is used. On CUDA it is
    allocated at once.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        pages: int | None = None,
    ) -> None:
        width = page_count(capacity)
        self.slots, self.capacity, self.pages = slots, capacity, slots * width if pages is None else pages
        shape = (self.pages, kv_heads, PAGE, head_dim)
        self.keys, self.values = (_pools(layers, shape, dtype, device) for _ in range(2))
        self._rows = reserved((slots + 1, width), torch.int32, device)  # the last one is nobody's
        self.tables = self._rows[:slots]
        if pages is None:
            self.tables.copy_(torch.arange(self.pages, dtype=torch.int32).view(slots, width))
        else:
            self.tables[:, 0] = NO_PAGE

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Give `slot` these pages for its positions from 0 on, in the device's order of work; it has no others.

        NO_PAGE stands for one that attention reads no more: the CPU's kernels refuse to, those of CUDA would read some
        other page, and none writes there. Raises ValueError where there is no such page, or one too many for the slot.
        """
        self.set_tables({slot: pages})

    def set_tables(self, pages: Mapping[int, Sequence[int]]) -> None:
        """`set_pages` for several slots. The host waits for nothing that is under way."""
        width = self.tables.shape[1]
        for slot, held in pages.items():
            if len(held) > width or any(not NO_PAGE <= page < self.pages for page in held):
                raise ValueError(
                    f"pages {list(held)} for slot {slot}: a slot takes at most {width} of the pages 0 to "
                    f"{self.pages - 1}"
                )
        with torch.inference_mode():  # the tables may have been made in it
            if self.tables.device.type == "cpu" or len(pages) <= FEW:
                for slot, held in pages.items():
                    row = torch.tensor([*held, NO_PAGE][:width], dtype=torch.int32)
                    to_device(row, self.tables.device, out=self.tables[slot, : len(row)])
            else:
                columns = min(1 + max(map(len, pages.values())), width)
                padded = [[slot, *held, *[NO_PAGE] * (columns - len(held))] for slot, held in pages.items()]
                rows = to_device(torch.tensor(padded, dtype=torch.int32), self.tables.device)
                self.tables[:, :columns].index_copy_(0, rows[:, 0].long(), rows[:, 1:])

    def within(self, positions: int) -> "KVCache":
        """The same pages, with tables of so many positions: for steps none of whose rows has more."""
        narrow = copy(self)
        narrow.capacity, narrow.tables = positions, self.tables[:, : page_count(positions)]
        return narrow

    def write_tables(self, slots: Tensor, rows: Tensor) -> None:
        """Make rows (n, W) int32 the tables of `slots` (n,), as a part of a step; slot `self.slots` is nobody's."""
        with torch.inference_mode():
            self._rows.index_copy_(0, slots.long(), rows)


def _pools(layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Pages]:
    """The keys or the values of all layers."""
    if dtype != torch.int8:
        return [reserved(shape, dtype, device) for _ in range(layers)]
    unpacked = reserved(shape, torch.bfloat16, device) if device.type == "cuda" else None
    scales = [reserved(shape[:3], torch.float32, device) for _ in range(layers)]
    return [Int8Pages(reserved(shape, dtype, device), scale, unpacked) for scale in scales]


def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one position of one sequence has in all layers: what a step reads."""
    scale = torch.float32.itemsize if dtype == torch.int8 else 0
    return 2 * layers * kv_heads * (head_dim * dtype.itemsize + scale)


def bytes_per_page(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """Bytes that a page takes in a KVCache, with those of its place in the pools that layers share."""
    stored = bytes_per_token(layers, kv_heads, head_dim, dtype)
    shared = dtype == torch.int8 and device.type == "cuda"
    return PAGE * (stored + (bytes_per_token(1, kv_heads, head_dim, torch.bfloat16) if shared else 0))
