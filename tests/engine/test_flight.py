"""Runs of steps that sample on the device, here on the CPU with greedy steps in the device's place: sequences that end,
join or lose their pages while a step is ahead change nobody's tokens."""

import random
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nibblelm import LLM, SamplingParams, choosing, decode_steps, executor, mixed_steps, readers, scheduler
from nibblelm.decode_steps import DecodeStep, SampledSteps
from nibblelm.engine_thread import Core
from nibblelm.kv_cache import KVCache
from nibblelm.ops import PAGE, SamplingState
from nibblelm.ops.devices import kernels
from nibblelm.pages import page_count
from nibblelm.prompt_steps import Prompt
from nibblelm.runner import Runner
from nibblelm.sampler import Sampled
from nibblelm.scheduler import Scheduler
from nibblelm.speculation import STEP_COST, Speculation
from nibblelm.stats import Stats


class _Greedy:
    """The program of a step: feeds each row its most likely token. Rows that CUDA's kernels pass over, in no slot or
    behind their last page, are in the spare slot here, which the CPU's would refuse."""

    def __init__(self, runner: Runner, rows: torch.Tensor, host_ids: torch.Tensor, drawn: list[int]) -> None:
        self._runner, self._rows, self._host_ids, self._drawn, self._step = runner, rows, host_ids, drawn, 0
        self.logits = torch.empty(len(drawn), runner.model.config.vocab_size)

    def replay(self, reach: int | None = None) -> None:
        """`reach`: positions that its rows must not have more of."""
        tables, spare = self._runner.tables, len(self._runner.history) - 1
        rows = self._rows.clone()
        idle = (rows[2] < 0) | (tables[rows[2].clamp(min=0), rows[1] // PAGE] < 0)
        rows[1][idle], rows[2][idle] = 0, spare
        if reach is not None:
            assert int(rows[1].max()) < reach
            reached.add(reach)
        ids = self.logits.copy_(self._runner.logits(rows)).argmax(-1).int()
        for i, drawn in enumerate(self._drawn):
            self._host_ids[(drawn + self._step) % 2, i] = ids[i]
        self._rows[0], self._step = ids, self._step + 1
        self._rows[1] += 1


class _Event:
    def record(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...


def _sampled_steps(
    self: Runner,
    ids: Sequence[int],
    slots: Sequence[int],
    state: SamplingState,
    wanted: dict[int, int],
    positions: Sequence[int],
    drawn: torch.Tensor | None,
) -> SampledSteps:
    self.model.rope.reach(self.capacity)
    rows, host_ids = self._rows(ids, positions, slots), torch.zeros(2, len(ids), dtype=torch.int32)
    if drawn is not None:
        rows[0] = drawn
        unseen.append(len(ids))
    program = _Greedy(self, rows, host_ids, state.steps.tolist())
    launched.append(len(ids))
    programs = decode_steps.Programs(self.capacity, lambda reach: SimpleNamespace(replay=lambda: program.replay(reach)))
    step, most = DecodeStep(rows, program, program.logits, host_ids, programs=programs), 1 + max(positions)
    return SampledSteps(step, self.history, self.capacity, list(ids), list(slots), state.steps.tolist(), wanted, most)


reached: set[int] = set()
launched: list[int] = []
unseen: list[int] = []  # of those, what was launched before the host had its tokens


def _prefill_beside(self: Runner, prompts: Sequence[Prompt], run: SampledSteps) -> torch.Tensor | None:
    """As the two steps of which it is one on a card; of some sizes there are no programs."""
    if (count := sum(len(p.ids) - p.start for p in prompts)) % 5 == 0:
        return None
    run.launch_in(run.step.program)
    joined.append(count)
    return self.prefill_together(prompts)


joined: list[int] = []


def test_rows_are_picked_in_any_order() -> None:
    logits = torch.arange(6).view(6, 1)
    for rows in ([], [2], [1, 2, 3], [3, 1, 5], [5, 3, 4], [0, 2, 2]):
        assert choosing.picked(logits, rows).flatten().tolist() == rows


def test_programs_are_captured_when_rows_reach_so_far() -> None:
    captured: list[int] = []
    programs = decode_steps.Programs(20000, lambda reach: captured.append(reach) or f"{reach}")
    assert [programs.of(n) for n in (1, 512, 513, 400, 16384, 16385, 20000)] == [
        *("512", "512", "16384", "512", "16384", "20000", "20000")
    ]
    assert captured == [512, 16384, 20000]
    assert not programs.prepare()
    few = decode_steps.Programs(300, str)
    assert (few.bounds, few.prepare(), few.prepare()) == ((300,), True, False)
    cache = KVCache(2, 3, 1, 700, 8, torch.float32, torch.device("cpu"))
    assert cache.within(512).tables.data_ptr() == cache.tables.data_ptr()
    assert cache.within(512).tables.tolist() == [row[: page_count(512)] for row in cache.tables.tolist()]


@pytest.fixture
def flying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner, "samples_on_device", True)
    monkeypatch.setattr(Runner, "sampled_steps", _sampled_steps)
    monkeypatch.setattr(Runner, "prefill_beside", _prefill_beside)
    card, draws_ahead = SimpleNamespace(device=SimpleNamespace(type="cuda")), choosing.draws_ahead
    monkeypatch.setattr(choosing, "draws_ahead", lambda samplers, _: draws_ahead(samplers, card))
    monkeypatch.setattr(choosing, "drawn_ahead", lambda samplers, logits: logits.argmax(-1).int())
    monkeypatch.setattr(decode_steps.torch.cuda, "Event", _Event)
    monkeypatch.setattr(decode_steps.torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setitem(executor.STEP_ROWS, "cpu", (1, 2, 4, 8, 16))
    monkeypatch.setattr(decode_steps, "REACHES", (110, 150, 350))


def test_a_flight_outlives_its_longest_row(flying: None) -> None:
    """Its programs are then those of the others, and never of more than there is room for."""
    asked: list[int] = []
    programs: Any = SimpleNamespace(of=lambda n: asked.append(n) or SimpleNamespace(replay=lambda: None))
    rows, host_ids = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    step = DecodeStep(rows, None, rows[0], host_ids, programs=programs)
    run = SampledSteps(step, [[0] * 95, [0] * 5, []], 100, [1, 1], [0, 1], [0, 0], None, 96)
    for _ in range(3):
        run.next(last=True)
    run.drop([0], 2)
    for _ in range(60):
        run.next(last=True)
    assert asked == [96, 97, 98, *range(9, 69)]
    assert decode_steps.Programs(100, str).of(101) == "100"


def test_a_program_for_more_rows_is_taken_where_memory_is_short() -> None:
    tried: list[int] = []

    def capture(reach: int) -> str:
        tried.append(reach)
        if reach == 16384:
            raise RuntimeError("CUDA error: out of memory")
        return f"{reach}"

    programs = decode_steps.Programs(20000, capture)
    with pytest.raises(RuntimeError, match="out of memory"):
        programs.of(600)
    assert programs.prepare()
    assert (programs.of(600), programs.of(601), programs.of(3)) == ("20000", "20000", "512")
    assert tried == [16384, 20000, 16384, 512]


@pytest.mark.parametrize(
    ("pages", "longest", "crowd", "scored"),
    [
        (None, 100, 8, True),
        (14, 100, 99, True),
        (14, 100, 99, False),
        (None, 400, 8, True),
        (None, 400, 99, True),
        (None, 400, 99, False),
    ],
)
def test_members_that_leave_change_nothing(
    data_dir: Path,
    flying: None,
    monkeypatch: pytest.MonkeyPatch,
    pages: int | None,
    longest: int,
    crowd: int,
    scored: bool,
) -> None:
    """Outputs of 1 to 90 tokens at a time, in a pool that holds all of them or is too small for that; prompts of one
    part or of several, many of them together or not."""
    monkeypatch.setattr(scheduler, "CROWD", crowd)
    folder = data_dir / "checkpoints" / "stories260K"
    draw = random.Random(7)
    prompts = [[draw.randrange(3, 500) for _ in range(draw.randint(1, longest))] for _ in range(24)]
    scores = [None, None, 0, 3, 5] if scored else [None]  # log-probabilities that are wanted
    params = [
        SamplingParams(temperature=0, max_tokens=draw.randint(1, 90), ignore_eos=True, logprobs=draw.choice(scores))
        for _ in prompts
    ]
    alone = LLM(folder, device="cpu", dtype="fp32", max_sequences=1)
    with monkeypatch.context() as plain:
        plain.setattr(Runner, "samples_on_device", False)
        plain.setitem(executor.STEP_ROWS, "cpu", ())
        outputs = [alone.generate([p], one)[0] for p, one in zip(prompts, params, strict=True)]
    want = [output.token_ids for output in outputs]
    for seen in (launched, unseen, joined, reached):
        seen.clear()
    size = None if pages is None else pages * alone.kv_bytes // alone.kv_tokens * 64
    llm = LLM(folder, device="cpu", dtype="fp32", max_sequences=16, kv_memory=size)
    if pages is None:  # nobody is preempted, and computed again
        monkeypatch.delattr(Runner, "decode")
    flown = llm.generate(prompts, params)
    assert [output.token_ids for output in flown] == want
    for output, other in zip(flown, outputs, strict=True):
        assert (output.logprobs is None) == (other.logprobs is None)
        for ours, host in zip(output.logprobs or [], other.logprobs or [], strict=True):
            assert [i for i, _ in ours.top] == [i for i, _ in host.top]
            values, exact = ([one.logprob, *(x for _, x in one.top)] for one in (ours, host))
            assert values == pytest.approx(exact, abs=1e-5)
    assert len(launched) < sum(map(len, want)) // 8, "a flight goes on when members leave it"
    assert len(reached) > 1, "programs of several reaches"
    assert len(unseen) > (0 if scored else 3), "others join a flight before the host has their tokens"
    assert len(joined) > (3 if crowd < len(prompts) else 8), "prompts are computed in the steps of those that generate"


@pytest.mark.parametrize("sequences", [1, 3])
def test_drafts_land_a_flight_and_change_nothing(
    data_dir: Path, flying: None, monkeypatch: pytest.MonkeyPatch, sequences: int
) -> None:
    """Drafts come from all tokens, so the step that is ahead is used up first; where there are none, one is ahead."""
    folder = data_dir / "checkpoints" / "stories260K"
    draw = random.Random(8)
    prompts = [[draw.randrange(3, 500) for _ in range(draw.randint(1, 30))] * draw.randint(1, 3) for _ in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=draw.randint(1, 120), ignore_eos=True) for _ in prompts]
    with monkeypatch.context() as plain:
        plain.setattr(Runner, "samples_on_device", False)
        alone = LLM(folder, device="cpu", dtype="fp32", max_sequences=1)
        want = [alone.generate([p], one)[0].token_ids for p, one in zip(prompts, params, strict=True)]
        alone.close()
    launched.clear()
    landings: list[bool] = []
    propose = Speculation.propose

    def watched(self: Speculation, running: Any, ahead: bool, barred: Any) -> Any:
        pays, failed = propose(self, running, ahead, barred)
        landings.append(pays and ahead)
        return pays, failed

    monkeypatch.setattr(Speculation, "propose", watched)
    monkeypatch.setitem(STEP_COST, kernels(torch.device("cpu")), STEP_COST["cuda"])  # else as this machine's rows cost
    llm = LLM(folder, device="cpu", dtype="fp32", max_sequences=sequences, speculate="ngram")
    outputs = llm.generate(prompts, params)
    assert [output.token_ids for output in outputs] == want
    assert sum(output.timings.accepted_tokens for output in outputs) > 20
    assert sum(landings) > 0
    assert 0 < len(launched) < sum(map(len, want)) // 4, "no draft, no landing"


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to"), RuntimeError("out of memory")]
)
def test_no_memory_for_a_step_of_both_leaves_the_two(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    tried: list[int] = []

    def capture(_: Any, __: Any, size: int) -> Any:
        tried.append(size)
        raise error

    monkeypatch.setattr(mixed_steps, "_capture", capture)
    step = DecodeStep(torch.zeros(3, 2, dtype=torch.int32), None, torch.zeros(2, 5))
    run = SimpleNamespace(step=step)
    for _ in range(4):
        assert mixed_steps.beside(SimpleNamespace(), [Prompt([5] * 9, 0)], run) is None  # type: ignore[arg-type]
    assert tried == [64]
    assert not mixed_steps.prepare_beside(SimpleNamespace(), [step])  # type: ignore[arg-type]
    assert tried == [64, 128]
    monkeypatch.setattr(mixed_steps, "_capture", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        mixed_steps.prepare_beside(SimpleNamespace(), [step])  # type: ignore[arg-type]


def test_a_parked_sequence_that_gets_another_token_goes_on() -> None:
    """A draft, or the step that was ahead, goes on behind the token that parked it; its reader catches up while that
    token is delivered, between two looks at what waits."""

    class Channel(readers.Channel):
        looks = 0  # until the reader catches up

        @property
        def backlog(self) -> int:
            self.looks -= 1
            if self.looks == 0:
                read(40)
            return self.sent - self.read

    core = Core.__new__(Core)
    core.inbox, core.stats, core.finished, core.end = SimpleQueue(), Stats(), 0, None
    core._scheduler, core._speculation, core.channels = Scheduler(2, 64, (512, 64)), None, {}
    piece = SimpleNamespace(output=None, token_id=None)
    sequence = scheduler.Sequence([1, 2], 2, 2000, owner=SimpleNamespace(accept=lambda choice: piece))
    channel = Channel(stream=True)

    def read(pieces: int) -> None:
        for _ in range(pieces):
            channel.items.get()
            channel.read += 1
            if channel.held and channel.sent - channel.read <= readers.BACKLOG // 2:
                core.inbox.put((core.resume, (sequence, channel)))

    core.add(sequence, channel)
    core._scheduler.plan()
    for _ in range(readers.BACKLOG):
        core._deliver(sequence, Sampled(5))
    assert sequence.parked
    channel.looks = 2
    core._deliver(sequence, Sampled(5))
    read(channel.sent - channel.read)
    assert core.heard(wait=False)
    assert not sequence.parked
