"""CUDA side of the op contract: thin calls of `nibblelm._cuda`, on PyTorch's current stream of the current device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from nibblelm.ops.cuda_device import (
    DTYPES,
    Program,
    available,
    capture,
    fused,
    fusion,
    launch_args,
    programmatic_launch,
    require,
)
from nibblelm.ops.cuda_device import kernels as _cuda
from nibblelm.ops.cuda_ops import (
    alibi_mask,
    argmax,
    attention,
    attention_mask,
    embedding,
    geglu,
    gelu,
    kv_append,
    layer_norm,
    log_softmax,
    rms_norm,
    rope,
    rope_append,
    rope_attention,
    sample,
    silu,
    softmax,
    swiglu,
)
from nibblelm.ops.cuda_upload import upload
from nibblelm.ops.types import LinearStep, PackedLinear, QuantizedWeight, Weight

__all__ = [
    "Program",
    "alibi_mask",
    "argmax",
    "attention",
    "attention_mask",
    "available",
    "capture",
    "embedding",
    "fusion",
    "geglu",
    "gelu",
    "kv_append",
    "layer_norm",
    "linear",
    "linear_chain",
    "log_softmax",
    "norm_linear",
    "pack_linear",
    "programmatic_launch",
    "require",
    "rms_norm",
    "rope",
    "rope_append",
    "rope_attention",
    "sample",
    "silu",
    "softmax",
    "swiglu",
]

_FORMATS = {4: 0, 8: 1, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4}
_UNPACK_BYTES = 64 << 20  # workspace of the large-M path: it and the sums of 2,048 rows stay in or near L2


# ---- linear ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CudaWeight:
    """What `PackedLinear.data` is on CUDA: the descriptor that kernels take and the tensors it points into."""

    descriptor: Any
    values: Tensor  # fragments of codes (bytes), or the padded row-major matrix
    records: Tensor | None
    arrivals: Tensor  # int32 zeros, one per strip of 16 rows and one more: the kernels' counters
    exact_codes: bool  # per-row zero-point form: q - zero is an integer that bf16 holds


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
    per, middle = 32 // bits, -0x77777778 if bits == 4 else -0x7F7F7F80  # 8 or 128 in every place of an int32
    words = [
        torch.full((-(-p.shape[0] // per), groups), middle, dtype=torch.int32) if p.zero_point is None else p.zero_point
        for p in parts
    ]
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
    if any(p.zero_point is not None for p in parts):
        zeros = halves([_zeros(parts, device)])
        fields.append(zeros[..., 0::2] | zeros[..., 1::2] << 4 if parts[0].bits == 4 else zeros)
    minima = [p.minimum for p in parts if p.minimum is not None]
    if minima:
        fields.append(halves(minima))
    return fields[0] if len(fields) == 1 else torch.cat(fields, -1)


def _scheme(part: Weight) -> tuple[object, ...]:
    if isinstance(part, QuantizedWeight):
        return part.bits, part.group_size, part.scale.dtype, part.minimum is not None, part.shape[1]
    return part.dtype, part.shape[1]


def pack_linear(parts: Sequence[Weight], device: torch.device, pairs: bool = False) -> PackedLinear:
    require()
    pairs = pairs and len(parts) == 2 and parts[0].shape == parts[1].shape and parts[0].shape[0] % 8 == 0
    first = parts[0]
    if any(_scheme(p) != _scheme(first) for p in parts):
        raise ValueError(f"parts of one linear differ in scheme: {[_scheme(p) for p in parts]}")
    n, k = sum(p.shape[0] for p in parts), first.shape[1]
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
    return CudaWeight(descriptor, values, None, arrivals, False)


def _pack_quantized(parts: list[QuantizedWeight], pairs: bool, n: int, k: int, arrivals: Tensor) -> CudaWeight:
    bits, group = parts[0].bits, parts[0].group_size
    scale_dtype, minimum = parts[0].scale.dtype, parts[0].minimum is not None
    if group not in {-1, 32, 64, 128} or scale_dtype not in DTYPES or k < 1:
        raise ValueError(f"quantized linear with group size {group}, {scale_dtype} scales; supported: -1, 32, 64, 128")
    device, zero = arrivals.device, any(p.zero_point is not None for p in parts)

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
    return CudaWeight(packed, values, records, arrivals, group == -1 and not minimum)


def _checked_linear(x: Tensor, weight: PackedLinear, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """The place of the result; ValueError where the arguments break the contract."""
    (n, k), rows = weight.shape, x.shape[0]
    if x.dim() != 2 or x.shape[1] != k or x.stride(1) != 1 or x.dtype not in {torch.bfloat16, torch.float32}:
        raise ValueError(f"linear: x {tuple(x.shape)} {x.dtype} strides {x.stride()}, want (M, {k}) bf16 or fp32")
    if out is None:
        out = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    elif out.shape != (rows, n) or out.stride(1) != 1 or out.dtype not in {torch.bfloat16, torch.float32}:
        raise ValueError(
            f"linear: out {tuple(out.shape)} {out.dtype} strides {out.stride()}, want ({rows}, {n}) bf16 or fp32"
        )
    if bias is not None and (bias.shape != (n,) or bias.dtype != torch.float32 or not bias.is_contiguous()):
        raise ValueError(f"linear: bias {tuple(bias.shape)} {bias.dtype}, want contiguous ({n},) fp32")
    return out


def linear(x: Tensor, weight: PackedLinear, bias: Tensor | None, activation_bits: int, out: Tensor | None) -> Tensor:
    out = _checked_linear(x, weight, bias, out)
    if x.shape[0] > _cuda.MAX_DECODE_ROWS:
        _large_linear(x, weight, bias, out)
    elif x.shape[0] > 0:
        step, _workspace = _decode_step(x, weight, bias, out, *_NO_FUSION)
        _cuda.linear([step], *launch_args())
    return out


def _decode_step(x: Tensor, weight: PackedLinear, bias: Tensor | None, out: Tensor, *fusion: float) -> tuple[Any, Any]:
    """What the kernel takes, and the workspace, to be kept until the launch.

    fusion  gain, residual and h (addresses), residual stride, eps, plus_one, swiglu
    """
    data: CudaWeight = weight.data
    size = _cuda.linear_workspace(data.descriptor, x.data_ptr(), x.stride(0), DTYPES[x.dtype], x.shape[0])
    workspace = torch.empty(size, dtype=torch.uint8, device=x.device) if size else None
    step = _cuda.LinearStep(
        data.descriptor, x.data_ptr(), x.stride(0), DTYPES[x.dtype], out.data_ptr(), out.stride(0),
        DTYPES[out.dtype], 0 if bias is None else bias.data_ptr(), x.shape[0],
        0 if workspace is None else workspace.data_ptr(), data.arrivals.data_ptr(), *fusion,
    )  # fmt: skip
    return step, workspace


_NO_FUSION = (0, 0, 0, 0, 0.0, False, False)


def _norm_step(
    x: Tensor,
    gain: Tensor,
    eps: float,
    residual: Tensor | None,
    weight: PackedLinear,
    bias: Tensor | None,
    out: Tensor | None,
    plus_one: bool,
    gated: bool,
) -> tuple[tuple[Any, Any], Tensor, Tensor] | None:
    """(step and workspace, y, h), or None where the kernel does not take these arguments."""
    n, k = weight.shape
    rows = [x] if residual is None else [x, residual]
    fits = all(
        t.shape == (x.shape[0], k) and t.dtype == torch.bfloat16 and t.stride(1) == 1 and t.stride(0) % 8 == 0
        and t.data_ptr() % 16 == 0
        for t in rows
    )  # fmt: skip
    if not (
        fused() and fits and 0 < x.shape[0] <= _cuda.MAX_DECODE_ROWS and k % 8 == 0 and k <= _cuda.MAX_NORM_COLUMNS
        and gain.data_ptr() % 16 == 0 and (not gated or (weight.pairs and bias is None and out is None))
    ):  # fmt: skip
        return None
    if gain.shape != (k,) or gain.dtype != torch.float32 or not gain.is_contiguous():
        raise ValueError(f"norm_linear: gain {tuple(gain.shape)} {gain.dtype}, want contiguous ({k},) fp32")
    if out is None:
        out = torch.empty(x.shape[0], n // 2 if gated else n, dtype=x.dtype, device=x.device)
    h = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    step = _decode_step(
        x, weight, bias, out, gain.data_ptr(), 0 if residual is None else residual.data_ptr(), h.data_ptr(),
        0 if residual is None else residual.stride(0), eps, plus_one, gated,
    )  # fmt: skip
    return step, out, h


def norm_linear(
    x: Tensor,
    gain: Tensor,
    eps: float,
    residual: Tensor | None,
    weight: PackedLinear,
    bias: Tensor | None,
    out: Tensor | None,
    plus_one: bool,
    gated: bool,
) -> tuple[Tensor, Tensor] | None:
    """(y, h) by one kernel, or None where these arguments have none."""
    found = _norm_step(x, gain, eps, residual, weight, bias, out, plus_one, gated)
    if found is None:
        return None
    (step, _workspace), y, h = found
    _cuda.linear([step], *launch_args())
    return y, h


def linear_chain(
    x: Tensor, residual: Tensor | None, steps: Sequence[LinearStep]
) -> tuple[Tensor, Tensor | None] | None:
    """(y, residual) by as few kernels as can be, or None where a step has none."""
    if not (fused() and x.dtype == torch.bfloat16 and 0 < x.shape[0] <= _cuda.MAX_DECODE_ROWS):
        return None
    recorded, kept = [], [x]
    for step in steps:
        if step.gain is None:
            out = _checked_linear(x, step.weight, step.bias, None)
            found, x = _decode_step(x, step.weight, step.bias, out, *_NO_FUSION), out
        else:
            normed = _norm_step(x, step.gain, step.eps, residual, step.weight, step.bias, None, False, step.gated)
            if normed is None:
                return None
            found, x, residual = normed
        recorded.append(found)
        kept.append(x)
    _cuda.linear([step for step, _ in recorded], *launch_args())
    return x, residual


@contextmanager
def _full_accumulation() -> Iterator[None]:
    """fp32 products without TF32 and bf16 products summed in fp32 throughout, whatever the caller's settings are."""
    matmul = torch.backends.cuda.matmul
    precision, reduced = matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction
    matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = "ieee", False
    try:
        yield
    finally:
        matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = precision, reduced


