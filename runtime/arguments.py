"""What `device`, `threads`, `dtype` and the like mean, wherever they are asked for."""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from nibblelm import _cpu, ops
from nibblelm.errors import DeviceError, RequestError
from nibblelm.ops.types import ActivationBits


def usable_threads(count: int | None) -> int:
    """CPU threads to compute on: `count`, None for as many as can be, but no more than the cores this process may use:
    they would wait for each other."""
    cores = _cpu.usable_cores()
    if count is None:
        return cores
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise RequestError(f"threads is {count!r}; supported: 1 or more, None for the cores this process may use")
    if count > cores:
        warnings.warn(
            f"{count} threads were asked for; this process may use {cores} cores, so {cores} run", stacklevel=4
        )
    return min(count, cores)


def use_threads(count: int) -> None:
    """Compute on that many of the `usable_threads`."""
    ops.set_threads(usable_threads(count))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """torch computes on that many threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def select_device(name: str | torch.device) -> torch.device:
    """The device of a name, a card with its number; DeviceError with the reason when a card cannot be used."""
    name = str(name)
    if not (matched := re.fullmatch(r"auto|cpu|cuda(?::(\d{1,4}))?", name)):
        raise RequestError(f"device {name!r} is not supported; use auto, cpu, cuda, or cuda:1 for one of several cards")
    if name == "cpu":
        return torch.device("cpu")
    works, reason = ops.cuda_available()
    if not works and name == "auto":
        return torch.device("cpu")
    if not works:
        raise DeviceError(f"device {name} cannot be used: {reason}")
    index, count = int(matched[1] or torch.cuda.current_device()), torch.cuda.device_count()
    if index >= count:
        raise DeviceError(f"device {name} cannot be used: torch sees {count}, cuda:0 to cuda:{count - 1}")
    return torch.device("cuda", index)


def numeric_types(
    name: str, device: torch.device, activations: Literal[8, 16] | None = None, kv: str = "auto"
) -> tuple[torch.dtype, torch.dtype, ActivationBits]:
    """What `dtype`, `activations` and `kv` mean on a device: hidden state, cache, and bits of the inputs of quantized
    layers.

    Raises RequestError for what is not supported.
    """
    if name not in ("auto", "fp32", "bf16"):
        raise RequestError(f"dtype {name!r} is not supported; use auto, fp32 or bf16")
    if activations is not None and (not isinstance(activations, int) or activations not in (8, 16)):
        raise RequestError(f"activations is {activations!r}; supported: 8 or 16 bits, None for what dtype says")
    if kv not in ("auto", "bf16", "int8"):
        raise RequestError(f"kv {kv!r} is not supported; use auto (the cache as dtype has it), bf16 or int8")
    cache = torch.int8 if kv == "int8" else torch.float32 if (name, kv) == ("fp32", "auto") else torch.bfloat16
    if name == "fp32":
        if activations is not None and device.type == "cuda":
            raise RequestError(
                f"activations {activations} with dtype fp32 is not supported on CUDA, where inputs in fp32 have 24 "
                "bits; use dtype bf16 (the default there), or leave activations out"
            )
        return torch.float32, cache, activations or 24
    if device.type == "cuda":
        return torch.bfloat16, cache, activations or 16
    return torch.float32, cache, activations or (16 if name == "bf16" else 8)
