"""What an engine's thread works on: messages of callers, steps, and pieces for who reads them."""

import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import torch

from nibblelm.choosing import Choice, compute_alone
from nibblelm.errors import EngineError, RequestError
from nibblelm.executor import Executor
from nibblelm.memory import settle
from nibblelm.readers import Channel, Waker
from nibblelm.runner import Runner
from nibblelm.scheduler import Scheduler, Sequence
from nibblelm.speculation import Speculation
from nibblelm.stats import Stats

UNHURRIED_S = 0.05
"""Without a message for so long, the thread makes what prompts to come would wait for, a part of it at a time."""

FEW = 4  # tokens of a step, handed out in less time than the event loop's thread takes to wake


class Core:
    """What the thread works on. It knows neither the Engine nor the handles, whose end it waits for."""

    unprepared = False  # until `Engine.start` asks for it

    def __init__(self, runner: Runner, scheduler: Scheduler, speculation: Speculation | None) -> None:
        self.inbox: SimpleQueue[tuple[Callable[..., None] | None, tuple[Any, ...]]] = SimpleQueue()
        self.end: Callable[[], EngineError] | None = None  # makes what every request gets from now on
        self.wakers: tuple[Waker, ...] = ()  # of all event loops that read
        self.finished = 0
        self.stats = Stats()
        self._scheduler, self._executor = scheduler, Executor(runner, scheduler, self.stats)
        self.runner, self._speculation = runner, speculation
        self.channels: dict[Sequence, Channel] = {}

    def run(self) -> None:
        """The thread: steps until it is told to end, or a step fails."""
        try:
            compute_alone()
            with torch.inference_mode():
                while self.heard():
                    self.step()
            self.stop("it was closed")
        except BaseException as error:
            self.stop(f"a step failed with {type(error).__name__}: {error}", error)
        finally:
            with suppress(RuntimeError):  # of a card that has failed
                settle(self.runner.device)

    def stop(self, why: str, cause: BaseException | None = None) -> None:
        """Give every request its error, and those to come."""

        def ended() -> EngineError:
            error = EngineError(f"the engine has ended, {why}; load the model again to go on")
            error.__cause__ = cause
            return error

        self.end, self.stats.idle = ended, True
        while not self.inbox.empty():
            method, args = self.inbox.get()
            if method == self.add:
                self.channels[args[0]] = args[1]
        for channel in self.channels.values():
            self.stats.end("error")
            channel.put(ended(), last=True)
        self.channels.clear()
        self._wake()

    def add(self, sequence: Sequence, channel: Channel) -> None:
        self.channels[sequence] = channel  # whatever comes, it is told
        try:
            self._scheduler.add(sequence)
        except RequestError as error:
            self.finished += 1
            channel.put(error, last=True)
            del self.channels[sequence]
            self._wake()

    def abort(self, sequence: Sequence, _channel: Channel) -> None:
        if sequence in self.channels:
            self.stats.end("abort")
        self._finish(sequence)

    def resume(self, sequence: Sequence, channel: Channel) -> None:
        if channel.held and sequence in self.channels:  # its last token may have come after it was parked
            channel.held = False
            self._scheduler.resume(sequence)

    def heard(self, wait: bool = True) -> bool:
        """Do what the messages say. With `wait` there is something to compute afterwards, unless it is False: end."""
        while not self.inbox.empty() or (wait and not self._scheduler.has_work):
            if self.inbox.empty():
                self.stats.idle = True
            try:
                method, args = self.inbox.get(timeout=UNHURRIED_S if self.unprepared else None)
            except Empty:
                self.unprepared = self._executor.prepare()
                continue
            if self.stats.idle:
                self.stats.progress, self.stats.idle = time.monotonic(), False
            if method is None:
                return False
            method(*args)
        return True

    def step(self) -> None:
        """Compute what the scheduler plans, and hand out what comes of it."""
        pays = self._speculation is not None and self._drafted(self._speculation)
        plan = self._scheduler.plan()
        for chosen in self._executor.run(plan, land=pays):
            if len(chosen) <= FEW:
                self._wake(early=True)
            for sequence, choice in chosen:
                self._deliver(sequence, choice)
            self._wake()
        self.stats.steps += 1
        if plan.decodes or plan.chunks:
            self.stats.progress = time.monotonic()

    def _wake(self, early: bool = False) -> None:
        """The event loops, once for all that was handed out: each would ask for the GIL at the first token."""
        for waker in self.wakers:
            waker.wake(early)

    def _drafted(self, speculation: Speculation) -> bool:
        """`Speculation.propose`; a request whose drafter has failed ends."""
        pays, failed = speculation.propose(self._scheduler.running, self._executor.ahead, self._executor.bars_drafts)
        for sequence, error in failed:
            self._deliver(sequence, RequestError(f"its drafter failed with {type(error).__name__}: {error}"))
        self._wake()
        return pays

    def _deliver(self, sequence: Sequence, choice: Choice) -> None:
        request, channel = sequence.owner, self.channels[sequence]
        try:
            if choice is None:
                item, last = request.output(), True
            else:
                item = request.accept(choice)
                last = item.output is not None
                if item.token_id is not None:
                    self.stats.token(request)
                if item.output is not None:
                    self.stats.end(item.output.finish_reason, item.output.timings if item.output.token_ids else None)
        except Exception as error:  # this request's alone: its tokenizer's, say
            item, last = error, True
            self.stats.end("error")
        if last:
            self._free(sequence)  # before its reader knows, who may count on the room that it leaves
        channel.put(item, last)
        if last:
            del self.channels[sequence]  # until now `stop` would have told it
        elif channel.full and not sequence.parked:  # a draft may go on behind that
            channel.held = True
            if channel.caught_up:  # read just now, before the reader could see that it is waited for
                channel.held = False
            else:
                self._scheduler.park(sequence)

    def _finish(self, sequence: Sequence) -> None:
        if sequence in self.channels:
            self._free(sequence)
            del self.channels[sequence]

    def _free(self, sequence: Sequence) -> None:
        """Give back what it has; `channels` has it still."""
        self._scheduler.remove(sequence)
        if self._speculation is not None:
            self._speculation.forget(sequence)
        self.finished += 1
