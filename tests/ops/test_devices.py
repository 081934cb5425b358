"""Devices without a GPU: both have what the code asks them for, and of several cards the right one is current."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import nibblelm
from nibblelm import ops
from nibblelm.arguments import select_device
from nibblelm.cli import main
from nibblelm.errors import DeviceError, RequestError
from nibblelm.ops import cpu, cuda
from nibblelm.ops.cuda_device import on_card
from nibblelm.runner import Runner

SOURCES = Path(nibblelm.__file__).parent
CALL = re.compile(r"(?:backend|_kernels)\([^()]*(?:\([^()]*\))?[^()]*\)\.(\w+)")
ON_THE_CPU_ALONE = {"keep_freed_memory", "set_threads"}


def test_every_function_that_is_asked_for_exists() -> None:
    wanted = {name for path in SOURCES.rglob("*.py") for name in CALL.findall(path.read_text())}
    assert {"linear", "upload", "attention"} <= wanted
    missing = {name for name in wanted - ON_THE_CPU_ALONE if not hasattr(cuda, name)}
    assert not missing, f"nibblelm.ops.cuda lacks {sorted(missing)}"
    assert {"linear", "attention", "embedding"} <= {name for name in wanted if hasattr(cpu, name)}


def test_the_list_of_names_is_what_there_is() -> None:
    assert not [name for name in cuda.__all__ if not hasattr(cuda, name)]


class Cards:
    """torch's notion of the current card, on a machine that may have none."""

    def __init__(self, count: int) -> None:
        self.count, self.current = count, 0

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return self.current

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, self.current if device.index is None else device.index
        yield
        self.current = before


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> Cards:
    cards = Cards(2)
    for name in ("device_count", "current_device", "device"):
        monkeypatch.setattr(torch.cuda, name, getattr(cards, name))
    monkeypatch.setattr(ops, "cuda_available", lambda: (True, "two cards that are not there"))
    return cards


def test_a_name_is_a_card(two_cards: Cards) -> None:
    assert select_device("cuda:1") == torch.device("cuda", 1)
    assert select_device("cuda") == select_device("auto") == torch.device("cuda", 0)
    two_cards.current = 1
    assert select_device("cuda") == torch.device("cuda", 1), "the card that is current now, whatever is so later"
    with pytest.raises(DeviceError, match=r"cuda:2 cannot be used: torch sees 2, cuda:0 to cuda:1"):
        select_device("cuda:2")
    for name in ("cuda:", "cuda:-1", "cuda:x", "cuda:1 ", "cuda:1\n", "gpu", "cpu:0", ""):
        with pytest.raises(RequestError, match=r"not supported; use auto, cpu, cuda, or cuda:1"):
            select_device(name)


def test_the_flag_takes_a_card_and_says_what_is_wrong(
    two_cards: Cards, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["generate", "-p", "x"], ["chat"]):
        assert main([*command, "-m", str(tmp_path), "--device", "cuda:7"]) == 1
        assert "torch sees 2" in capsys.readouterr().err


def test_an_op_runs_on_the_card_of_its_tensors(two_cards: Cards) -> None:
    seen = []

    @on_card
    def op(x: torch.Tensor, extra: int, *, more: int = 0) -> int:
        seen.append(two_cards.current)
        return extra + more

    x: Any = SimpleNamespace(device=torch.device("cuda", 1))
    for two_cards.current in (0, 1):
        assert op(x, 2, more=3) == op(x=x, extra=5) == 5
    assert seen == [1, 1, 1, 1]


def test_every_op_does() -> None:
    without_tensors = set("Pool Program available capture programmatic_launch reclaim require wgmma".split())
    with_a_device = {"pack_linear", "upload"}  # of which they make the current one themselves
    ops_of_tensors = set(cuda.__all__) - without_tensors - with_a_device
    assert not [name for name in ops_of_tensors if not hasattr(getattr(cuda, name), "__wrapped__")]


def test_a_runner_computes_on_its_card(two_cards: Cards, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def prefill(*_: object) -> torch.Tensor:
        seen.append(two_cards.current)
        return torch.empty(0)

    monkeypatch.setattr(Runner, "_prefill", prefill)
    config: Any = SimpleNamespace(config=SimpleNamespace(), rope=SimpleNamespace(gap=None))
    runner = Runner(config, torch.device("cuda", 1), torch.bfloat16, 8)
    runner.prefill([1, 2])
    assert (seen, two_cards.current) == ([1], 0)
