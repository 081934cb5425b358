"""Steps that compute prompts: what they read, and those that were captured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nibblelm.config import DecoderConfig
from nibblelm.decode_steps import IDLE
from nibblelm.pages import NO_PAGE

PREFILL_CHUNK = {"cpu": 512, "cuda": 2048}
"""Most tokens of one prefill step; where a prompt is cut changes no bit."""

PROGRAM_ROWS = (16, 32, *range(64, 513, 64), *range(640, PREFILL_CHUNK["cuda"] + 1, 128))
"""Rows of prefill steps that CUDA replays, filled up. Called one by one their 300 kernels keep Python, and so all who
read tokens, waiting for 10 to 25 ms."""


MIXED_ROWS = (64, 128, 192, 256, 384, 512)
"""The same of steps that generate besides: larger ones take the time of many that only generate, and gain little."""


def program_bytes(config: DecoderConfig, device: torch.device, rows: int) -> int:
    """About what captured programs keep: the intermediate results of the largest, over which the others write theirs,
    and of all of them together the logits of so many rows."""
    return 4 * config.vocab_size * rows + workspace_bytes(config, device) if device.type == "cuda" else 0


def workspace_bytes(config: DecoderConfig, device: torch.device) -> int:
    """About what one prefill chunk takes in activations, with the digits and shared sums of its matrix products."""
    widest = max(2 * config.intermediate_size, config.heads * config.head_dim * 3)
    return PREFILL_CHUNK[device.type] * (4 * config.hidden_size + 3 * widest) * 4 + (128 << 20)


def filled_up(tiles: Sequence[tuple[int, int]]) -> int:
    """Tiles of the program that takes these."""
    return 1 << (len(tiles) - 1).bit_length()


@dataclass(frozen=True)
class Prompt:
    """ids[start:] are to be computed, at positions start, start + 1 ... of `slot`, whose cache holds ids[:start].

    pages  of the slot from now on, as `Runner.set_pages` has them; none: those that it has
    """

    ids: Sequence[int]
    slot: int = 0
    start: int = 0
    pages: Sequence[int] = ()


@dataclass(frozen=True)
class PromptStep:
    """A captured step of prompts, which begins with the copy of its inputs: nothing is between them and the kernels."""

    staged: Tensor  # int32, pinned: the inputs, one behind the other
    program: Any
    result: Tensor
    done: torch.cuda.Event  # behind the newest replay


@dataclass(frozen=True)
class PromptInputs:
    """What a step of prompts reads, int32.

    token_rows  numbers for each token: its id, position and slot, and `more` of positions and slots
    width       of a page table
    nobody      the slot whose table nobody reads
    """

    token_rows: int
    width: int
    nobody: int
    more: Callable[[Sequence[int], Sequence[int]], Sequence[Sequence[int]]]

    def sizes(self, rows: int, room: int, generated: int = 0) -> list[int]:
        """Of `rows` tokens; of `room` tiles; for each prompt, of the row of its last token, behind which come those of
        `generated` tokens, and the slot and the table of those whose pages are named."""
        return [self.token_rows * rows, 2 * room, room + generated, room, room * self.width]

    def put(
        self,
        inputs: Tensor,
        prompts: Sequence[Prompt],
        tiles: Sequence[tuple[int, int]],
        rows: int,
        room: int,
        generated: int = 0,
    ) -> None:
        """Write them, filled up, into `inputs` on the host."""
        tokens, table, wanted, slots, tables = (
            part.numpy() for part in inputs.split(self.sizes(rows, room, generated))
        )
        tokens, table, tables = tokens.reshape(-1, rows), table.reshape(room, 2), tables.reshape(room, -1)
        tokens[:], table[:], wanted[:room] = 0, 0, 0
        wanted[room:] = range(rows, rows + generated)
        tokens[2], slots[:], tables[:] = IDLE, self.nobody, NO_PAGE
        end = 0
        for i, p in enumerate(prompts):
            first, end = end, end + len(p.ids) - p.start
            new = tokens[:, first:end]
            new[0], new[1], new[2] = p.ids[p.start :], range(p.start, len(p.ids)), p.slot
            wanted[i] = end - 1
            if p.pages:
                slots[i], tables[i, : len(p.pages)] = p.slot, p.pages
        if self.token_rows > 3:
            _, positions, of_slots = tokens[:3, :end].tolist()
            tokens[3:, :end] = self.more(positions, of_slots)
        for i, tile in enumerate(tiles):  # of a step without prompts none
            table[i] = tile
