"""CUDA linear: packing of weights, and calls of the kernels for any number of rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from nibblelm.ops.cuda_device import DTYPES, launch_args, mma_sync, require
from nibblelm.ops.cuda_device import kernels as _cuda
from nibblelm.ops.cuda_upload import upload
from nibblelm.ops.types import (
    ActivationBits,
    After,
    Gate,
    LinearStep,
    PackedLinear,
    PostNorm,
    QuantizedWeight,
    Weight,
)

_FORMATS = {4: 0, 8: 1, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4}
_GATES: dict[Gate | None, int] = {None: 0, "silu": 1, "tanh": 2}  # `Gate` in csrc/cuda/linear.h
_AFTER: dict[After | None, int] = {None: 0, "gelu_tanh": 1, "gelu_erf": 2, "relu": 3}  # `After` there
MAX_NORM_COLUMNS = 16384
"""Of rows that `norm_linear` takes; csrc/cuda/linear.h refuses more too."""
_MOST_COLUMNS = 1 << 16  # 255 x 127 x 65,536 is the largest sum of codes by digits below 2^31


@dataclass(frozen=True)
class CudaWeight:
    """What `PackedLinear.data` is on CUDA: the descriptor that kernels take and the tensors it points into."""

    descriptor: Any
    values: Tensor  # fragments of codes (bytes), or the padded row-major matrix
    records: Tensor | None
    arrivals: Tensor  # int32 zeros, one per strip of 16 rows and one more: the kernels' counters


def _padded(t: Tensor, rows: int, columns: int) -> Tensor:
    if t.shape == (rows, columns):
        return t
    return torch.nn.functional.pad(t, (0, columns - t.shape[1], 0, rows - t.shape[0]))


def _stacked(parts: Sequence[Tensor], pairs: bool, device: torch.device) -> Tensor:
    """The rows of all parts on the device; in pairs, 8 of the first and then 8 of the second in turn."""
    t = upload(parts, device)
    return t.unflatten(0, (2, -1, 8)).transpose(0, 1).flatten(0, 2) if pairs else t


def _zeros(parts: Sequence[QuantizedWeight], device: torch.device) -> Tensor:
    """Zero-points of all parts as uint8 (N, G)."""
    bits, groups = parts[0].bits, parts[0].groups
    per, words = 32 // bits, [cast(Tensor, p.zero_point) for p in parts]
    zeros = upload(words, device).view(-1).view(torch.uint8).view(-1, groups, 4).transpose(1, 2)  # little-endian
    if bits == 4:
        zeros = torch.stack([zeros & 15, zeros >> 4], 2)
    padded = zeros.reshape(-1, groups).split([w.shape[0] * per for w in words])
    return torch.cat([t[: p.shape[0]] for t, p in zip(padded, parts, strict=True)])


def _records(parts: Sequence[QuantizedWeight], pairs: bool, strips: int, groups: int, device: torch.device) -> Tensor:
    """Scales, zero-points and minima in the layout of csrc/cuda/linear.h: uint8 (strips, groups, record bytes)."""

    def halves(tensors: Sequence[Tensor]) -> Tensor:
        t = _padded(_stacked(tensors, pairs, device), strips * 16, groups).view(strips, 2, 8, groups)
        return t.permute(0, 3, 2, 1).contiguous().view(strips, groups, -1).view(torch.uint8)

    fields = [halves([p.scale for p in parts])]
    if parts[0].zero_point is not None:
        zeros = halves([_zeros(parts, device)])
        fields.append(zeros[..., 0::2] | zeros[..., 1::2] << 4 if parts[0].bits == 4 else zeros)
    minima = [p.minimum for p in parts if p.minimum is not None]
    if minima:
        fields.append(halves(minima))
    return fields[0] if len(fields) == 1 else torch.cat(fields, -1)


def pack_linear(parts: Sequence[Weight], device: torch.device, pairs: bool = False) -> PackedLinear:
    require()
    first = parts[0]
    n, k = sum(p.shape[0] for p in parts), first.shape[1]
    halves = len(parts) == 1 or (len(parts) == 2 and parts[0].shape == parts[1].shape)
    pairs = pairs and halves and n % 16 == 0
    with torch.cuda.device(device):
        arrivals = torch.zeros(-(-n // 16) + 1, dtype=torch.int32, device=device)
        packed = (
            _pack_quantized([cast(QuantizedWeight, p) for p in parts], pairs, n, k, arrivals)
            if isinstance(first, QuantizedWeight)
            else _pack_full([cast(Tensor, p) for p in parts], pairs, n, k, arrivals)
        )
        if launch_args()[1]:  # kernels may read weights before the work ahead of them is done
            torch.cuda.current_stream().synchronize()
    nbytes = sum(t.numel() * t.element_size() for t in (packed.values, packed.records) if t is not None)
    bits, group = (first.bits, first.group_size) if isinstance(first, QuantizedWeight) else (8 * first.itemsize, -1)
    return PackedLinear((n, k), bits, group, nbytes, device, packed, pairs)


def _pack_full(parts: list[Tensor], pairs: bool, n: int, k: int, arrivals: Tensor) -> CudaWeight:
    if parts[0].dtype not in DTYPES:
        raise ValueError(f"full weights are fp32, fp16 or bf16, not {parts[0].dtype}")
    device = arrivals.device
    values = _padded(_stacked(parts, pairs, device), n, -(-k // 32) * 32).contiguous()
    if values.data_ptr() % 16:
        values = values.clone()
    dtype = DTYPES[values.dtype]
    descriptor = _cuda.LinearWeight(
        values.data_ptr(), 0, _FORMATS[values.dtype], n, k, values.shape[1], 0, dtype, False, False
    )
    return CudaWeight(descriptor, values, None, arrivals)


def _pack_quantized(parts: list[QuantizedWeight], pairs: bool, n: int, k: int, arrivals: Tensor) -> CudaWeight:
    bits, group = parts[0].bits, parts[0].group_size
    scale_dtype, minimum = parts[0].scale.dtype, parts[0].minimum is not None
    if k > _MOST_COLUMNS:
        raise ValueError(f"quantized linear with K = {k}; supported: at most {_MOST_COLUMNS}, so that sums fit int32")
    if group not in {-1, 32, 64, 128} or scale_dtype not in DTYPES or k < 1:
        raise ValueError(f"quantized linear with group size {group}, {scale_dtype} scales; supported: -1, 32, 64, 128")
    device, zero = arrivals.device, parts[0].zero_point is not None

    def descriptor(values: int, records: int) -> Any:
        group_size = max(group, 0)
        return _cuda.LinearWeight(
            values, records, _FORMATS[bits], n, k, 0, group_size, DTYPES[scale_dtype], zero, minimum
        )

    sizes = descriptor(0, 0)
    small = sizes.strips * sizes.groups < 1 << 12  # then a launch costs more than the CPU's work
    where = torch.device("cpu") if small and parts[0].scale.device.type == "cpu" else device
    records = upload([_records(parts, pairs, sizes.strips, sizes.groups, where)], device)
    codes = _stacked([p.codes for p in parts], pairs, device)
    values = torch.empty(sizes.strips * sizes.steps * 256 * bits, dtype=torch.uint8, device=device)
    packed = descriptor(values.data_ptr(), records.data_ptr())
    stream = torch.cuda.current_stream().cuda_stream
    _cuda.linear_pack(packed, codes.data_ptr(), codes.shape[1], values.data_ptr(), stream)
    return CudaWeight(packed, values, records, arrivals)


def _check_linear(x: Tensor, weight: PackedLinear, bias: Tensor | None, activation_bits: int, out: Tensor) -> None:
    """ValueError where the arguments break the contract."""
    (n, k), rows = weight.shape, x.shape[0]
    if activation_bits == 8 and x.dtype == torch.float32:
        raise ValueError("linear: 8-bit activations are made of bf16 rows on CUDA, not of fp32")
    if x.dim() != 2 or x.shape[1] != k or x.stride(1) != 1 or x.dtype not in {torch.bfloat16, torch.float32}:
        raise ValueError(f"linear: x {tuple(x.shape)} {x.dtype} strides {x.stride()}, want (M, {k}) bf16 or fp32")
    if out.shape != (rows, n) or out.stride(1) != 1 or out.dtype not in {torch.bfloat16, torch.float32}:
        raise ValueError(
            f"linear: out {tuple(out.shape)} {out.dtype} strides {out.stride()}, want ({rows}, {n}) bf16 or fp32"
        )
    if bias is not None and (bias.shape != (n,) or bias.dtype != torch.float32 or not bias.is_contiguous()):
        raise ValueError(f"linear: bias {tuple(bias.shape)} {bias.dtype}, want contiguous ({n},) fp32")


def linear(x: Tensor, weight: PackedLinear, bias: Tensor | None, activation_bits: int, out: Tensor) -> Tensor:
    _check_linear(x, weight, bias, activation_bits, out)
    if x.shape[0] > 0:
        _launch([_Call(x, weight, bias, out, activation_bits)])
    return out


@dataclass(frozen=True)
class _Norm:
    """What comes before a linear, and what after it."""

    gain: Tensor | None
    eps: float
    residual: Tensor | None
    h: Tensor
    plus_one: bool = False
    gate: Gate | None = None
    post: PostNorm | None = None
    centred: bool = False
    gain_bias: Tensor | None = None
    addend: Tensor | None = None
    after: After | None = None

    def arguments(self) -> dict[str, Any]:
        """Of the kernel's."""
        given: dict[str, Any] = {
            "h": self.h.data_ptr(), "plus_one": self.plus_one, "centres": self.centred, "gate": _GATES[self.gate],
            "after": _AFTER[self.after], "eps": self.eps,
        }  # fmt: skip
        for name, rows in (("residual", self.residual), ("addend", self.addend)):
            if rows is not None:
                given |= {name: rows.data_ptr(), f"{name}_stride": rows.stride(0)}
        for name, gain in (("gain", self.gain), ("gain_bias", self.gain_bias)):
            if gain is not None:
                given[name] = gain.data_ptr()
        if self.post is not None:
            given |= {"post_gain": self.post[0].data_ptr(), "post_eps": self.post[1]}
        return given


