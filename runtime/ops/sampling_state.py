"""What `ops.sample` reads and updates."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

_WORDS = 11
"""Of 32 bits, that a row takes in `columns`."""


@dataclass(frozen=True)
class SamplingState:
    """What `ops.sample` reads and updates, a row per sequence; (M,) tensors on one device unless said otherwise.

    The parameters are those of `SamplingParams`; a captured program takes new ones by writing into the tensors.
    """

    columns: Tensor  # int32 (11 M,): the memory of all up to `frequency`, so that one copy moves them
    seeds: Tensor  # int64, the bits of an unsigned seed
    steps: Tensor  # int64, output tokens drawn so far; `sample` adds 1
    top_k: Tensor  # int32; 0: off
    temperature: Tensor  # fp32; 0: greedy
    top_p: Tensor  # fp32; 1: off
    min_p: Tensor  # fp32; 0: off
    repetition: Tensor  # fp32; 1: off
    presence: Tensor  # fp32; 0: off
    frequency: Tensor  # fp32; 0: off
    bias: Tensor | None = None  # fp32 (M, V), added to the logits
    prompt: Tensor | None = None  # uint8 (M, V), 1 where the prompt has the token
    counts: Tensor | None = None  # int32 (M, V), how often the output has the token; `sample` counts its result

    @classmethod
    def over(cls, columns: Tensor, *wide: Tensor | None) -> "SamplingState":
        """The state whose `columns` these are, with bias, prompt and counts if given."""
        rows = len(columns) // _WORDS
        longs, words = columns[: 4 * rows].view(torch.int64).view(2, rows), columns[4 * rows :].view(7, rows)
        return cls(columns, longs[0], longs[1], words[0], *words[1:].view(torch.float32).unbind(), *wide)

    @classmethod
    def greedy(cls, rows: int, device: torch.device, vocab_size: int = 0) -> "SamplingState":
        """Everything off, temperature 0; with a `vocab_size` also room for bias, prompt and counts."""
        dtypes = (torch.float32, torch.uint8, torch.int32) if vocab_size else ()
        wide = (torch.zeros(rows, vocab_size, dtype=dtype, device=device) for dtype in dtypes)
        state = cls.over(torch.zeros(_WORDS * rows, dtype=torch.int32, device=device), *wide)
        for column in (state.top_p, state.repetition):
            column.fill_(1)
        return state

    @property
    def rows(self) -> int:
        """M."""
        return self.temperature.shape[0]

    @property
    def wide(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """What has a number for each token of the vocabulary."""
        return self.bias, self.prompt, self.counts

    @property
    def vocab_size(self) -> int:
        """V of the tensors that have one, 0 without any."""
        return next((t.shape[1] for t in self.wide if t is not None), 0)

    def tensors(self) -> dict[str, Tensor | None]:
        """What `ops.sample` knows by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)[1:]}