def _large_linear(x: Tensor, weight: PackedLinear, bias: Tensor | None, out: Tensor) -> None:
    """M > 16: chunks of the weight as a matrix in x's dtype, then torch.matmul."""
    (n, k), data = weight.shape, cast(CudaWeight, weight.data)
    chunk = max(16, _UNPACK_BYTES // (k * x.element_size()) // 16 * 16)
    if data.records is None and data.values.dtype == x.dtype:
        chunk = n
    scaled = data.exact_codes and x.dtype == torch.bfloat16
    with _full_accumulation():
        for first in range(0, n, chunk):
            count = min(chunk, n - first)
            matrix = _unpacked(data, first, count, k, x.dtype, scaled)
            target = out[:, first : first + count]
            if scaled:
                sums = torch.mm(x, matrix.T, out_dtype=torch.float32)
                _cuda.linear_scale_columns(
                    data.descriptor, first, count, sums.data_ptr(), x.shape[0], out.data_ptr(), out.stride(0),
                    DTYPES[out.dtype], 0 if bias is None else bias.data_ptr(), *launch_args(),
                )  # fmt: skip
            elif bias is None and out.dtype == x.dtype:
                torch.mm(x, matrix.T, out=target)
            else:
                same = x.dtype == torch.float32
                sums = torch.mm(x, matrix.T) if same else torch.mm(x, matrix.T, out_dtype=torch.float32)
                target.copy_(sums if bias is None else sums.add_(bias[first : first + count]))


def _unpacked(data: CudaWeight, first: int, count: int, k: int, dtype: torch.dtype, codes_only: bool) -> Tensor:
    """Rows [first, first + count) as (count, K) in `dtype`; a view where the weight already is one."""
    if data.records is None:
        return data.values[first : first + count, :k].to(dtype)
    matrix = torch.empty(count, k, dtype=dtype, device=data.values.device)
    _cuda.linear_unpack(data.descriptor, first, count, matrix.data_ptr(), DTYPES[dtype], codes_only, *launch_args())
    return matrix
