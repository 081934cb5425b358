"""Computes the steps that the scheduler plans, and chooses their tokens: on the device where it can, else on the host.

On CUDA the sequences that sample on the device run as one flight, which stays a step ahead of the host for as long as
its members stay the same. The host samples for the others: those that report log-probabilities, whose draws must not
depend on who is beside them, and those that compute tokens again after preemption, which draw nothing.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite

import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.errors import RequestError
from nibblelm.request import LogitsRequest, Request
from nibblelm.runner import Runner, SampledSteps
from nibblelm.sampler import Sampled, Sampler, SamplingParams, device_sampling, unusable_logits
from nibblelm.scheduler import Chunk, Plan, Scheduler, Sequence

STEP_ROWS = {"cpu": (), "cuda": (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)}
"""Rows that a decode step is filled up to with rows that nobody reads: on CUDA a program is captured for each count
that occurs, which takes longer than a step and keeps memory; on the CPU a row costs more than its program."""

Choice = Sampled | RequestError | None
"""A token, why there is none, or None: the prompt was all that was to be computed."""


class Executor:
    """Steps of one runner, whose last slot and last page the scheduler does not have: they are of rows nobody reads.

    Each sequence's `owner` is its Request or LogitsRequest.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, step_rows: tuple[int, ...] | None = None) -> None:
        self._runner, self._scheduler = runner, scheduler
        self._step_rows = STEP_ROWS[runner.device.type] if step_rows is None else step_rows
        self._spare = len(runner.history) - 1
        if self._step_rows:
            runner.set_pages(self._spare, [runner.cache.pages - 1] * runner.tables.shape[1])
        self._members: list[Sequence] = []  # of the flight
        self._flight: SampledSteps | None = None

    def run(self, plan: Plan) -> Iterator[tuple[Sequence, Choice]]:
        """Compute a step. Yields each sequence that is due a token with what was chosen for it, as soon as it is."""
        for s in plan.moved:
            self._runner.set_pages(s.slot, s.pages)
            self._runner.set_prompt(s.slot, s.ids, s.prompt)
        if self._runner.samples_on_device:
            flying = [s for s in plan.decodes if s.at_end and s.owner.params.logprobs is None]
            hosted = [s for s in plan.decodes if not s.at_end or s.owner.params.logprobs is not None]
            yield from self._fly(flying, any(c.last == c.sequence.prompt for c in plan.chunks))
        else:
            hosted = plan.decodes
        if hosted:
            yield from self._decode(hosted)
        ended: list[tuple[Sequence, Tensor]] = []
        for chunk in plan.chunks:
            logits = self._prefill(chunk)
            if chunk.sequence.computed < len(chunk.sequence.ids):
                continue
            if isinstance(chunk.sequence.owner, LogitsRequest):
                yield chunk.sequence, None
            else:
                ended.append((chunk.sequence, logits[-1:]))
        yield from self._first_tokens(ended)

    def _prefill(self, chunk: Chunk) -> Tensor:
        s = chunk.sequence
        request: Request | LogitsRequest = s.owner
        request.begin()
        every_row = request.every_row
        logits = self._runner.prefill(s.ids[: chunk.last], s.slot, chunk.first, every_row)
        self._scheduler.advance(s, chunk.last)
        if every_row:
            request.take_rows(chunk.first, logits)
        return logits

    def _first_tokens(self, ended: list[tuple[Sequence, Tensor]]) -> Iterator[tuple[Sequence, Choice]]:
        """The tokens after prompts, from the logits (1, vocab) of each: all together, once the device has its work."""
        on_device = [self._runner.samples_on_device and s.owner.params.logprobs is None for s, _ in ended]
        for choose, device in ((_choose_on_device, True), (_choose, False)):
            members = [pair for pair, own in zip(ended, on_device, strict=True) if own is device]
            if members:
                choices = choose([s.owner.sampler for s, _ in members], torch.cat([row for _, row in members]))
                for (s, _), choice in zip(members, choices, strict=True):
                    s.owner.prompt_done(s.reused)
                    yield s, choice

    def _decode(self, members: list[Sequence]) -> Iterator[tuple[Sequence, Choice]]:
        logits = self._runner.decode(*self._rows(members))[: len(members)]
        due = [(i, s) for i, s in enumerate(members) if s.at_end]
        for s in members:
            self._scheduler.advance(s, s.computed + 1)
        if len(due) < len(members):
            logits = logits[[i for i, _ in due]]
        yield from zip((s for _, s in due), _choose([s.owner.sampler for _, s in due], logits), strict=True)

    def _fly(self, wanted: list[Sequence], more_to_come: bool) -> Iterator[tuple[Sequence, Choice]]:
        """A step of the flight. When its members change, the step that it is ahead is used up first."""
        flight, members = self._flight, self._members
        if flight is not None and members != wanted and flight.in_flight:
            self._flight = None
            tokens = flight.next(last=True)
        elif wanted:
            if flight is None or members != wanted:
                flight, members = self._launched(wanted), wanted
            tokens = flight.next(last=more_to_come or any(len(s.ids) + 1 >= s.limit for s in members))
        else:
            self._flight = None
            return
        self._runner.history[self._spare].clear()  # what those rows are fed takes no room
        for s, token in zip(members, tokens, strict=False):
            if s.at_end:  # else it ended, or lost its pages, while the step was under way
                self._scheduler.advance(s, s.computed + 1)
                yield s, _accepted(s.owner.sampler, token)

    def _launched(self, members: list[Sequence]) -> SampledSteps:
        ids, slots = self._rows(members)
        vocab_size = self._runner.model.config.vocab_size
        greedy = Sampler(SamplingParams(temperature=0), vocab_size)
        samplers = [s.owner.sampler for s in members] + [greedy] * (len(ids) - len(members))
        self._members = members
        self._flight = self._runner.sampled_steps(ids, slots, device_sampling(samplers, vocab_size))
        return self._flight

    def _rows(self, members: list[Sequence]) -> tuple[list[int], list[int]]:
        """Ids and slots of a step, filled up. What a flight wrote for sequences that went on alone is forgotten."""
        for s in members:
            del self._runner.history[s.slot][s.computed :]
        self._runner.history[self._spare].clear()
        more = next((count for count in self._step_rows if count >= len(members)), len(members)) - len(members)
        return [s.ids[s.computed] for s in members] + [0] * more, [s.slot for s in members] + [self._spare] * more


