"""One thread that owns the model, and the requests of all others.

Callers put messages into a queue, and read what comes out of one queue for each request. Both are SimpleQueues, whose
`put` may interrupt itself: a stream may be garbage collected at any point of any thread, and that aborts its request.
"""

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Iterator
from queue import Empty, SimpleQueue
from typing import Any

from nibblelm.engine_thread import Core
from nibblelm.errors import EngineError, EngineFullError, RequestError
from nibblelm.readers import Channel, Reader, Waker, collect
from nibblelm.request import LogitsRequest, Request
from nibblelm.runner import Runner
from nibblelm.scheduler import Scheduler, Sequence
from nibblelm.speculation import Speculation

MOST_REQUESTS = 4096
"""Unfinished requests at a time, where an engine is not made for another number."""

_ABORTED = object()


class Engine:
    """Requests from any number of threads and event loops, computed together by a thread that starts with the first.

    scheduler  made for all slots and pages that the runner has but the last of each
    most       unfinished requests at a time
    """

    def __init__(
        self, runner: Runner, scheduler: Scheduler, most: int = MOST_REQUESTS, speculation: Speculation | None = None
    ) -> None:
        self._core = Core(runner, scheduler, speculation)
        self.stats = self._core.stats
        self.scheduler = scheduler  # for the engine's thread; others may look at its counts
        self.most, self._added = most, 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()

    def add(self, request: Request | LogitsRequest, stream: bool = True) -> "Handle":
        """Enter a request. Without `stream` only its last piece is handed out, and no reader holds it up.

        Raises EngineFullError if too many are unfinished, EngineError after `close` or a failed step, and in a process
        that was forked after the thread had begun, which stayed behind.
        """
        self.check_process()
        core = self._core
        sequence = Sequence(
            list(request.ids),
            len(request.ids),
            len(request.ids) + max(request.most, 1),
            share=0 if core.runner.bidirectional else request.share,
            owner=request,
            root=core.runner.root(request.ids),
            whole=core.runner.bidirectional,
        )
        channel = Channel(stream)
        with self._lock:
            if core.end is not None:
                raise core.end()
            if (unfinished := self.unfinished) >= self.most:
                raise EngineFullError(
                    f"{unfinished} requests are unfinished, the most there may be; wait for some to end"
                )
            self._start()
            handle = Handle(self, core, sequence, channel)  # first: whatever comes between, someone has it
            self._added += 1
            core.inbox.put((core.add, (sequence, channel)))
        if core.end is not None:  # it ended meanwhile, and may not have seen the message
            channel.put(core.end(), last=True)
        return handle

    def check_process(self) -> None:
        """Raise EngineError in a process that was forked after the thread had begun, which stayed behind."""
        if self._thread is not None and self._process != os.getpid():
            raise EngineError("this process was forked from the one that computes; load the model in it again")

    def start(self) -> None:
        """Start the thread before the first request: while idle, it prepares what prompts would wait for. For where
        nothing else in the process uses the device: what waits for all of that ends a capture under way.
        """
        with self._lock:
            if self._core.end is None and self._thread is None:
                self._core.unprepared = True
                self._start()

    @property
    def unfinished(self) -> int:
        """Requests that were entered and have not ended."""
        return 0 if self._core.end is not None else self._added - self._core.finished

    @property
    def paused(self) -> int:
        """Of these, requests that sit out until their reader has caught up."""
        return sum(channel.held for channel in list(self._core.channels.values()))

    @property
    def prepared(self) -> bool:
        """Whether what `start` began is done."""
        return not self._core.unprepared

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._core.run, name="nibblelm-engine", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise EngineError(f"no thread for the engine: {error}; there may be too many") from error
            self._process, self._thread = os.getpid(), thread
            weakref.finalize(self, _stop, self._core.inbox, thread)  # also when the interpreter exits

    @property
    def end(self) -> EngineError | None:
        """Why the engine computes nothing any more, None while it does."""
        end = self._core.end
        return None if end is None else end()

    def waker(self) -> Waker:
        """Of the event loop that runs here."""
        loop = asyncio.get_running_loop()
        with self._lock:
            there = [waker for waker in self._core.wakers if waker.lives()]
            own = next((waker for waker in there if waker.loop() is loop), None)
            if own is None:
                own = Waker(loop)
                self._core.wakers = (*there, own)
        return own

    def close(self) -> None:
        """End the thread, after its step; unfinished requests get an EngineError."""
        with self._lock:
            if self._thread is None:
                self._core.stop("it was closed")
                return
        _stop(self._core.inbox, self._thread)


