"""An event loop that does not sleep while it is waited for sees what comes all the same, and sleeps afterwards."""

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop

from nibblelm import _cpu
from nibblelm.server import awake as awakening
from nibblelm.server import service
from nibblelm.server.awake import AWAKE_S, LEAST_CORES, PASSES, Awake, awake_for

sys.path.insert(0, str(Path(__file__).parent))
from waiting import PATIENCE_S, wait_for

_readable_within = _cpu.readable_within


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def awake() -> None:
        wanted = [True]
        Awake(asyncio.get_running_loop(), lambda: bool(wanted)).stir()
        await work()
        wanted.clear()
        await asyncio.sleep(2 * AWAKE_S)  # asleep before the loop ends

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(awake())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many microseconds the system was asked each time."""
    times: list[int] = []

    def readable_within(descriptor: int, microseconds: int) -> bool:
        times.append(microseconds)
        return _readable_within(descriptor, microseconds)

    monkeypatch.setattr(_cpu, "readable_within", readable_within)
    return times


def test_what_comes_from_outside_ends_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that is: the descriptor is the one that the loop itself would sleep on."""
    slice_s = 60
    monkeypatch.setattr(awakening, "SLICE_US", 1_000_000 * slice_s)
    monkeypatch.setattr(awakening, "AWAKE_S", 0)  # no slice at the end, which nothing would end

    async def work() -> None:
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        begun = time.monotonic()
        for _ in range(5):
            thread = threading.Timer(0.005, loop.call_soon_threadsafe, [came.set])
            thread.start()
            await came.wait()
            thread.join()
            came.clear()
        assert time.monotonic() - begun < slice_s

    run(work)


def test_timers_are_seen_between_slices() -> None:
    """A slice ends by itself: seconds are for the slowest machine."""

    async def work() -> None:
        begun = time.monotonic()
        for _ in range(5):
            await asyncio.sleep(0.005)
        assert time.monotonic() - begun < 10

    run(work)


def test_callbacks_that_follow_each_other_are_not_held_up(asked: list[int]) -> None:
    async def work() -> None:
        asked.clear()
        turns = 4 * PASSES
        for _ in range(turns):
            await asyncio.sleep(0)
        assert 0 < len(asked) <= turns - PASSES

    run(work)


def test_it_is_awake_while_it_is_wanted_and_sleeps_otherwise(asked: list[int]) -> None:
    async def comes(condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + PATIENCE_S
        while not (true := condition()) and time.monotonic() < deadline:
            asked.clear()
            await asyncio.sleep(0.05)
        return true

    async def work() -> None:
        wanted = [True]
        awake = Awake(asyncio.get_running_loop(), lambda: wanted[0])
        for _ in range(2):
            awake.stir()
            assert await comes(lambda: len(asked) > 20)
            wanted[0] = False
            await asyncio.sleep(2 * AWAKE_S)
            assert await comes(lambda: not asked)
            before = time.thread_time()
            await asyncio.sleep(0.3)
            assert time.thread_time() - before < 0.03
            wanted[0] = True

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work())


def test_it_is_awake_only_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(device: str, cores: int, new: Callable[[], asyncio.AbstractEventLoop]) -> bool:
        monkeypatch.setattr(_cpu, "usable_cores", lambda: cores)
        loop = new()
        try:
            return awake_for(device, loop, lambda: True) is not None
        finally:
            loop.close()

    assert made("cuda", LEAST_CORES, uvloop.new_event_loop)
    assert not made("cpu", LEAST_CORES, uvloop.new_event_loop)
    assert not made("cuda", LEAST_CORES - 1, uvloop.new_event_loop)
    assert not made("cuda", LEAST_CORES, asyncio.SelectorEventLoop)


def texts_of(answer: str) -> dict[int, str]:
    """What each output says, of a stream's events or of one object."""
    events = answer.split("data: ")[1:-1] if answer.startswith("data: ") else [answer]
    texts: dict[int, str] = {}
    for choice in (choice for event in events for choice in json.loads(event)["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def test_a_server_that_stays_awake_answers_as_one_that_sleeps(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = [
        {"prompt": f"Once {i}", "max_tokens": 20, "seed": i, "stream": i % 2 == 1, "n": 1 + i % 3} for i in range(8)
    ]

    def texts(server: Any) -> list[dict[int, str]]:
        with ThreadPoolExecutor(len(bodies)) as pool:  # all at a time
            return [texts_of(text) for _, text in pool.map(server.ask, bodies)]

    asleep = texts(running())
    assert [len(own) for own in asleep] == [body["n"] for body in bodies]
    made: list[Awake] = []

    def awake(_device: str, loop: asyncio.AbstractEventLoop, wanted: Callable[[], bool]) -> Awake:
        made.append(Awake(loop, wanted))
        return made[0]

    monkeypatch.setattr(service, "awake_for", awake)
    server = running()
    assert texts(server) == asleep
    left = server.begin({"prompt": "Once", "stream": True, "max_tokens": 400, "ignore_eos": True})
    left.readline()
    left.close()
    assert wait_for(lambda: server.service.unfinished == 0)
    assert len(made) == 1


def test_a_descriptor_is_asked_without_the_gil() -> None:
    """Another thread, which needs it to write, ends the wait."""
    read, write = os.pipe()
    assert not _cpu.readable_within(read, 1000)
    thread = threading.Timer(0.05, os.write, (write, b"x"))
    thread.start()
    assert _cpu.readable_within(read, 1_000_000 * PATIENCE_S)
    thread.join()
    assert _cpu.readable_within(read, 0)
    for end in (write, read):
        os.close(end)
    assert _cpu.readable_within(read, 50_000), "what is closed is not waited for"
