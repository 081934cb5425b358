"""What comes of an engine's requests, read in an event loop: one call into the loop for all that a step has brought."""

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

BACKLOG = 64
"""Pieces that wait for a reader before its sequence sits out; it goes on when half of them are read."""


class Readable(Protocol):
    """What a Reader asks of `engine_core.Handle`."""

    def waker(self) -> "Waker": ...
    def tell(self, reader: "Reader | None") -> None: ...
    def waiting(self, pieces: list[Any]) -> bool: ...
    def abort(self) -> None: ...


class Reader:
    """One or more handles of one engine, read together in the event loop that runs where this is made.

    news     called there once something has come since the last `take`; raises nothing
    failure  stands behind all that was taken: what a handle's `tokens` would raise
    """

    def __init__(self, handles: Sequence[Readable], news: Callable[[], object]) -> None:
        self.news = news
        self.failure: Exception | None = None
        self._open, self._told = dict(enumerate(handles)), False
        self.waker = handles[0].waker()
        self.waker.readers.add(self)
        for i, handle in enumerate(handles):
            try:
                handle.tell(self)
            except BaseException:
                for told in handles[:i]:
                    told.tell(None)
                raise

    @property
    def ended(self) -> bool:
        """Whether nothing will come any more."""
        return self.failure is not None or not self._open

    def take(self) -> list[tuple[int, Any]]:
        """All that is there, each with the place of its handle."""
        self._told = False  # before looking: what comes from now on is told again
        batch: list[tuple[int, Any]] = []
        for place, handle in list(self._open.items()):
            pieces: list[Any] = []
            try:
                more = handle.waiting(pieces)
            except Exception as error:
                self.failure, more = self.failure or error, False
            if not more:
                del self._open[place]
            batch += [(place, piece) for piece in pieces]
        return batch

    def leave(self) -> None:
        """Let go of the handles, which aborts those that nobody else has."""
        open_handles, self._open = self._open, {}
        for handle in open_handles.values():
            handle.tell(None)

    def tell(self) -> None:
        """From any thread: there is news, for when the waker wakes the loop."""
        if not self._told:
            self._told = True
            self.waker.due.append(self)


async def collect(handles: Sequence[Readable]) -> AsyncIterator[list[tuple[int, Any]]]:
    """What comes of requests of one engine, read together in an event loop: all that is there, each with the place of
    its handle. Leaving aborts them all. Raises what a handle's `tokens` would.
    """
    news = asyncio.Event()
    reader = Reader(handles, news.set)
    try:
        while not reader.ended:
            news.clear()
            if batch := reader.take():
                yield batch
            elif not reader.ended:
                await news.wait()
        if reader.failure is not None:
            raise reader.failure
    finally:
        for handle in handles:
            handle.abort()


class Waker:
    """Tells the readers of one event loop, with one call into it for all that came since the loop last looked."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = weakref.ref(loop)
        self.readers: weakref.WeakSet[Reader] = weakref.WeakSet()
        self.due: deque[Reader] = deque()
        self._called = False

    def lives(self) -> bool:
        """Whether the loop is there and not closed; where it is not, nobody waits, and its readers are let go of."""
        loop = self.loop()
        if loop is not None and not loop.is_closed():  # else perhaps with a call in it that was never made
            return True
        for reader in list(self.readers):
            reader.leave()
        self.due.clear()
        return False

    def wake(self, early: bool = False) -> None:
        """From any thread. `early`: before there is news, which comes while the loop's thread wakes."""
        if not (self.due or (early and self.readers)) or not self.lives() or self._called:
            return
        loop, self._called = self.loop(), True
        try:
            if loop is not None:
                loop.call_soon_threadsafe(self._tell_all)
        except RuntimeError:  # closed meanwhile
            self.lives()

    def _tell_all(self) -> None:
        self._called = False  # before looking: what comes from now on calls again
        while self.due:
            self.due.popleft().news()


class Channel:
    """What the engine's thread has for one reader, of whatever kind."""

    def __init__(self, stream: bool) -> None:
        self.stream = stream
        self.items: SimpleQueue[tuple[Any, bool]] = SimpleQueue()
        self.sent = self.read = 0  # each is written by one side alone
        self.held = False  # the sequence sits out
        self.reader: Reader | None = None

    @property
    def backlog(self) -> int:
        return self.sent - self.read

    @property
    def full(self) -> bool:
        return self.stream and self.backlog >= BACKLOG

    @property
    def caught_up(self) -> bool:
        return self.backlog <= BACKLOG // 2

    def put(self, item: Any, last: bool = False) -> None:
        if self.stream or last:
            self.sent += 1
            self.items.put((item, last))
            if (reader := self.reader) is not None:
                reader.tell()
