"""Whatever else is computed, a request gives what it gives alone, in another process: random schedules.

`--schedules N` runs N of them for all kinds of models together (`make check-long`).
"""

import json
import random
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nibblelm import LLM, SamplingParams, StreamPiece, convert, ops, readers
from nibblelm.engine_core import Engine, Handle
from nibblelm.executor import Executor
from nibblelm.pages import page_count
from nibblelm.scheduler import Scheduler
from nibblelm.speculation import Speculation

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from oracle import BIDIRECTIONAL, CONFIGS, save_random
from requests_alone import COUNT, requests, result

USABLE, REASON = ops.cuda_available()
GPU = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=REASON)]
FORMATS = {
    "int4": dict(bits=4, group_size=-1),
    "g128": dict(bits=4, group_size=128),
    "int8": dict(bits=8),
    "full": None,
}
KINDS = [
    ("mistral", "int4", "cpu", "auto", "auto"),
    ("qwen3", "full", "cpu", "fp32", "auto"),
    ("qwen3", "int4", "cpu", "auto", "int8"),
    ("phi3-longrope", "int4", "cpu", "auto", "int8"),
]
"""Family, weights, device, dtype, cache: on the CPU; with --every all variants of all families beside them."""
OWN_PROMPTS = {"llama-dynamic", *BIDIRECTIONAL}
"""Variants that the requests do not fit: a short context, and prompts with a gap (test_rope_choice.py, test_gap.py)."""
CUDA_KINDS = [("qwen3", weights, "cuda", dtype, "auto") for weights in FORMATS for dtype in ("bf16", "fp32")]
CUDA_KINDS += [("qwen3", "int4", "cuda", dtype, "int8") for dtype in ("bf16", "fp32")]
CUDA_KINDS += [
    (name, "int4", "cuda", "bf16", kv)
    for name in CONFIGS
    if name not in {"qwen3", *OWN_PROMPTS}
    for kv in ("auto", "int8")
]
REQUESTS = requests()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model" not in metafunc.fixturenames:
        return
    kinds = list(KINDS)
    if metafunc.config.getoption("--every"):
        kinds += [
            (name, "int4", "cpu", "auto", kv) for name in CONFIGS if name not in OWN_PROMPTS for kv in ("auto", "int8")
        ]
    params = [pytest.param(kind, id="-".join(kind)) for kind in dict.fromkeys(kinds)]
    full = metafunc.function.__name__ == "test_ids_of_a_full_batch"  # every format and cache of one family
    on_cards = [kind for kind in CUDA_KINDS if kind[0] == "qwen3" or not full]
    params += [pytest.param(kind, marks=GPU, id="-".join(kind)) for kind in on_cards]
    metafunc.parametrize("model", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, list[Any]]:
    """A loaded model, and what each of REQUESTS gives alone in a process of its own."""
    family, weights, device, dtype, kv = request.param
    folder = tmp_path_factory.mktemp("exact")
    source = save_random(family, folder / "source")
    if FORMATS[weights] is not None:
        convert(source, folder / "converted", **FORMATS[weights])
        source = folder / "converted"
    script = Path(__file__).parent / "requests_alone.py"
    command = [sys.executable, script, source, device, dtype, kv]
    alone = subprocess.run(command, capture_output=True, text=True, check=False)
    assert alone.returncode == 0, alone.stderr[-2000:]
    return LLM(source, device, dtype, kv=kv), json.loads(alone.stdout)


def schedules() -> st.SearchStrategy[dict[str, Any]]:
    """Sizes of the engine, and for each arrival: step, request, pieces read before it is given up, pace of reading."""
    arrival = st.tuples(
        st.integers(0, 60), st.integers(0, COUNT - 1), st.none() | st.integers(0, 40), st.integers(1, 4)
    )
    return st.fixed_dictionaries(
        dict(
            slots=st.integers(1, 8),
            pages=st.integers(7, 30),
            budget=st.tuples(st.integers(10, 300), st.integers(10, 100)),
            backlog=st.integers(2, 64),
            step_rows=st.sampled_from([(), (2, 5, 8), (8,)]),
            drafts=st.none() | st.integers(0, 2**32),
            arrivals=st.lists(arrival, min_size=1, max_size=14),
        )
    )


class Guesses:
    """Drafts of what comes alone after this prompt, of any length and at random wrong somewhere."""

    def __init__(self, outputs: list[list[int]], rng: random.Random) -> None:
        self._outputs, self._rng = outputs, rng

    def draft(self, ids: list[int], most: int) -> list[int]:
        outputs = [output for output in self._outputs if output[: len(ids)] == ids]
        found = self._rng.choice(outputs)[len(ids) :][: self._rng.choice((0, 1, 2, 5, 40))]
        return [token if self._rng.random() < 0.9 else self._rng.randrange(331) for token in found[:most]]


