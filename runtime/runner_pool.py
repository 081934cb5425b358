"""Several live calls on one model: each borrows a runner, with its cache, for itself, and their steps take turns."""

import time
from collections.abc import Callable, Sequence
from threading import Lock, current_thread

from nibblelm.errors import DeviceError, NibbleLMError, RequestError
from nibblelm.runner import Runner

MAX_CALLS = 16
"""Calls that are live at a time; each holds a cache."""

_POLL_S = 0.005


class Loan:
    """A runner in the hands of one call, until the end of its `with` block.

    Giving back is one assignment and takes no lock: a stream may be garbage collected at any point of any thread, also
    where that thread holds the lock already.
    """

    def __init__(self) -> None:
        self.runner: Runner | None = None
        self.thread = current_thread()  # the one that reads; not its number, which a later thread may have

    def __enter__(self) -> "Loan":
        return self

    def __exit__(self, *_: object) -> None:
        self.runner = None


class RunnerPool:
    """The runners of one model, which share its weights. `lock` is held by whoever computes, for one step at a time."""

    def __init__(self, make: Callable[[], Runner]) -> None:
        self.lock = Lock()
        self._make = make
        self.runners = [make()]
        self.runners[0].reserve(1)
        self._loans: list[Loan] = []

    def borrow(self, loan: Loan, slots: int, ids: Sequence[int] = ()) -> Runner:
        """A runner with room for `slots` sequences; of the idle ones, the one that knows most of the start of `ids`.

        Waits while all are lent, unless this thread holds one itself, which might be the one to wait for: then
        RequestError. DeviceError where the device's memory is too small for one more cache.
        """
        while True:
            obstacle: NibbleLMError = RequestError(
                f"{MAX_CALLS} streams or calls of this model are live, one of them in this thread; "
                "read a stream to its end or close() it before you start another"
            )
            with self.lock:
                self._loans = [other for other in self._loans if other.runner is not None]
                try:
                    if (runner := self._idle(slots, ids)) is not None:
                        self._loans.append(loan)
                        loan.runner = runner
                        return runner
                except DeviceError as error:
                    obstacle = error
                others = [other.thread for other in self._loans]
            if not others or loan.thread in others:
                raise obstacle
            time.sleep(_POLL_S)

    def _idle(self, slots: int, ids: Sequence[int]) -> Runner | None:
        busy = [loan.runner for loan in self._loans]
        idle = [runner for runner in self.runners if runner not in busy]
        if not idle and len(self.runners) < MAX_CALLS:
            idle = [self._make()]
            self.runners += idle
        if not idle:
            return None
        runner = max(idle, key=lambda one: self._worth(one, slots, ids))
        try:
            runner.reserve(slots)
        except DeviceError:
            for other in idle:  # what they keep for a next turn is worth less than this call
                other.release()
            runner.reserve(slots)
        return runner

    @staticmethod
    def _worth(one: Runner, slots: int, ids: Sequence[int]) -> tuple[int, int, int]:
        """Most of the start of `ids`, then the most room, then what it knows is least: a chat may go on."""
        return one.shared_prefix(ids), min(len(one.history), slots), -len(one.history[0]) if one.history else 0
