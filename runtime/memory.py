"""Whether what is about to be allocated fits on a device, in numbers; and memory that is taken as it is used."""

import mmap
import os
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from nibblelm.errors import DeviceError


def require_memory(device: torch.device, advice: str, **wanted: int) -> None:
    """Raise DeviceError that lists `wanted` (bytes per purpose) when their sum is more than the device has free.

    Nothing is checked on the CPU, whose cache takes memory only as it is used.
    """
    if device.type != "cuda":
        return
    free, total = torch.cuda.mem_get_info(device)
    needed = sum(wanted.values())
    if needed > free:
        parts = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in wanted.items())
        raise DeviceError(
            f"{needed / 2**30:.2f} GiB are needed on {device} ({parts}); {free / 2**30:.2f} of {total / 2**30:.2f} GiB "
            f"are free. {advice}"
        )


def out_of_memory(error: RuntimeError) -> bool:
    """Whether it says that a device has no memory left: torch's own error, or CUDA's, for what torch does not take."""
    return "out of memory" in str(error)


def settle(device: torch.device) -> None:
    """Wait for the step that may be under way: what it writes to, pinned memory too, may go then."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def free_memory(device: torch.device) -> int:
    """Bytes that a device has free; on the CPU those that the system gives without swapping, at most its cgroup's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = (line.split() for line in meminfo.read_text().splitlines())
        free = min(free, next((int(line[1]) * 1024 for line in lines if line[0] == "MemAvailable:"), free))
    limit, used = (Path("/sys/fs/cgroup") / name for name in ("memory.max", "memory.current"))
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        free = min(free, max(int(limit.read_text()) - int(used.read_text()), 0))
    return free


def reserved(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor; on the CPU address space, of which a page takes memory once it is written."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    count = prod(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        reserved = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    except (OSError, OverflowError, ValueError) as error:
        raise DeviceError(
            f"{count * dtype.itemsize / 2**30:.2f} GiB of address space cannot be had: {error}. Choose a smaller "
            "max_context (--ctx-size), kv_memory (--kv-memory) or max_sequences"
        ) from error
    return torch.frombuffer(reserved, dtype=dtype, count=count).view(shape)
