"""Shared pytest options and fixtures."""

import functools
import json
import os
import signal
import subprocess
import time
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
BEGUN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data", default=str(ROOT.parent / "shared" / "data"), help="folder of real checkpoints and text")
    parser.addoption("--every", action="store_true", help="every family in every format, not a sample of each")
    parser.addoption("--schedules", type=int, default=50, help="random schedules that the engine is tested with")
    parser.addoption("--seed", type=int, default=0, help="of random numbers that tests draw without a seed")
    parser.addoption("--record", type=Path, metavar="FILE", help="a JSON array to enter what the run came to")


def pytest_configure(config: pytest.Config) -> None:
    """Workers share the cards out among them, where CUDA_VISIBLE_DEVICES names several. Random schedules are the same
    in every run, but for those of `make check-long` or another seed; how long one takes is the machine's affair."""
    same = config.getoption("--schedules") == 50 and config.getoption("--seed") == 0
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("nibblelm", patient, derandomize=same)
    settings.load_profile("nibblelm")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    worker, cards = os.environ.get("PYTEST_XDIST_WORKER", ""), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if worker and len(cards) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = cards[int(worker.removeprefix("gw")) % len(cards)]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test draws the same numbers alone as in any worker, whatever ran before it."""
    torch.manual_seed(zlib.crc32(item.nodeid.encode()) + item.config.getoption("--seed"))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    """So does a fixture that several tests share, whichever comes first, and it takes no numbers from that one."""
    if fixturedef.scope == "function":
        return (yield)
    seed, state = torch.initial_seed(), torch.get_rng_state()
    name = f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param', '')}]"
    torch.manual_seed(zlib.crc32(name.encode()) + request.config.getoption("--seed"))
    try:
        return (yield)
    finally:
        torch.manual_seed(seed)  # CUDA's too
        torch.set_rng_state(state)


@pytest.fixture(scope="session")
def data_dir(request: pytest.FixtureRequest) -> Path:
    """The folder of real checkpoints, text and tokenizers; tests that need it skip where it is absent."""
    folder = Path(request.config.getoption("--data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; pass --data=DIR")
    return folder


@pytest.fixture
def quick_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench` in this process measures for moments, and takes a memory's speed as given."""
    from nibblelm import benchmark

    quick = functools.partial(benchmark.measure, repeats=2, seconds=0.01, warmup=0.01)
    monkeypatch.setattr(benchmark, "measure", quick)
    monkeypatch.setattr(benchmark, "read_bandwidth", lambda _device: 1e10)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With --record, a row for this command, in place of an older one."""
    record: Path | None = config.getoption("--record")
    if record is None:
        return
    words = [word for word in config.invocation_params.args if word not in ("--record", str(record))]
    row: dict[str, object] = {"command": " ".join(["pytest", *words])}
    row |= {how: len(terminalreporter.stats.get(how, [])) for how in ("passed", "failed", "error", "skipped")}
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    row |= {"seconds": round(time.monotonic() - BEGUN), "commit": head.stdout.strip()}
    rows = json.loads(record.read_text()) if record.exists() else []
    rows = [*(other for other in rows if other["command"] != row["command"]), row]
    record.write_text("[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n")
