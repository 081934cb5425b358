"""What a step costs in Python while the same sequences go on: the device, a step ahead, must not have to wait."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nibblelm import SamplingParams
from nibblelm.engine_core import Engine
from nibblelm.pages import PAGE, page_count
from nibblelm.request import Request
from nibblelm.scheduler import Scheduler

VOCABULARY, CONTEXT = 64, 2000


class Steps:
    """SampledSteps of a device that needs no time: every token is 7."""

    in_flight = True

    def __init__(self, runner: "Device", slots: list[int]) -> None:
        self._runner, self._slots = runner, slots

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

    bidirectional = False

    def set_prompt(self, slot: int, ids: list[int], length: int) -> None:
        pass

    def root(self, prompt: list[int]) -> int:
        return 0

    def prefill(self, ids: list[int], slot: int, start: int, every_row: bool) -> torch.Tensor:
        self.history[slot] = list(ids)
        return torch.zeros(1, VOCABULARY)

    def sampled_steps(self, ids: list[int], slots: list[int], state: Any) -> Steps:
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
