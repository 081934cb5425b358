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
    Where q grows with its position, q_cos and q_sin are its own tables. Where the prompt's length chooses the angles,
    `count` tables stand one after the other, each for one choice.
    """

    def __init__(
        self, rope: RopeConfig, config: DecoderConfig, positions: int, device: torch.device, count: int = 1
    ) -> None:
        self.rope, self._width, self._growth = rope, rope.width(config.head_dim), config.query_growth
        self.rows, self._lazy = page_count(positions) * PAGE, device.type == "cpu"
        self._made, self._choices = [0] * count, [0] * count
        shape = (count * self.rows, self._width // 2)
        self.cos, self.sin = (reserved(shape, torch.float32, device) for _ in range(2))
        self.q_cos = self.q_sin = None
        if self._growth[0]:
            self.q_cos, self.q_sin = (reserved(shape, torch.float32, device) for _ in range(2))
        if not self._lazy:
            self._fill(0, self.rows)

    def choose(self, table: int, choice: int) -> None:
        """Table number `table` is of that choice from now on."""
        if self._choices[table] != choice:
            self._choices[table], self._made[table] = choice, 0
        if not self._lazy:
            self._fill(table, self.rows)

    def reach(self, positions: int) -> None:
        """Make rows for at least that many positions, as far as there is room, of every table in use."""
        for table, choice in enumerate(self._choices):
            if table == 0 or choice:
                self._fill(table, min(-(-positions // BLOCK) * BLOCK, self.rows))

    def _fill(self, table: int, wanted: int) -> None:
        while (first := self._made[table]) < wanted:
            last = min(first + BLOCK, wanted)
            cos, sin = tables(self.rope, self._width, first, last, self._choices[table])
            rows = slice(table * self.rows + first, table * self.rows + last)
            self.cos[rows], self.sin[rows] = cos, sin
            if self.q_cos is not None and self.q_sin is not None:
                factor = growth(*self._growth, first, last)
                self.q_cos[rows], self.q_sin[rows] = cos * factor, sin * factor
            self._made[table] = last


class Rope:
    """The rotary tables that layers share; a family without rotary positions has none.

    Where the length of a prompt chooses the angles (`chooses`), a row's angles are not at its position but `begin`'s
    offset further, which `reserve` makes room for.
    """

    def __init__(self, config: DecoderConfig, positions: int, device: torch.device) -> None:
        self._config, self._positions, self._device = config, positions, device
        self._ropes = _ropes(config)
        self._choosing = next((rope for rope in self._ropes if rope.chooses), None)
        self._tables: list[RopeTable] = []
        self.reserve(1)

    @property
    def chooses(self) -> bool:
        """Whether a request's angles depend on the length of its prompt."""
        return self._choosing is not None

    def reserve(self, slots: int) -> None:
        """Make room for the choices of that many sequences; what layers were given by `of` before is of no use."""
        if not self._tables or self.chooses:
            args = self._config, self._positions, self._device
            self._tables = [RopeTable(rope, *args, _count(rope, slots)) for rope in self._ropes]

    def of(self, layer: int) -> RopeTable | None:
        """The table of a layer."""
        wanted = self._config.rope_of(layer)
        return next((table for table in self._tables if table.rope == wanted), None)

    def choice(self, prompt: int) -> int:
        """What a prompt of that many tokens chooses; requests that choose differently share no keys."""
        return 0 if self._choosing is None else self._choosing.choice(prompt)

    def begin(self, slot: int, prompt: int) -> int:
        """`slot` is of a request with a prompt of that many tokens from now on. Returns the offset of its angles."""
        choice = self.choice(prompt)
        if not choice or self._choosing is None:
            return 0
        table = next(table for table in self._tables if table.rope.chooses)
        number = 1 + slot if self._choosing.type == "dynamic" else choice
        table.choose(number, choice)
        return number * table.rows

    def reach(self, positions: int) -> None:
        """`RopeTable.reach` of all."""
        for table in self._tables:
            table.reach(positions)


def _count(rope: RopeConfig, slots: int) -> int:
    """Tables of one kind of rotary positions: of training, and of what prompts beyond its context choose."""
    return 1 + slots if rope.type == "dynamic" else 2 if rope.chooses else 1


def _ropes(config: DecoderConfig) -> list[RopeConfig]:
    """The kinds of rotary positions in a model."""
    found: list[RopeConfig] = []
    for rope in map(config.rope_of, range(config.layers)):
        if rope is not None and rope not in found:
            found.append(rope)
    return found


def rope_bytes(config: DecoderConfig, positions: int, slots: int) -> int:
    """Bytes of the tables for that many positions and sequences."""
    each = 4 if config.query_growth[0] else 2
    widths = [rope.width(config.head_dim) // 2 * _count(rope, slots) for rope in _ropes(config)]
    return each * positions * sum(widths) * 4
