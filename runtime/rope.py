"""The tables of rotary embedding that a model's layers share."""

from collections.abc import Sequence

import torch

from nibblelm.config import DecoderConfig, Gap, RopeConfig
from nibblelm.errors import RequestError
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

    Angles may be elsewhere in the tables than at a row's position (`moves`), as `begin` finds from a request's prompt:
    where its length chooses them, in one of the tables that `reserve` makes room for, and where it has a gap.
    """

    def __init__(self, config: DecoderConfig, positions: int, device: torch.device) -> None:
        self._config, self._positions, self._device = config, positions, device
        self._ropes = _ropes(config)
        self._choosing = next((rope for rope in self._ropes if rope.chooses), None)
        self._tables: list[RopeTable] = []
        self.gap = config.gap
        self.moves = self._choosing is not None or self.gap is not None
        self.reserve(1)

    def reserve(self, slots: int) -> None:
        """Make room for the choices of that many sequences; what layers were given by `of` before is of no use."""
        if not self._tables or self._choosing is not None:
            args = self._config, self._positions, self._device
            self._tables = [RopeTable(rope, *args, _count(rope, slots)) for rope in self._ropes]
        self._offsets, self._gaps = [0] * slots, [(NO_GAP, 0)] * slots

    def of(self, layer: int) -> RopeTable | None:
        """The table of a layer."""
        wanted = self._config.rope_of(layer)
        return next((table for table in self._tables if table.rope == wanted), None)

    def choice(self, ids: Sequence[int]) -> int:
        """What a prompt chooses; requests that choose differently share no keys. RequestError without a gap to fill."""
        if self.gap is not None:
            gap_of(self.gap, ids)
        return 0 if self._choosing is None else self._choosing.choice(len(ids))

    def begin(self, slot: int, ids: Sequence[int], prompt: int) -> None:
        """`slot` is of a request whose prompt is the first `prompt` of `ids` from now on."""
        if self.gap is not None:
            self._gaps[slot] = gap_of(self.gap, ids[:prompt])
        elif self._choosing is not None:
            choice, number = self._choosing.choice(prompt), 0
            table = next(table for table in self._tables if table.rope.chooses)
            if choice:
                number = 1 + slot if self._choosing.type == "dynamic" else choice
                table.choose(number, choice)
            self._offsets[slot] = number * table.rows

    def rows(self, positions: Sequence[int], slots: Sequence[int]) -> list[list[int]]:
        """What a step needs to know of its tokens beyond their positions: the places of their angles; with a gap those
        of both streams, and how many tokens are its context."""
        if self.gap is not None:
            gaps = [(position, *self._gaps[slot]) for position, slot in zip(positions, slots, strict=True)]
            return [
                [position if position < context else at for position, context, at in gaps],
                [max(0, position + 1 - context) for position, context, _ in gaps],
                [context if context < NO_GAP else 0 for _, context, _ in gaps],
            ]
        if self._choosing is None:
            return []
        return [[position + self._offsets[slot] for position, slot in zip(positions, slots, strict=True)]]

    def reach(self, positions: int) -> None:
        """`RopeTable.reach` of all."""
        for table in self._tables:
            table.reach(positions)


NO_GAP = 1 << 30
"""The context of a sequence without a prompt."""


def gap_of(gap: Gap, ids: Sequence[int]) -> tuple[int, int]:
    """How many tokens of a prompt are context, and the place of the gap. RequestError where it names none."""
    mask = next((mask for mask in gap.masks if mask in ids), None)
    if mask is None or gap.begin not in ids:
        raise RequestError(
            f"the prompt has no gap to fill: this model needs the token {gap.begin} where its answer begins, and "
            f"one of {list(gap.masks)} before it, in the answer's place; its tokenizer adds both"
        )
    return ids.index(gap.begin), ids.index(mask)


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
