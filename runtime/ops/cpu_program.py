"""Recorded sequences of CPU ops, replayed without Python."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import local
from typing import Any, ParamSpec, TypeVar

import torch

from nibblelm import _cpu

_thread = local()
P = ParamSpec("P")
R = TypeVar("R")


class Program:
    """A recorded sequence of kernel calls, and the tensors that they touch.

    Runs of kernels are native programs; between them stand the Python steps of ops that have no kernel.
    """

    def __init__(self) -> None:
        self._parts: list[Any] = []  # _cpu.Program, or a callable
        self._tensors: list[object] = []

    def __len__(self) -> int:
        return sum(1 if callable(part) else len(part) for part in self._parts)

    def replay(self) -> None:
        for part in self._parts:
            part() if callable(part) else part.replay()

    def _begin(self) -> None:
        part = _cpu.Program()
        part.begin()  # raises if this thread is recording already
        self._parts.append(part)

    def _end(self) -> None:
        if self._parts and not callable(self._parts[-1]):
            self._parts[-1].end()


@contextmanager
def capture(device: torch.device, _pool: object = None) -> Iterator[Program]:
    program = Program()
    program._begin()
    _thread.program = program
    try:
        yield program
    finally:
        program._end()
        _thread.program = None


def keep(*objects: object) -> None:
    """Hold what the call just made has recorded by address."""
    program: Program | None = getattr(_thread, "program", None)
    if program is not None:
        program._tensors.extend(objects)


def through_reference(compute: Callable[P, R]) -> Callable[P, R]:
    """An op that is computed in PyTorch, recorded like the others."""

    @wraps(compute)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        result = compute(*args, **kwargs)
        program: Program | None = getattr(_thread, "program", None)
        if program is not None:
            outputs: tuple[Any, ...] = result if isinstance(result, tuple) else (result,)

            def again() -> None:
                values = compute(*args, **kwargs)
                for out, value in zip(outputs, values if isinstance(values, tuple) else (values,), strict=True):
                    out.copy_(value)

            program._end()
            program._parts.append(again)
            program._begin()
        return result

    return op
