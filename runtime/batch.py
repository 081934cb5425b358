"""Requests that one runner decodes together, a step at a time."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.errors import RequestError
from nibblelm.request import Request, StreamPiece
from nibblelm.runner import Runner, SampledSteps
from nibblelm.sampler import Sampled, Sampler, device_sampling, token_logprobs, unusable_logits

MAX_BATCH = 16
"""Sequences decoded together; more prompts wait for a free slot."""


@dataclass(frozen=True)
class _Flight:
    """Requests (by index) whose decode steps sample on the device."""

    members: list[int]
    steps: SampledSteps


class Batch:
    """Prefills each request alone, decodes up to MAX_BATCH of them together.

    reuse: what a slot's cache holds of a prompt's beginning is not computed again.
    """

    def __init__(self, runner: Runner, requests: Sequence[Request], reuse: bool) -> None:
        self._runner, self._reuse = runner, reuse
        self._waiting = deque(enumerate(requests))
        self._free = deque(range(min(len(runner.history), MAX_BATCH)))
        self._active: dict[int, Request] = {}
        self._flight: _Flight | None = None

    @property
    def unfinished(self) -> bool:
        """Whether a request is waiting or decoding."""
        return bool(self._waiting or self._active)

    @torch.inference_mode()
    def step(self) -> list[tuple[int, StreamPiece]]:
        """One prefill or one step of decoding: (index of the request, piece) for each token."""
        active = self._active
        if self._waiting and self._free and not (self._flight and self._flight.steps.in_flight):
            index, request = self._waiting.popleft()
            request.slot, request.begun = self._free.popleft(), time.perf_counter()
            active[index] = request
            chosen = _choose({index: request}, self._prefill(request))
            request.first = time.perf_counter()
        elif self._runner.device.type == "cuda" and all(r.params.logprobs is None for r in active.values()):
            chosen = self._fly()
        else:
            self._flight = None  # what it holds on the device falls behind
            ids, slots = zip(*((r.sampled[-1].token_id, r.slot) for r in active.values()), strict=True)
            chosen = _choose(active, self._runner.decode(ids, slots))
        pieces = [(index, active[index].accept(token)) for index, token in chosen.items()]
        for index, piece in pieces:
            if piece.output is not None:
                self._free.append(active.pop(index).slot)
        return pieces

    def _prefill(self, request: Request) -> Tensor:
        most = request.params.prompt_logprobs
        if most is None:
            if self._reuse:
                request.start = self._runner.shared_prefix(request.ids, request.slot)
            return self._runner.prefill(request.ids, request.slot, request.start)
        rows = self._runner.prefill(request.ids, request.slot, every_row=True)
        scores = (token_logprobs(row, token, most) for row, token in zip(rows[:-1], request.ids[1:], strict=True))
        request.prompt_logprobs = [None, *scores]
        return rows[-1:]

    def _fly(self) -> dict[int, Sampled | RequestError]:
        """One step of decoding that samples on the device. When the batch changes, the step in flight comes first."""
        flight, active = self._flight, self._active
        changed = flight is not None and flight.members != list(active)
        if flight is None or (changed and not flight.steps.in_flight):
            state = device_sampling([r.sampler for r in active.values()], self._runner.model.config.vocab_size)
            ids, slots = [r.sampled[-1].token_id for r in active.values()], [r.slot for r in active.values()]
            flight, changed = _Flight(list(active), self._runner.sampled_steps(ids, slots, state)), False
        last = changed or all(len(r.sampled) + 1 >= r.most for r in active.values())
        tokens = zip(flight.members, flight.steps.next(last), strict=True)
        self._flight = None if changed else flight
        return {
            index: unusable_logits("not finite") if token < 0 else active[index].sampler.accept(token)
            for index, token in tokens
            if index in active
        }


def _choose(batch: dict[int, Request], logits: Tensor) -> dict[int, Sampled | RequestError]:
    """The next token of each request, from its row of logits (M, vocab), or why there is none."""
    samplers = [r.sampler for r in batch.values()]
    greedy: list[int] = ops.argmax(logits).tolist() if any(s.takes_argmax for s in samplers) else []
    chosen: dict[int, Sampled | RequestError] = {}
    with _one_torch_thread():
        for i, (index, sampler) in enumerate(zip(batch, samplers, strict=True)):
            try:
                chosen[index] = (
                    _argmax(sampler, logits[i], greedy[i]) if sampler.takes_argmax else sampler.sample(logits[i])
                )
            except RequestError as error:
                chosen[index] = error
    return chosen


def _argmax(sampler: Sampler, row: Tensor, token_id: int) -> Sampled:
    peak = float(row[token_id])
    if not isfinite(peak):  # the kernel's argmax passes over NaN
        raise unusable_logits(peak)
    return sampler.accept(token_id)


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Sampling is too small to share out: torch's threads would wait for each other and for the kernels' own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
