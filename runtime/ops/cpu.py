"""CPU side of the op contract: float32 PyTorch for now, replaced op by op by the kernels of `nibblelm._cpu`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import local

import torch
from torch import Tensor

from nibblelm.ops import reference
from nibblelm.ops.types import PackedLinear, QuantizedWeight, Weight

_state = local()


class Program:
    """A recorded sequence of op calls on fixed tensors."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], None]] = []

    def replay(self) -> None:
        for step in self._steps:
            step()


@contextmanager
def capture(device: torch.device) -> Iterator[Program]:
    program = Program()
    _state.program = program
    try:
        yield program
    finally:
        _state.program = None


def _run(out: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    def step() -> None:
        out.copy_(compute())

    step()
    program = getattr(_state, "program", None)
    if program is not None:
        program._steps.append(step)
    return out


def pack_linear(parts: Sequence[Weight], device: torch.device) -> PackedLinear:
    dense = torch.cat([reference.dequantize(part) for part in parts])
    first = parts[0]
    quantized = isinstance(first, QuantizedWeight)
    bits = first.bits if isinstance(first, QuantizedWeight) else first.element_size() * 8
    group = first.group_size if isinstance(first, QuantizedWeight) else -1
    nbytes = sum(p.nbytes if isinstance(p, QuantizedWeight) else p.numel() * p.element_size() for p in parts)
    del quantized
    return PackedLinear((dense.shape[0], dense.shape[1]), bits, group, nbytes, device, dense)


def linear(x: Tensor, weight: PackedLinear, bias: Tensor | None, activation_bits: int, out: Tensor | None) -> Tensor:
    if out is None:
        out = torch.empty(x.shape[0], weight.shape[0])
    return _run(out, lambda: torch.nn.functional.linear(x, weight.data, bias))


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, plus_one: bool) -> tuple[Tensor, Tensor]:
    h = x if residual is None else _run(torch.empty(x.shape), lambda: x + residual)
    y = _run(torch.empty(x.shape), lambda: reference.rms_norm(h, weight, eps, None, plus_one)[0])
    return y, h


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    return _run(x, lambda: reference.rope(x, positions, cos, sin, interleaved))


def kv_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, positions: Tensor) -> None:
    def write(new: Tensor, cache: Tensor) -> Tensor:
        cache[slots.long(), :, positions.long()] = new.to(cache.dtype)
        return cache

    _run(k_cache, lambda: write(k, k_cache))
    _run(v_cache, lambda: write(v, v_cache))


def attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, positions: Tensor, scale: float, window: int
) -> Tensor:
    out = torch.empty(q.shape[0], q.shape[1] * q.shape[2])
    return _run(out, lambda: reference.attention(q, k_cache, v_cache, slots, positions, scale, window))


def swiglu(gate_up: Tensor) -> Tensor:
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    return _run(out, lambda: reference.swiglu(gate_up))


def embedding(ids: Tensor, table: Weight, dtype: torch.dtype) -> Tensor:
    out = torch.empty(ids.shape[0], table.shape[1])
    return _run(out, lambda: reference.embedding(ids, table))


def softmax(x: Tensor) -> Tensor:
    return _run(torch.empty(x.shape), lambda: reference.softmax(x))


def log_softmax(x: Tensor) -> Tensor:
    return _run(torch.empty(x.shape), lambda: reference.log_softmax(x))


def argmax(x: Tensor) -> Tensor:
    return _run(torch.empty(x.shape[0], dtype=torch.int32), lambda: reference.argmax(x))


def set_threads(count: int) -> None:
    torch.set_num_threads(count)