@dataclass(frozen=True)
class _Call:
    """One linear; it holds the tensors whose addresses the kernel takes."""

    x: Tensor
    weight: PackedLinear
    bias: Tensor | None
    out: Tensor
    activation_bits: int
    norm: _Norm | None = None

    def workspace_bytes(self) -> int:
        descriptor, x = self.weight.data.descriptor, self.x
        eight_bits = self.activation_bits == 8
        return _cuda.linear_workspace(descriptor, x.data_ptr(), x.stride(0), DTYPES[x.dtype], x.shape[0], eight_bits)

    def step(self, workspace: Tensor | None) -> Any:
        x, out, norm, data = self.x, self.out, self.norm, self.weight.data
        return _cuda.LinearStep(
            weight=data.descriptor, x=x.data_ptr(), x_stride=x.stride(0), x_dtype=DTYPES[x.dtype], y=out.data_ptr(),
            y_stride=out.stride(0), y_dtype=DTYPES[out.dtype], bias=0 if self.bias is None else self.bias.data_ptr(),
            rows=x.shape[0], eight_bits=self.activation_bits == 8, mma_sync=mma_sync(),
            workspace=0 if workspace is None else workspace.data_ptr(), arrivals=data.arrivals.data_ptr(),
            **({} if norm is None else norm.arguments()),
        )  # fmt: skip