class Reader:
    """Reads a stream at its own pace, and perhaps gives up."""

    def __init__(self, handle: Handle, index: int, patience: int | None, pace: int) -> None:
        self._handle, self._pieces = handle, handle.tokens()
        self.index, self._patience, self._pace = index, patience, pace
        self.ids: list[int | None] = []
        self.output: Any = None

    def read(self, step: int) -> bool:
        """Take what is there, if it is this reader's turn; False at the end."""
        if step % self._pace == 0 and not self._handle._channel.items.empty():
            piece: StreamPiece = next(self._pieces)
            self.ids.append(piece.token_id)
            self.output = piece.output
            if self.output is None and len(self.ids) == self._patience:
                self._handle.abort()
                return False
        return self.output is None


def run(llm: LLM, schedule: dict[str, Any], alone: list[Any], monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Compute a schedule; returns how many tokens were drafted rightly, and how many requests ran at most."""
    monkeypatch.setattr(readers, "BACKLOG", schedule["backlog"])
    speculation = None
    if schedule["drafts"] is not None:
        rng = random.Random(schedule["drafts"])
        outputs = [prompt + ids for (prompt, _), (ids, _, _) in zip(REQUESTS, alone, strict=True)]
        free = dict.fromkeys((1, 2, 3, 6, 17, 64), 1.0)
        speculation = Speculation(lambda _: Guesses(outputs, rng), free)
    window = llm.config.window
    pages = schedule["pages"] // 2 if window else schedule["pages"]  # where every layer has one, they are given back
    scheduler = Scheduler(schedule["slots"], pages, schedule["budget"], window)
    engine = Engine(llm.runner, scheduler, speculation=speculation)
    engine._thread = threading.current_thread()  # steps are made here, one for each turn of the readers
    core = engine._core
    core._executor = Executor(llm.runner, core._scheduler, core.stats, schedule["step_rows"])
    arrivals = sorted(schedule["arrivals"], key=lambda arrival: arrival[0])
    reading: list[Reader] = []
    most = 0
    for step in count():
        while arrivals and arrivals[0][0] <= step:
            _, index, patience, pace = arrivals.pop(0)
            prompt, params = REQUESTS[index]
            request = llm.request(prompt, llm.resolve(SamplingParams(**params), {}))
            reading.append(Reader(engine.add(request), index, patience, pace))
        assert core.heard(wait=False)
        if core._scheduler.has_work:
            core.step()
        most = max(most, len(core._scheduler.running))
        for reader in reading[:]:
            if not reader.read(step):
                reading.remove(reader)
                want = alone[reader.index]
                assert reader.ids == want[0][: len(reader.ids)], f"request {reader.index}"
                if reader.output is not None:
                    assert result(reader.output) == want, f"request {reader.index}"
        if not reading and not arrivals:
            break
        assert step < 50_000, "requests that do not end"
    assert core.heard(wait=False)  # who was given up last
    assert core._scheduler.pool.available == pages
    return core.stats.accepted_tokens, most


def test_ids_are_those_of_one_request_at_a_time(
    model: tuple[LLM, list[Any]], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, alone = model
    share = len(CUDA_KINDS if llm.device.type == "cuda" else KINDS)
    right: list[int] = []

    @settings(max_examples=-(-request.config.getoption("--schedules") // share))
    @given(schedules())
    def check(schedule: dict[str, Any]) -> None:
        right.append(run(llm, schedule, alone, monkeypatch)[0])

    check()
    repeats = request.node.callspec.params["model"][0] in {kind[0] for kind in KINDS}  # other random models may not
    if repeats and len(right) >= 10:  # in 5 it happens
        assert sum(right) > 0, "so many schedules, and no draft was ever right"


def test_ids_of_a_full_batch(model: tuple[LLM, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as many as there is room for, half of them at once, others as places become free; some give up."""
    llm, alone = model
    slots = 256 if llm.device.type == "cuda" else 64
    rng = random.Random(0)
    longest = sorted(range(COUNT), key=lambda i: -len(alone[i][0]))[: COUNT // 2]
    arrivals: list[Any] = [(0, rng.choice(longest), None, 1) for _ in range(slots)]
    arrivals += [(rng.randrange(40), rng.randrange(COUNT), rng.choice((None, 9)), 1) for _ in range(slots)]
    llm.runner.reserve(slots + 1, 7 * slots + 1)
    sizes = dict(slots=slots, pages=7 * slots, budget=(8192, 8192), backlog=64, step_rows=(), drafts=None)
    _, most = run(llm, {**sizes, "arrivals": arrivals}, alone, monkeypatch)
    assert most == slots


def test_the_requests_tell_schedules_apart(model: tuple[LLM, list[Any]]) -> None:
    """They fit in the smallest pool, differ from each other (but for what a random model says again and again), and
    share pages."""
    _, alone = model
    assert all(page_count(len(prompt) + params["max_tokens"]) <= 7 for prompt, params in REQUESTS)
    assert len({tuple(ids) for ids, _, _ in alone}) > COUNT * 0.7
    assert len({tuple(prompt[:64]) for prompt, _ in REQUESTS if len(prompt) > 64}) <= 4
