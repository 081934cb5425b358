"""What an engine has done: counters and histograms, written by its thread alone and read by anyone."""

import time
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nibblelm.request import Request, Timings

SECONDS = tuple(round(base * 10.0**power, 9) for power in range(-4, 3) for base in (1, 1.5, 2, 3, 5, 7))
"""Upper bounds of the histograms, 0.1 ms to 700 s: a token may take 1 ms, an answer minutes."""


class Histogram:
    """How many values lie in each interval, as Prometheus counts them: a bound belongs to the interval below it."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Stats:
    """Of one engine since it began. Times in seconds, token counts whole.

    idle        the thread waits for messages, with nothing to compute
    progress    time.monotonic() of the last step that computed something, or of the end of the last wait
    """

    def __init__(self) -> None:
        self.idle, self.progress = True, time.monotonic()
        self.steps = 0
        self.prompt_tokens = self.found_tokens = self.generated_tokens = 0
        self.drafts = self.draft_tokens = self.accepted_tokens = 0
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "error": 0, "abort": 0}
        self.first_token, self.inter_token, self.end_to_end = Histogram(), Histogram(), Histogram()
        self.queue, self.prefill, self.decode = Histogram(), Histogram(), Histogram()

    def token(self, request: "Request") -> None:
        """A request has got a token, just now."""
        now = time.perf_counter()
        if len(request.sampled) == 1:
            self.first_token.add(now - request.created)
            self.prompt_tokens += len(request.ids)
            self.found_tokens += request.start
        else:
            self.inter_token.add(now - request.last)
        self.generated_tokens += 1
        request.last = now

    def end(self, reason: str, timings: "Timings | None" = None) -> None:
        """A request has ended; `timings` if it has generated something."""
        self.finished[reason] += 1
        if timings is not None:
            self.queue.add(timings.queue_s)
            self.prefill.add(timings.prefill_s)
            self.decode.add(timings.decode_s)
            self.end_to_end.add(timings.queue_s + timings.prefill_s + timings.decode_s)

    @property
    def stalled_s(self) -> float:
        """For how long there has been something to compute, and nothing came of it."""
        return 0.0 if self.idle else time.monotonic() - self.progress