class Handle:
    """One request of an engine. Dropping it aborts the request, as `abort` does."""

    def __init__(self, engine: Engine, core: Core, sequence: Sequence, channel: Channel) -> None:
        self._engine = engine  # which lives for as long as anyone reads
        self._core, self._sequence, self._channel = core, sequence, channel
        self._ended = False
        self._last: Any = None  # piece, or what was raised in its place

    def tokens(self) -> Iterator[Any]:
        """Each StreamPiece as it comes; the last one has the output. For a LogitsRequest its logits, once. Of several
        that read at a time each gets some.

        Raises EngineError if the engine ends before the request does, and in a forked process.
        """
        while not self._ended:
            self._engine.check_process()
            item = self._taken(self._channel.items.get())
            if item is not _ABORTED:
                yield item

    async def __aiter__(self) -> AsyncIterator[Any]:
        """The same in an event loop. Leaving it aborts the request; to come back raises RequestError."""
        if self._ended and self._last is None:
            raise RequestError("the request was aborted, as leaving an `async for` does; submit it again")
        async for batch in collect([self]):
            for _, item in batch:
                yield item

    def abort(self) -> None:
        """Stop computing: slot and pages, and its place among the engine's `most`, are free after the step that runs.
        Who reads comes to the end."""
        if not self._ended:
            self._core.inbox.put((self._core.abort, (self._sequence, self._channel)))
            self._end()

    def result(self) -> Any:
        """The last of `tokens`: a StreamPiece with the output, or logits. Raises RequestError where it was aborted."""
        for _ in self.tokens():
            pass
        if self._last is None:
            raise RequestError("the request was aborted, and has no result")
        if isinstance(self._last, Exception):
            raise self._last
        return self._last

    def __del__(self) -> None:
        self.abort()

    def waker(self) -> Waker:
        """That of the engine for the event loop that runs here."""
        return self._engine.waker()

    def tell(self, reader: Reader | None) -> None:
        """Who is told of what comes from now on. Raises RequestError where another is already, EngineError in a forked
        process."""
        if self._ended:
            return
        if reader is not None:
            self._engine.check_process()
        if reader is not None and self._channel.reader is not None:
            raise RequestError("the request is read in an event loop already; read it in one place")
        self._channel.reader = reader

    def waiting(self, pieces: list[Any]) -> bool:
        """Add what can be taken without waiting. Whether more may come. Raises what `tokens` would."""
        items = self._channel.items
        while not self._ended:
            try:
                item = self._taken(items.get_nowait())
            except Empty:
                break
            if item is not _ABORTED:
                pieces.append(item)
        return not self._ended

    def _end(self) -> None:
        """For all that read: a thread may have ended it under an event loop's reader, or the other way round."""
        channel = self._channel
        channel.items.put((_ABORTED, True))
        self._ended = True
        reader, channel.reader = channel.reader, None  # which holds this handle
        if reader is not None:
            reader.tell()
            reader.waker.wake()

    def _taken(self, entry: tuple[Any, bool]) -> Any:
        item, last = entry
        channel = self._channel
        channel.read += 1
        if last:
            if item is not _ABORTED:
                self._last = item
            self._end()
        if channel.held and channel.caught_up:
            self._core.inbox.put((self._core.resume, (self._sequence, channel)))
        if isinstance(item, Exception):
            raise item
        return item


def _stop(inbox: SimpleQueue[Any], thread: threading.Thread) -> None:
    inbox.put((None, ()))
    if thread is not threading.current_thread():
        thread.join()
