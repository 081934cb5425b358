"""The tables of rotary embedding that a model's layers share."""

import torch

from nibblelm.config import DecoderConfig, RopeConfig
from nibblelm.memory import reserved
from nibblelm.ops.types import PAGE
from nibblelm.pages import page_count
from nibblelm.rope_scaling import growth, tables

BLOCK = 1024
"""Positions whose rows are made together."""


class RopeTable:
    """The cos and sin tables of one kind of rotary positions, (positions, rotated / 2) in fp32.

    On the CPU rows are computed when `reach` asks for them, at addresses that stay, so a long context limit costs
    nothing until it is used; on CUDA all at once. There is one for every position of the cache's last page.
    Where q grows with its position, q_cos and q_sin are its own tables.
    """

    def __init__(self, rope: RopeConfig, config: DecoderConfig, positions: int, device: torch.device) -> None:
        self._rope, self._made, self._width = rope, 0, rope.width(config.head_dim)
        self._growth = config.query_growth
        shape = (page_count(positions) * PAGE, self._width // 2)
        self.cos, self.sin = (reserved(shape, torch.float32, device) for _ in range(2))
        self.q_cos = self.q_sin = None
        if self._growth[0]:
            self.q_cos, self.q_sin = (reserved(shape, torch.float32, device) for _ in range(2))
        if device.type != "cpu":
            self.reach(shape[0])

    def reach(self, positions: int) -> None:
        """Make rows for at least that many positions, as far as there is room."""
        wanted = min(-(-positions // BLOCK) * BLOCK, self.cos.shape[0])
        while self._made < wanted:
            rows = slice(self._made, min(self._made + BLOCK, wanted))
            cos, sin = tables(self._rope, self._width, rows.start, rows.stop)
            self.cos[rows], self.sin[rows] = cos, sin
            if self.q_cos is not None and self.q_sin is not None:
                factor = growth(*self._growth, rows.start, rows.stop)
                self.q_cos[rows], self.q_sin[rows] = cos * factor, sin * factor
            self._made = rows.stop


class Rope:
    """The rotary tables that layers share; a family without rotary positions has none."""

    def __init__(self, config: DecoderConfig, positions: int, device: torch.device) -> None:
        self._config = config
        self._tables = [(rope, RopeTable(rope, config, positions, device)) for rope in _ropes(config)]

    def of(self, layer: int) -> RopeTable | None:
        """The table of a layer."""
        wanted = self._config.rope_of(layer)
        return next((table for rope, table in self._tables if rope == wanted), None)

    def reach(self, positions: int) -> None:
        """`RopeTable.reach` of all."""
        for _, table in self._tables:
            table.reach(positions)


def _ropes(config: DecoderConfig) -> list[RopeConfig]:
    """The kinds of rotary positions in a model."""
    found: list[RopeConfig] = []
    for rope in map(config.rope_of, range(config.layers)):
        if rope is not None and rope not in found:
            found.append(rope)
    return found


def rope_bytes(config: DecoderConfig, positions: int) -> int:
    """Bytes of the tables for that many positions."""
    each = 4 if config.query_growth[0] else 2
    return sum(each * positions * (rope.width(config.head_dim) // 2) * 4 for rope in _ropes(config))