def _choose_on_device(samplers: list[Sampler], logits: Tensor) -> list[Sampled | RequestError]:
    """`_choose` by the kernel that draws the tokens to come."""
    state = device_sampling(samplers, logits.shape[1])
    moved = {
        f.name: t.to(logits.device) for f in dataclasses.fields(state) if (t := getattr(state, f.name)) is not None
    }
    tokens: list[int] = ops.sample(logits, dataclasses.replace(state, **moved)).tolist()
    return [_accepted(sampler, token) for sampler, token in zip(samplers, tokens, strict=True)]


def _accepted(sampler: Sampler, token: int) -> Sampled | RequestError:
    """What the device chose: below 0 where no logit is finite."""
    return unusable_logits("not finite") if token < 0 else sampler.accept(token)


def _choose(samplers: list[Sampler], logits: Tensor) -> list[Sampled | RequestError]:
    """The next token of each sequence, from its row of logits (M, vocab), or why there is none."""
    greedy: list[int] = ops.argmax(logits).tolist() if any(s.takes_argmax for s in samplers) else []
    chosen: list[Sampled | RequestError] = []
    with _one_torch_thread():
        for i, sampler in enumerate(samplers):
            try:
                chosen.append(
                    _argmax(sampler, logits[i], greedy[i]) if sampler.takes_argmax else sampler.sample(logits[i])
                )
            except RequestError as error:
                chosen.append(error)
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
