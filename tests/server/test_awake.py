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
from nibblelm.server import service
from nibblelm.server.awake import AWAKE_S, LEAST_CORES, PASSES, SLICE_US, Awake, awake_for

sys.path.insert(0, str(Path(__file__).parent))
from waiting import wait_for

SLICE_S = 1e-6 * SLICE_US
LATE_S = 0.05  # on a busy machine; without a mistake it is a slice


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def awake() -> None:
        Awake(asyncio.get_running_loop(), lambda: True).stir()
        await work()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(awake())


def test_timers_and_other_threads_are_seen() -> None:
    async def work() -> None:
        loop, came = asyncio.get_running_loop(), asyncio.Event()
        for _ in range(5):
            begun = time.monotonic()
            await asyncio.sleep(0.005)
            assert time.monotonic() - begun < 0.005 + LATE_S
            sent: list[float] = []

            def tell(sent: list[float] = sent) -> None:
                time.sleep(0.005)
                sent.append(time.monotonic())
                loop.call_soon_threadsafe(came.set)

            thread = threading.Thread(target=tell)
            thread.start()
            await came.wait()
            assert time.monotonic() - sent[0] < LATE_S
            thread.join()
            came.clear()

    run(work)


def test_callbacks_that_follow_each_other_are_held_up_by_a_slice_at_most() -> None:
    async def work() -> None:
        begun, turns = time.monotonic(), 4 * PASSES
        for _ in range(turns):
            await asyncio.sleep(0)
        assert time.monotonic() - begun < turns * SLICE_S + LATE_S

    run(work)


def test_it_is_awake_while_it_is_wanted_and_sleeps_otherwise() -> None:
    async def busy_s(seconds: float) -> float:
        """Processor time of the loop's thread meanwhile."""
        before = time.thread_time()
        await asyncio.sleep(seconds)
        return time.thread_time() - before

    async def work() -> None:
        wanted = [True]
        awake = Awake(asyncio.get_running_loop(), lambda: wanted[0])
        for _ in range(2):
            awake.stir()
            assert await busy_s(0.3) > 0.04  # all of it but for what other processes take
            wanted[0] = False
            await asyncio.sleep(2 * AWAKE_S)
            assert await busy_s(0.3) < 0.03
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
    """Another thread computes meanwhile."""
    counted = [0]

    def count() -> None:
        while counted[0] >= 0:
            counted[0] += 1

    read, write = os.pipe()
    thread = threading.Thread(target=count)
    thread.start()
    begun, before = time.monotonic(), counted[0]
    assert not _cpu.readable_within(read, 50_000)
    assert 0.05 <= time.monotonic() - begun < 0.05 + LATE_S
    assert counted[0] > before + 1000
    counted[0] = -(1 << 60)
    thread.join()
    os.write(write, b"x")
    assert _cpu.readable_within(read, 0)
    for end in (write, read):
        os.close(end)
    assert _cpu.readable_within(read, 50_000), "what is closed is not waited for"
