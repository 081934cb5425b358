"""The engine on a device without a model, a step ahead of the host: what a step costs in Python, who sits out."""

import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from nibblelm import SamplingParams
from nibblelm.engine_core import Engine
from nibblelm.pages import PAGE, page_count
from nibblelm.prompt_steps import Prompt
from nibblelm.readers import BACKLOG
from nibblelm.request import Request
from nibblelm.scheduler import Scheduler

VOCABULARY, CONTEXT = 64, 2000


class Steps:
    """SampledSteps of a device that needs no time: every token is 7."""

    in_flight = has_room = True
    logprobs: ClassVar[dict[int, Any]] = {}

    def __init__(self, runner: "Device", slots: list[int]) -> None:
        self._runner, self._slots = runner, slots

    def launch(self, last: bool = False) -> None:
        pass

    def next(self, last: bool = False) -> list[int]:
        for slot in self._slots:
            self._runner.history[slot].append(7)
        return [7] * len(self._slots)


class Device:
    """A runner without a model."""

    device = SimpleNamespace(type="cuda")  # so that steps sample on the device; first tokens are tensors of the CPU
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCABULARY))

    def __init__(self, slots: int) -> None:
        self.history: list[list[int]] = [[] for _ in range(slots + 1)]
        self.cache, self.tables = SimpleNamespace(pages=1), torch.zeros(slots + 1, 1)

    samples_on_device = True

    def set_pages(self, slot: int, pages: list[int]) -> None:
        pass

    def set_tables(self, pages: dict[int, list[int]]) -> None:
        pass

    def prefill_together(self, prompts: list[Prompt]) -> torch.Tensor:
        for p in prompts:
            self.history[p.slot] = list(p.ids)
        return torch.zeros(len(prompts), VOCABULARY)

    bidirectional = False

    def prefill_beside(self, prompts: list[Prompt], steps: Steps) -> None:
        pass

    def set_prompt(self, slot: int, ids: list[int], length: int) -> None:
        pass

    def root(self, prompt: list[int]) -> int:
        return 0

    def sampled_steps(self, ids: list[int], slots: list[int], *_: Any) -> Steps:
        return Steps(self, slots)


@pytest.mark.parametrize(("batch", "most_us"), [(1, 100), (16, 300), (64, 1500)])
def test_steps_of_the_same_sequences_cost_little(batch: int, most_us: float) -> None:
    device = Device(batch)
    engine = Engine(device, Scheduler(batch, batch * page_count(CONTEXT), (2048, 512)))  # type: ignore[arg-type]
    engine._thread = object()  # type: ignore[assignment]  # steps are made here
    params = SamplingParams(temperature=0, max_tokens=1500)
    handles = [
        engine.add(Request([1, i], params, None, VOCABULARY, CONTEXT, set()), stream=False) for i in range(batch)
    ]
    core, costs = engine._core, []
    for _ in range(6):  # the best of several runs, of this thread alone: other processes take the cores too
        begun = time.thread_time()
        for _ in range(200):
            core.heard()
            core.step()
        costs.append((time.thread_time() - begun) / 200 * 1e6)
    print(f"{batch} sequences: {min(costs):.0f} us a step")
    assert all(len(s.ids) > 5 * PAGE for s in core._scheduler.running)
    assert len(handles) == batch
    assert min(costs) < most_us


def test_a_sequence_that_ends_while_it_sits_out_stays_ended() -> None:
    """Its last token was under way when its reader fell behind, who then reads all of it."""
    device = Device(2)
    engine = Engine(device, Scheduler(2, 2 * page_count(CONTEXT), (2048, 512)))  # type: ignore[arg-type]
    engine._thread = object()  # type: ignore[assignment]
    core = engine._core
    unread, other = (
        engine.add(Request([1, i], SamplingParams(temperature=0, max_tokens=tokens), None, VOCABULARY, CONTEXT, set()))
        for i, tokens in enumerate((BACKLOG + 1, 2 * BACKLOG))
    )
    pieces = other.tokens()
    for step in range(2 * BACKLOG):
        if step == BACKLOG + 4:
            assert len(list(unread.tokens())) == BACKLOG + 1
        core.heard()
        core.step()
        next(pieces)
    assert core.finished == 2


def test_readers_wait_for_one_part_of_a_prompt_at_a_time() -> None:
    """The host waits for the last one, whose token it chooses: it has the others' next tokens made before that."""
    order: list[str] = []

    class Ahead(Steps):
        in_flight = 0  # type: ignore[assignment]

        def launch(self, last: bool = False) -> None:
            while self.in_flight < (1 if last else 2):
                self.in_flight += 1
                order.append("D")

        def next(self, last: bool = False) -> list[int]:
            self.launch(last)
            self.in_flight -= 1
            return super().next()

    class Ordered(Device):
        def prefill_together(self, prompts: list[Prompt]) -> torch.Tensor:
            order.append("P")
            return super().prefill_together(prompts)

        def sampled_steps(self, ids: list[int], slots: list[int], *_: Any) -> Steps:
            return Ahead(self, slots)

    engine = Engine(Ordered(3), Scheduler(3, 3 * page_count(CONTEXT), (2048, 64)))  # type: ignore[arg-type]
    engine._thread = object()  # type: ignore[assignment]
    core = engine._core

    def add(prompt: int, tokens: int) -> Any:
        params = SamplingParams(temperature=0, max_tokens=tokens)
        return engine.add(Request([1] * prompt, params, None, VOCABULARY, CONTEXT, set()), stream=False)

    def steps(count: int) -> str:
        order.clear()
        for _ in range(count):
            core.heard()
            core.step()
        return "".join(order)

    first, second = add(10, 40), add(10, 12)
    steps(3)
    third = add(300, 20)
    assert steps(5) == "DPDPDPDPDPD", "the second ends on the way, and the first goes on before tokens are handed out"
    while core.finished < 3:
        steps(1)
    assert [len(handle.result().output.token_ids) for handle in (first, second, third)] == [40, 12, 20]
