"""An event loop whose thread does not sleep while somebody waits for it.

A thread that sleeps sees a request or a token 20 us later, and its processor, once awake, runs Python at two thirds of
its speed: 0.1 ms of a first token (benchmarks/h200/NOTES.md). So the thread of a loop that is waited for asks the
system again and again, without the GIL, which the engine's thread needs.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from nibblelm import _cpu

AWAKE_S = 0.02
"""Seconds that it stays awake after it was waited for last: who has read an answer may ask on."""

SLICE_US = 200
"""For so long at a time it asks for what comes from outside, and sees neither timers nor callbacks meanwhile."""

PASSES = 8
"""Turns of the loop after something has come before it asks so again: callbacks that follow each other."""

LEAST_CORES = 4
"""That the process may use: on fewer a thread that does not sleep takes the time of others."""


class Awake:
    """Keeps a loop's thread awake.

    wanted  whether somebody waits for it; asked in the loop
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wanted: Callable[[], bool]) -> None:
        self._loop, self._wanted = loop, wanted
        uvloop: Any = loop
        self._descriptor = uvloop._get_backend_id()
        self._until, self._passes, self._turning = 0.0, 0, False

    def stir(self) -> None:
        """It may be wanted from now on."""
        self._passes = PASSES
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        now = time.monotonic()
        if self._wanted():
            self._until = now + AWAKE_S
        elif now > self._until:
            self._turning = False
            return
        if self._passes:
            self._passes -= 1
        elif _cpu.readable_within(self._descriptor, SLICE_US):
            self._passes = PASSES
        self._loop.call_soon(self._turn)


def awake_for(device: str, loop: asyncio.AbstractEventLoop, wanted: Callable[[], bool]) -> Awake | None:
    """One where it pays: beside a device that computes by itself, with processors to spare, in a loop that shows what
    it waits for."""
    pays = device != "cpu" and _cpu.usable_cores() >= LEAST_CORES and hasattr(loop, "_get_backend_id")
    return Awake(loop, wanted) if pays else None