def _launch(calls: Sequence[_Call]) -> None:
    """One after another. Those of few rows may run as one kernel and need a workspace each."""
    sizes, device = [call.workspace_bytes() for call in calls], calls[0].x.device

    def workspace(size: int) -> Tensor | None:
        return torch.empty(size, dtype=torch.uint8, device=device) if size else None

    if calls[0].x.shape[0] > _cuda.MAX_DECODE_ROWS:
        spaces = [workspace(max(sizes))] * len(calls)
    else:
        spaces = [workspace(size) for size in sizes]
    _cuda.linear([call.step(space) for call, space in zip(calls, spaces, strict=True)], *launch_args())


def _norm_call(
    x: Tensor,
    gain: Tensor | None,
    eps: float,
    weight: PackedLinear,
    residual: Tensor | None,
    bias: Tensor | None,
    activation_bits: int,
    dtype: torch.dtype,
    **options: Any,
) -> _Call:
    n, k = weight.shape
    norm = _Norm(
        gain, eps, residual, x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device), **options
    )
    rows = [t for t in (x, residual, norm.addend) if t is not None]
    gains = [t for t in (gain, None if norm.post is None else norm.post[0], norm.gain_bias) if t is not None]
    aligned = all(
        t.shape == (x.shape[0], k) and t.dtype == torch.bfloat16 and t.stride(1) == 1 and t.stride(0) % 8 == 0
        and t.data_ptr() % 16 == 0
        for t in rows
    )  # fmt: skip
    pairs = weight.pairs and bias is None and dtype == x.dtype
    if not aligned or k % 8 or k > MAX_NORM_COLUMNS or (norm.gate and not pairs):
        raise ValueError(
            f"norm_linear: x {tuple(x.shape)} {x.dtype} strides {x.stride()}, weight {weight.shape}, gate {norm.gate}; "
            f"supported: aligned bf16 rows of a multiple of 8 up to {MAX_NORM_COLUMNS} columns, gates in pairs, no bias"
        )
    for t in gains:
        if t.shape != (k,) or t.dtype != torch.float32 or not t.is_contiguous() or t.data_ptr() % 16:
            raise ValueError(f"norm_linear: gain {tuple(t.shape)} {t.dtype}, want aligned contiguous ({k},) fp32")
    before = (norm.post is not None) + (norm.addend is not None)
    if (gain is None and norm.post is None) or before > 1 or (before and residual is None):
        raise ValueError(
            "norm_linear: no norm, or one before the residual is added or an addend and no residual, or both; use "
            "linear, rms_norm, layer_norm, add"
        )
    if (norm.centred and (gain is None or norm.post is not None)) or (norm.gain_bias is not None and not norm.centred):
        raise ValueError("norm_linear: a LayerNorm takes a gain and no post, and a gain_bias is of a LayerNorm")
    if norm.after and (norm.gate or dtype != x.dtype):
        raise ValueError(f"norm_linear: {norm.after} after a gate or of {dtype}; supported: of bf16, without a gate")
    out = torch.empty(x.shape[0], n // 2 if norm.gate else n, dtype=dtype, device=x.device)
    if not norm.gate:
        _check_linear(x, weight, bias, activation_bits, out)
    return _Call(x, weight, bias, out, activation_bits, norm)


def norm_linear(
    x: Tensor,
    gain: Tensor | None,
    eps: float,
    weight: PackedLinear,
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    activation_bits: ActivationBits = 24,
    dtype: torch.dtype = torch.bfloat16,
    *,
    plus_one: bool = False,
    gate: Gate | None = None,
    post: PostNorm | None = None,
    centred: bool = False,
    gain_bias: Tensor | None = None,
    addend: Tensor | None = None,
    after: After | None = None,
) -> tuple[Tensor, Tensor]:
    """`rms_norm(x, gain, eps, residual)` or, `centred`, `layer_norm` with `gain_bias`; then `linear`; then `swiglu` or
    `geglu` of pairs, or what is `after`: their bits, one kernel (`after` with several rows: two).

    x, residual, addend, h (M, K) bf16, gain, gain_bias (K,) fp32; returns (y, h): y (M, N) in `dtype` or, with a gate,
    (M, N / 2); h = x + residual. With `post`, `rms_norm(x, *post)` stands for x, with `addend` x + addend; without a
    gain h is not normed. ValueError where the kernel does not take the arguments.
    """
    options = {
        "plus_one": plus_one, "gate": gate, "post": post, "centred": centred, "gain_bias": gain_bias, "addend": addend,
        "after": after,
    }  # fmt: skip
    call = _norm_call(x, gain, eps, weight, residual, bias, activation_bits, dtype, **options)
    if x.shape[0] > 0:
        _launch([call])
    assert call.norm is not None
    return call.out, call.norm.h


_OWN = ("plus_one", "gate", "post", "centred", "gain_bias", "after")
"""What a step hands on to `_Norm` as it is."""


def linear_chain(
    x: Tensor, steps: Sequence[LinearStep], activation_bits: ActivationBits = 24, **given: Tensor
) -> tuple[Tensor, ...]:
    """`linear` or, with a norm, `norm_linear` one after another, each of what was given or came before: their bits, for
    one row one kernel, or as few as can be.

    x, given (M, K) bf16; returns of each step y and, where it has a residual, h. ValueError where a kernel does not
    take the arguments.
    """
    held, results = {"x": x, **given}, list[Tensor]()
    calls: list[_Call] = []
    for i, step in enumerate(steps):
        own, residual = held[step.x], None if step.residual is None else held[step.residual]
        if step.norms:
            options = {name: getattr(step, name) for name in _OWN}
            addend = None if step.addend is None else held[step.addend]
            how = (step.weight, residual, step.bias, activation_bits, own.dtype)
            calls.append(_norm_call(own, step.gain, step.eps, *how, addend=addend, **options))
        else:
            out = torch.empty(own.shape[0], step.weight.shape[0], dtype=own.dtype, device=own.device)
            _check_linear(own, step.weight, step.bias, activation_bits, out)
            calls.append(_Call(own, step.weight, step.bias, out, activation_bits))
        held[f"y{i}"] = calls[-1].out
        results.append(calls[-1].out)
        if (norm := calls[-1].norm) is not None and residual is not None:
            held[f"h{i}"] = norm.h
            results.append(norm.h)
    if x.shape[0] > 0:
        _launch(calls)
    return tuple(results)
