"""Whether what is about to be allocated fits on a device, in numbers."""

import torch

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
