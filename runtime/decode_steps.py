"""Decode steps as programs, and runs of them that sample on the device."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import proxy

import torch
from torch import Tensor

from nibblelm.memory import out_of_memory
from nibblelm.ops import Program, SamplingState, sample, to_device, top_logprobs
from nibblelm.sampler import Sampled, scored

IDLE = -1
"""The slot of a row that nobody reads: it writes no key and no value."""


class Eager:
    """In place of a program: the step's own calls, every time."""

    def __init__(self, body: Any, out: Tensor) -> None:
        self._body, self._out = body, out

    def replay(self) -> None:
        self._out.copy_(self._body())


REACHES = (512, 16384)
"""Positions: steps whose rows have no more, of a cache with room for more, are programs of their own. For short rows
attention has kernels that long ones would make wait, and blocks for what rows might have are not started."""


class Programs:
    """One step's programs by the most positions that its rows have, captured when they are first wanted."""

    def __init__(self, capacity: int, capture: Callable[[int], Any]) -> None:
        self.bounds = (*(reach for reach in REACHES if reach < capacity), capacity)
        self._capture, self._captured = capture, dict[int, Any]()

    def bound(self, positions: int) -> int:
        return next((bound for bound in self.bounds if bound >= positions), self.bounds[-1])

    def of(self, positions: int) -> Any:
        """The one for rows of up to so many positions, the new one among them; one for more where there is no memory
        to capture it."""
        bound = self.bound(positions)
        if bound not in self._captured:
            try:
                self._captured[bound] = self._capture(bound)
            except RuntimeError as error:
                wider = [other for other in self._captured if other > bound]
                if not wider or not out_of_memory(error):
                    raise
                self._captured[bound] = self._captured[min(wider)]  # for good: each try is a step's work
        return self._captured[bound]

    def prepare(self) -> bool:
        """Capture one that is missing, that for all first. False: none is."""
        missing = next((bound for bound in reversed(self.bounds) if bound not in self._captured), 0)
        if missing:
            self._captured[missing] = self._capture(missing)
        return missing > 0


@dataclass(frozen=True)
class MixedStep:
    """A decode step and one of prompts as one program."""

    inputs: Tensor  # int32, of the prompts, as `PromptInputs` has them
    program: Any
    result: Tensor  # logits (R, V) of the prompts; what is drawn for the others goes where the decode step has it


def _draws_nothing(logits: Tensor) -> Tensor:
    raise ValueError("this step draws no tokens; its logits are its result")


@dataclass(frozen=True)
class DecodeStep:
    """One decode step for M sequences: its inputs and its result at fixed addresses, and the program between them."""

    rows: Tensor  # (3 or more, M) int32: ids (where sampling leaves the next), positions, slots, what `Rope.rows` gives
    program: Any
    result: Tensor  # logits (M, V) fp32; where sampling leaves ids and no log-probabilities are wanted, those
    host_ids: Tensor | None = None  # (2, M) int32, pinned: where sampling leaves the ids of the last two steps
    draw: Callable[[Tensor], Tensor] = _draws_nothing  # ids (M,) from logits (M, V), and into `rows` and `host_ids`
    programs: Programs | None = None  # of a step that samples; `program` is one of them
    beside: dict[int, MixedStep | bool] = field(default_factory=dict[int, MixedStep | bool], compare=False)
    """The same step with so many rows of prompts; True: it was wanted once, False: there was no memory for it."""

    def load(self, rows: Sequence[Sequence[int]], drawn: Tensor | None = None) -> None:
        """Put a step's inputs in place, behind what is under way; `drawn`: its ids, from the device."""
        to_device(torch.tensor(rows, dtype=torch.int32), self.rows.device, out=self.rows)
        if drawn is not None:
            self.rows[0].copy_(drawn)


class Runs(Protocol):
    """What is asked of a Runner."""

    capacity: int
    graph: bool

    def logits(self, rows: Tensor, related: bool = False, reach: int = 0) -> Tensor: ...
    def capture(self, rows: int) -> AbstractContextManager[Program]: ...
    def card(self) -> AbstractContextManager[object]: ...


def sampling_step(runner: Runs, rows: Tensor, state: SamplingState, result: Tensor, positions: int) -> DecodeStep:
    """A step that draws tokens, captured for rows of so many positions, the new one among them.

    rows    (3 or more, M) int32, as `DecodeStep` has them
    result  (M, V) fp32 takes the logits; or rows[0], where nobody wants them
    """
    count, runner = rows.shape[1], proxy(runner)  # which has the step: a circle would keep both, and their memory
    with runner.card():  # pinned memory, too, is made through the current card
        host_ids = torch.empty(2, count, dtype=torch.int32, pin_memory=True)

    def draw(logits: Tensor) -> Tensor:
        return sample(logits, state, rows[0], rows[1], host_ids)

    def body(reach: int) -> Tensor:
        logits = runner.logits(rows, reach=reach)
        draw(logits)
        return result.copy_(logits) if result.ndim == 2 else result

    def capture(reach: int) -> Program:
        idle = torch.zeros_like(rows)
        idle[2] = IDLE
        with runner.card():
            runner.logits(idle, reach=reach)  # loads kernels; a run's rows stay
            with runner.capture(count) as program:
                body(reach)
        return program

    programs = Programs(runner.capacity, capture)
    with runner.card():
        body(programs.bound(positions))  # loads the kernel that draws
    if not runner.graph:
        return DecodeStep(rows, Eager(lambda: body(runner.capacity), result), result, host_ids, draw)
    return DecodeStep(rows, programs.of(positions), result, host_ids, draw, programs)


