"""Runs a model against its KV cache: chunked prefill, and decode steps captured once per batch size and replayed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.config import DecoderConfig
from nibblelm.errors import RequestError
from nibblelm.kv_cache import KVCache
from nibblelm.layers import Step

PREFILL_CHUNK = {"cpu": 512, "cuda": 2048}
"""Tokens per prefill step, fixed so that a prompt is always cut in the same places."""


class DecoderModel(Protocol):
    """What models/<type>.py exports as `Model`."""

    config: DecoderConfig

    def forward(self, step: Step, rows: slice = ...) -> Tensor: ...


@dataclass(frozen=True)
class _Captured:
    """One decode step for M sequences: its input buffers, its program and its logits, all at fixed addresses."""

    rows: Tensor  # (3, M) int32: ids, positions, slots
    program: Any
    logits: Tensor

    def load(self, ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> None:
        self.rows.copy_(torch.tensor((ids, positions, slots), dtype=torch.int32))


class Runner:
    """A model with room for `slots` sequences of `capacity` positions.

    `history[slot]` holds the token ids whose keys and values are in the cache.
    """

    def __init__(self, model: DecoderModel, device: torch.device, kv_dtype: torch.dtype, capacity: int) -> None:
        self.model, self.device, self.kv_dtype, self.capacity = model, device, kv_dtype, capacity
        self.history: list[list[int]] = []
        self._captured: dict[int, _Captured] = {}
        self.reserve(1)

    def reserve(self, slots: int) -> None:
        """Make room for at least `slots` sequences; a growth empties the cache."""
        if slots <= len(self.history):
            return
        c = self.model.config
        self._captured.clear()
        self.history = [[] for _ in range(slots)]
        self.cache = KVCache(c.layers, slots, c.kv_heads, self.capacity, c.head_dim, self.kv_dtype, self.device)

    def prefill(self, ids: Sequence[int], slot: int = 0, start: int = 0, every_row: bool = False) -> Tensor:
        """Run ids[start:] at positions start, start + 1 ... of `slot`, whose cache must already hold ids[:start].

        Returns the logits (1, vocab) of the last token, or (len(ids) - start, vocab) of all; fp32.
        """
        if start >= len(ids) or len(ids) > self.capacity:
            raise RequestError(
                f"prefill of {len(ids)} tokens from {start}: the cache has room for 1 to {self.capacity}"
            )
        self.history[slot] = list(ids[:start])
        chunk, parts = PREFILL_CHUNK[self.device.type], []
        for first in range(start, len(ids), chunk):
            last = min(first + chunk, len(ids))
            new = self._rows(ids[first:last], range(first, last), [slot] * (last - first))
            wanted = slice(None) if every_row else slice(last - first - 1, None)
            logits = self.model.forward(Step(new[0], new[1], new[2], self.cache), wanted)
            if every_row or last == len(ids):
                parts.append(logits)
            self.history[slot] += ids[first:last]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def decode(self, ids: Sequence[int], slots: Sequence[int]) -> Tensor:
        """Feed one token to each of M slots. Returns logits (M, vocab), fp32, valid until the next call."""
        positions = [len(self.history[slot]) for slot in slots]
        captured = self._captured.get(len(ids))
        if captured is None:
            captured = self._captured[len(ids)] = self._capture(ids, positions, slots)
        captured.load(ids, positions, slots)
        captured.program.replay()
        for slot, token in zip(slots, ids, strict=True):
            self.history[slot].append(token)
        return captured.logits

    def kernels_per_step(self, batch: int) -> int:
        """Kernels of a captured decode step for `batch` sequences, which must have run."""
        return len(self._captured[batch].program)

    def _capture(self, ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> _Captured:
        rows = self._rows(ids, positions, slots)
        with ops.capture(self.device) as program:
            logits = self.model.forward(Step(rows[0], rows[1], rows[2], self.cache))
        return _Captured(rows, program, logits)

    def _rows(self, ids: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> Tensor:
        return torch.tensor((ids, positions, slots), dtype=torch.int32, device=self.device)
