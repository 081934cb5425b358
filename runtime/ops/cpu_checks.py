"""What CPU ops ask of tensors before they hand addresses to a kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def describe(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device} with strides {x.stride()}"


def row_stride(name: str, x: Tensor, dims: int, shape: Sequence[int | None] = ()) -> int:
    """The stride of the first dimension of an fp32 tensor whose other dimensions are contiguous, and not empty."""
    wanted = tuple(shape) or (None,) * dims
    good = x.ndim == dims and x.dtype == torch.float32 and x.device.type == "cpu"
    good = good and all(size in (None, got) for size, got in zip(wanted, x.shape, strict=True)) and 0 not in x.shape[1:]
    step = 1
    for i in range(dims - 1, 0, -1) if good else ():
        good = good and (x.stride(i) == step or x.shape[i] == 1)
        step *= x.shape[i]
    if not good:
        sizes = ", ".join("*" if size is None else str(size) for size in wanted)
        raise ValueError(
            f"{name} must be fp32 ({sizes}) on the CPU, contiguous in each row, not empty, got {describe(x)}"
        )
    return x.stride(0) if x.shape[0] > 1 else step


def flat(name: str, x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> int:
    """The address of a contiguous tensor of exactly this shape and dtype."""
    if tuple(x.shape) != tuple(shape) or x.dtype != dtype or x.device.type != "cpu" or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous {tuple(shape)} {dtype} on the CPU, got {describe(x)}")
    return x.data_ptr()


def indices(name: str, x: Tensor, count: int) -> int:
    return flat(name, x, (count,), torch.int32)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
