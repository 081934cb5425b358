"""What the CUDA ops share: the extension, whether it can run, its stream, and capture into a graph."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from threading import Lock
from typing import Any, ParamSpec, TypeVar

import torch

from nibblelm.errors import DeviceError

try:
    from nibblelm import _cuda  # pyright: ignore[reportAttributeAccessIssue]

    kernels: Any = _cuda
    _LOAD_ERROR = ""
except ImportError as error:
    kernels = None
    _LOAD_ERROR = str(error)

P = ParamSpec("P")
R = TypeVar("R")

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
CACHE_DTYPES = {torch.float32: 0, torch.bfloat16: 2, torch.int8: 3}
_programmatic: ContextVar[bool | None] = ContextVar("programmatic_launch", default=None)
_wgmma: ContextVar[bool] = ContextVar("wgmma", default=True)
_between = Lock()  # held while a program is captured


def _obstacle() -> str:
    """Why CUDA kernels cannot run here; empty where they can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device; check nvidia-smi and the driver"
    if kernels is None:
        if "No module named" in _LOAD_ERROR or "cannot import name" in _LOAD_ERROR:
            return "the extension nibblelm._cuda is not built; reinstall where nvcc is on the PATH"
        return f"the extension nibblelm._cuda does not load: {_LOAD_ERROR}"
    return ""


def available() -> tuple[bool, str]:
    """Whether CUDA kernels can run here, and if not, why (for `nibblelm doctor` and error messages)."""
    obstacle = _obstacle()
    return not obstacle, obstacle or f"{torch.cuda.get_device_name()}, torch CUDA {torch.version.cuda}"


def require() -> None:
    """Raise `DeviceError` with the real reason where CUDA kernels cannot run."""
    if obstacle := _obstacle():
        raise DeviceError(f"device 'cuda' cannot be used: {obstacle}. Use device 'cpu', or fix that first")


def on_card(op: Callable[P, R]) -> Callable[P, R]:
    """An op that runs on the card of its first argument, a tensor, whichever is the current one.

    A kernel is launched on the current card; elsewhere it would find neither its stream nor its memory.
    """

    @wraps(op)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0] if args else next(iter(kwargs.values()))
        if first.device.index == torch.cuda.current_device():
            return op(*args, **kwargs)
        with torch.cuda.device(first.device):
            return op(*args, **kwargs)

    return call


def launch_args() -> tuple[int, bool]:
    """(stream, programmatic): the last two arguments of every launcher."""
    return torch.cuda.current_stream().cuda_stream, bool(_programmatic.get())


@contextmanager
def programmatic_launch(enabled: bool) -> Iterator[None]:
    """Whether the block's kernels may start before the kernel ahead of them has finished (sm_90 and later).

    Outside of any such block they may where they are captured, and may not where they are called. Such kernels read
    weights ahead of their turn in the stream, so entering waits for those whose upload is under way.
    """
    if enabled and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    token = _programmatic.set(enabled)
    try:
        yield
    finally:
        _programmatic.reset(token)


@contextmanager
def wgmma(enabled: bool) -> Iterator[None]:
    """Let the block's linears and prefill attention use `wgmma` where the card has it, or `mma.sync` as other cards do.

    Linears have the same bits with both, attention has not.
    """
    token = _wgmma.set(enabled)
    try:
        yield
    finally:
        _wgmma.reset(token)


def mma_sync() -> bool:
    """Whether kernels have to do without `wgmma` here."""
    return not _wgmma.get()


_outlived: list[torch.cuda.CUDAGraph] = []
"""Of programs that were given up during a capture, which destroying them would end."""


class Program:
    """A captured CUDA graph; the tensors that were made while it was recorded live as long as it does."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.graph = device, torch.cuda.CUDAGraph(keep_graph=True)

    def __del__(self) -> None:
        if torch.cuda.is_current_stream_capturing():  # the next one has taken its name
            _outlived.append(self.graph)

    def __len__(self) -> int:
        """Kernels and copies of one replay."""
        return int(kernels.graph_nodes(self.graph.raw_cuda_graph()))

    def replay(self) -> None:
        with torch.cuda.device(self.device):
            self.graph.replay()


class Pool:
    """Memory that programs have in common, which never run at the same time.

    It is found again by the stream that it was made for, so they are captured on one.
    """

    def __init__(self, device: torch.device) -> None:
        self.handle, self.stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)


@contextmanager
def between_captures() -> Iterator[None]:
    """For what waits for the whole device, or gives memory back to it: in any thread that ends a capture under way."""
    with _between:
        yield


def reclaim(device: torch.device) -> None:
    """See `devices.reclaim`."""
    if torch.cuda.memory_reserved(device):
        gc.collect()  # an error's traceback may have one
        with between_captures(), torch.cuda.device(device):
            torch.cuda.empty_cache()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No cycle of Python objects is collected meanwhile: what one has of CUDA's, say a program, ends a capture when it
    is destroyed in its thread."""
    with _between:
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


@contextmanager
def capture(device: torch.device, pool: Pool | None = None) -> Iterator[Program]:
    """Record the block as a CUDA graph on a side stream, with programmatic launches.

    Run the same calls once before: first use loads kernels. Unlike `torch.cuda.graph` it does not give free memory
    back to the device, which takes up to a second: others are being served.
    """
    require()
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a program is being recorded in this thread; end it before the next one")
    program, pool = Program(device), pool or Pool(device)
    with torch.cuda.device(device), torch.cuda.stream(pool.stream), _no_collection():
        program.graph.capture_begin(pool.handle, "thread_local")
        try:
            with programmatic_launch(_programmatic.get() is not False):
                yield program
        finally:
            program.graph.capture_end()
            _outlived.clear()
    program.graph.instantiate()