def to_host(t: Tensor) -> Tensor:
    """A copy in pinned memory, there once the device's stream has come to this point."""
    with torch.cuda.device_of(t):  # through which pinned memory is made
        return torch.empty_like(t, device="cpu", pin_memory=t.is_cuda).copy_(t, non_blocking=True)


class SampledSteps:
    """A run of decode steps that sample on the device. `next` keeps one step in flight ahead of the host.

    step      of M sequences, with what their first tokens need in place
    history   tokens in the cache by slot, to which those fed are added, at most `capacity`
    ids       (M,) what is fed first, to `slots`; drawn (M,): output tokens of each before that. Where only the device
              knows them yet, `fed` is to be set before `next`
    wanted    rows whose log-probabilities are wanted, and how many of the most likely. `logprobs` has them, by row,
              for the tokens that `next` returned last
    positions what the row that has most of them has with its first token

    The host waits once per token: for the end of its step, which wrote the tokens into host memory.
    """

    def __init__(
        self,
        step: DecodeStep,
        history: list[list[int]],
        capacity: int,
        ids: Sequence[int],
        slots: list[int],
        drawn: Sequence[int],
        wanted: Mapping[int, int] | None = None,
        positions: int = 1,
    ) -> None:
        self._positions = positions
        self.step, self._history, self._capacity, self._slots = step, history, capacity, slots
        self.fed, self._drawn = ids, drawn
        self._kept: Tensor | None = None
        self._ready = [torch.cuda.Event(), torch.cuda.Event()]
        self._launched = self._read = 0
        self._wanted, self.logprobs = wanted or {}, dict[int, Sampled]()
        rows = torch.tensor([*self._wanted], dtype=torch.int64)
        self._wanted_rows = to_device(rows, step.rows.device) if self._wanted else rows
        self._found: dict[int, Sequence[Tensor]] = {}  # of the last two steps what `top_logprobs` gave, on the host

    def launch(self, last: bool = False) -> None:
        """See that the next step is under way, and one behind it unless it is the `last`."""
        while self._launched < self._read + (1 if last else 2) and self.has_room:
            programs = self.step.programs
            self.launch_in(programs.of(self._positions + self._launched) if programs else self.step.program)

    def launch_in(self, program: Any) -> None:
        """Launch the next step, which is `program` or a part of it; there must be room for it."""
        program.replay()
        if self._wanted:
            self._look_up(self._launched % 2)
        self._ready[self._launched % 2].record(torch.cuda.current_stream(self.step.result.device))
        self._launched += 1

    def next(self, last: bool = False) -> list[int]:
        """The tokens of the next step, one per sequence, `launch`ed if it is not."""
        self.launch(last)
        self._ready[self._read % 2].synchronize()
        assert self.step.host_ids is not None
        if self._kept is None:
            last_two = self.step.host_ids.tolist()
            tokens = [last_two[(drawn + self._read) % 2][i] for i, drawn in enumerate(self._drawn)]
        else:
            tokens = self._kept.tolist()
        for slot, token in zip(self._slots, self.fed, strict=True):
            self._history[slot].append(token)
        if self._wanted:
            chosen = scored([tokens[i] for i in self._wanted], [*self._wanted.values()], *self._found[self._read % 2])
            self.logprobs = dict(zip(self._wanted, chosen, strict=True))
        self.fed = tokens
        self._read += 1
        return tokens

    def hand_over(self) -> Tensor:
        """Ids (M,) that would be fed next, on the device. The one step that may be in flight is the last: what it draws
        is kept for `next`, since a run of the same `step` that is launched before leaves its tokens in that place."""
        assert self.in_flight < 2, "what is kept would stand for both steps"
        if self.in_flight:
            self._kept = to_host(self.step.rows[0])
            self._ready[self._read % 2].record(torch.cuda.current_stream(self.step.result.device))
        return self.step.rows[0]

    def drop(self, gone: Sequence[int], spare: int) -> None:
        """Nobody reads rows `gone` any more: from the next launch on they write nothing. To the host they are in slot
        `spare`, whose history means nothing."""
        for i in gone:
            self._slots[i] = spare
        if left := [len(self._history[slot]) for slot in self._slots if slot != spare]:
            self._positions = 1 + max(left) - self._read
        where = to_device(torch.tensor(gone), self.step.rows.device)
        self.step.rows[1].index_fill_(0, where, 0)  # else it might count beyond what there are angles for
        self.step.rows[2].index_fill_(0, where, IDLE)

    @property
    def in_flight(self) -> int:
        """Steps that are launched whose tokens have not been read."""
        return self._launched - self._read

    @property
    def has_room(self) -> bool:
        """Whether a step behind those in flight, two at most, would still be within the capacity."""
        ahead = self.in_flight
        return not ahead or (
            ahead < 2 and all(len(self._history[slot]) + ahead < self._capacity for slot in self._slots)
        )

    def _look_up(self, side: int) -> None:
        """Log-probabilities of the step just launched. No part of its program: who wants how many changes with each
        flight."""
        most = max(self._wanted.values())
        found = top_logprobs(self.step.result, self.step.rows[0], self._wanted_rows, most)
        if side not in self._found:
            with torch.cuda.device_of(found[0]):  # through which pinned memory is made
                self._found[side] = [torch.empty_like(t, device="cpu", pin_memory=t.is_cuda) for t in found]
        for to, of in zip(self._found[side], found, strict=True):
            to.copy_(of, non_blocking=True)
