"""Which module has the kernels of a device."""

from types import ModuleType

import torch

from nibblelm.errors import DeviceError


def backend(device: torch.device) -> ModuleType:
    """The kernel module of a device: `ops.cpu` or `ops.cuda`."""
    if device.type == "cpu":
        from nibblelm.ops import cpu

        return cpu
    if device.type == "cuda":
        from nibblelm.ops import cuda

        return cuda
    raise DeviceError(f"device {device.type!r} is not supported; use cpu or cuda")


def kernels(device: torch.device) -> str:
    """Which of its kernels run on a device: "cuda", or the CPU's instruction set as `doctor` names it."""
    if device.type == "cuda":
        return "cuda"
    from nibblelm import _cpu

    return _cpu.isa()


def reclaim(device: torch.device) -> None:
    """Give a device back what torch keeps of models that are gone, so that it counts as free."""
    if device.type == "cuda":
        backend(device).reclaim(device)
