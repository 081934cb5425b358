"""What an idle engine makes for the prompts to come, here on the CPU, whose kernels run in the place of programs."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nibblelm import LLM, SamplingParams, runner
from nibblelm.engine import STEP_TOKENS
from nibblelm.prompt_steps import PromptStep
from nibblelm.runner import Runner

CARD, CPU = SimpleNamespace(type="cuda"), torch.device("cpu")


def _with_device(device: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: Runner, *args: Any, **options: Any) -> Any:
        own, self.device = self.device, device
        try:
            return method(self, *args, **options)
        finally:
            self.device = own

    return called


def _prompt_logits(
    self: Runner, inputs: Tensor, rows: int, room: int, every_row: bool, decoded: Tensor | None = None
) -> Tensor:
    """Without the rows and tiles that fill a step up, which the CPU's kernels would refuse."""
    tokens, table, wanted, slots, tables = inputs.split(self.prompt_inputs.sizes(rows, room))
    self.cache.write_tables(slots, tables.view(room, -1))
    tokens, tiles = tokens.view(-1, rows), table.view(-1, 2)
    tokens, tiles = tokens[:, tokens[2] >= 0], tiles[tiles[:, 1] > 0]
    if not len(tiles):
        assert tokens.numel() == 0
        return torch.zeros(room, self.model.config.vocab_size)
    return self._graph(prompts=True, every_row=every_row)(*self._inputs(tokens), tiles, wanted)


class _Event:
    recorded = False

    def record(self, stream: Any) -> None:
        self.recorded = True

    def query(self) -> bool:
        return not self.recorded  # as if it were under way for ever

    def synchronize(self) -> None: ...


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int] | str]:
    """What was captured or run kernel by kernel, by a runner that takes its device for a card."""
    made: list[tuple[int, int] | str] = []
    eagerly = Runner._prefill_eagerly

    def captured(self: Runner, rows: int, tiles: int) -> PromptStep:
        made.append((rows, tiles))
        staged = torch.zeros(sum(self.prompt_inputs.sizes(rows, tiles)), dtype=torch.int32)
        result = torch.empty(tiles, self.model.config.vocab_size)

        def replay() -> None:
            result.copy_(self.prompt_logits(staged, rows, tiles, False))

        return PromptStep(staged, SimpleNamespace(replay=replay), result, _Event())  # pyright: ignore[reportArgumentType]

    def run(self: Runner, *args: Any, **options: Any) -> Tensor:
        made.append("eagerly")
        return eagerly(self, *args, **options)

    monkeypatch.setattr(Runner, "_prefill", _with_device(CARD, Runner._prefill))
    monkeypatch.setattr(Runner, "prepare_prompts", _with_device(CARD, Runner.prepare_prompts))
    monkeypatch.setattr(Runner, "prompt_logits", _with_device(CPU, _prompt_logits))
    monkeypatch.setattr(Runner, "_captured", _with_device(CPU, captured))
    monkeypatch.setattr(Runner, "_prefill_eagerly", run)
    monkeypatch.setattr(Runner, "card", _with_device(CPU, Runner.card))
    monkeypatch.setattr(runner.ops, "to_device", lambda t, device, out=None: t.clone() if out is None else out.copy_(t))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return made


def test_prompts_find_what_they_would_wait_for(data_dir: Path, made: list[tuple[int, int] | str]) -> None:
    folder = data_dir / "checkpoints" / "stories260K"
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [[3 + i % 500 for i in range(first, first + count)] for first, count in enumerate((1, 16, 17, 64, 100))]
    plain = LLM(folder, device="cpu", dtype="fp32", graph=False)
    want = [plain.generate([prompt], params)[0].token_ids for prompt in prompts]
    made.clear()
    llm = LLM(folder, device="cpu", dtype="fp32")
    assert llm.engine.prepared
    llm.engine.start()
    assert not llm.engine.prepared
    deadline = time.monotonic() + 300
    while not llm.engine.prepared and llm.engine.end is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert llm.engine.prepared
    sizes = (16, 32, 64, STEP_TOKENS["cpu"][1])
    assert made == [one for rows in sizes for one in ("eagerly", (rows, 1), (rows, 1))]
    for _ in range(2):
        assert [llm.generate([prompt], params)[0].token_ids for prompt in prompts] == want
    assert len(made) == 3 * len(sizes), "nothing is made again"
