"""Whether what is about to be allocated fits on a device, in numbers; and memory that is taken as it is used."""

import mmap
from math import prod

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


def reserved(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor; on the CPU address space, of which a page takes memory once it is written."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    count = prod(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    reserved = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    return torch.frombuffer(reserved, dtype=dtype, count=count).view(shape)
