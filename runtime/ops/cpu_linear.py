"""CPU linears: packing, and the call of their kernels. The contract is in `ops`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nibblelm import _cpu
from nibblelm.ops.cpu_checks import FLOATS, describe, dtype_name, flat, row_stride
from nibblelm.ops.cpu_program import keep
from nibblelm.ops.types import PackedLinear, QuantizedWeight, Weight

ACTIVATIONS = ("silu", "tanh", "erf", "softcap", "relu", "scale")  # in the order of csrc/cpu/kernels.h
PANEL_ROWS = 64  # csrc/cpu/panels.h
_STREAMED_ROWS = 12  # up to which panels are read once, in their order: from gates to ups and back, 3 to 6 % slower


def quantized_part(weight: QuantizedWeight) -> tuple[int, int, int, int, int]:
    """Addresses of a quantized weight's tensors and its number of rows, after checking their shapes."""
    (n, k), per_word, groups = weight.shape, 32 // weight.bits, weight.groups
    if weight.bits not in (4, 8) or n < 1 or k < 1 or (weight.group_size != -1 and weight.group_size % 8):
        raise ValueError(
            f"a quantized weight must have 4 or 8 bits and groups of a multiple of 8 or -1 (one per row), got "
            f"{weight.bits} bits, groups of {weight.group_size}, shape {weight.shape}"
        )
    if weight.scale.dtype not in FLOATS or (weight.minimum is not None and weight.zero_point is not None):
        raise ValueError(f"scales must be fp32, bf16 or fp16, with a zero-point or a minimum, got {weight.scale.dtype}")
    codes = flat("codes", weight.codes, (n, -(-k // per_word)), torch.int32)
    scale = flat("scale", weight.scale, (n, groups), weight.scale.dtype)
    zero = minimum = 0
    if weight.zero_point is not None:
        zero = flat("zero_point", weight.zero_point, (-(-n // per_word), groups), torch.int32)
    if weight.minimum is not None:
        minimum = flat("minimum", weight.minimum, (n, groups), weight.scale.dtype)
    return codes, scale, zero, minimum, n


def pack_linear(parts: Sequence[Weight], device: torch.device, pairs: bool = False) -> PackedLinear:
    del pairs  # swiglu and geglu are kernels of their own
    first, n = parts[0], sum(part.shape[0] for part in parts)
    if isinstance(first, QuantizedWeight):
        sources = [quantized_part(part) for part in parts if isinstance(part, QuantizedWeight)]
        k, scale_type = first.shape[1], dtype_name(first.scale.dtype)
        data = _cpu.pack_quantized(sources, k, first.group_size, first.bits, scale_type)
        return PackedLinear((n, k), first.bits, first.group_size, data.nbytes, device, data)
    if first.ndim != 2 or first.dtype not in FLOATS or not first.numel():
        raise ValueError(f"a full weight must be (N, K) fp32, bf16 or fp16, got {describe(first)}")
    k = first.shape[1]
    dense = [(flat("weight", part, (part.shape[0], k), first.dtype), part.shape[0]) for part in parts]  # type: ignore[arg-type]
    data = _cpu.pack_full(dense, k, dtype_name(first.dtype))
    return PackedLinear((n, k), 8 * first.element_size(), -1, data.nbytes, device, data)


def linear(x: Tensor, weight: PackedLinear, bias: Tensor | None, activation_bits: int, out: Tensor) -> Tensor:
    return _linear(x, weight, bias, activation_bits, out, None, False)


def linear_activation(
    x: Tensor,
    weight: PackedLinear,
    bias: Tensor | None,
    activation_bits: int,
    dtype: torch.dtype,
    form: str,
    gated: bool = False,
) -> Tensor:
    """`linear` with an activation of its result; gated, of its first half, times the second: both are whole panels."""
    n = weight.shape[0]
    if form not in (*ACTIVATIONS[:3], "relu") or weight.bits not in (4, 8) or (gated and n % (2 * PANEL_ROWS)):
        raise ValueError(f"activation {form!r} of a linear with {weight.bits} bits, {n} rows, gated {gated}")
    m = x.shape[0]
    out = x.new_empty(m, n // 2 if gated else n, dtype=dtype)
    if not gated or m > _STREAMED_ROWS:
        return _linear(x, weight, bias, activation_bits, out, form, gated)
    y = _linear(x, weight, bias, activation_bits, x.new_empty(m, n, dtype=dtype), None, False)
    _cpu.activate(y.data_ptr(), out.data_ptr(), m, n // 2, n, ACTIVATIONS.index(form), True, 0.0)
    keep(y, out)
    return out


def _linear(
    x: Tensor,
    weight: PackedLinear,
    bias: Tensor | None,
    activation_bits: int,
    out: Tensor,
    form: str | None,
    gated: bool,
) -> Tensor:
    (n, k), m = weight.shape, x.shape[0]
    x_stride = row_stride("x", x, 2, (None, k))
    out_stride = row_stride("out", out, 2, (m, n // 2 if gated else n))
    bias_at = 0 if bias is None else flat("bias", bias, (n,), torch.float32)
    if activation_bits not in (8, 16, 24):
        raise ValueError(f"activation_bits must be 8, 16 or 24, got {activation_bits}")
    addresses = (weight.data, x.data_ptr(), bias_at, out.data_ptr(), m, x_stride, out_stride)
    if weight.bits in (4, 8):
        after = -1 if form is None else ACTIVATIONS.index(form)
        _cpu.quantized_linear(*addresses, activation_bits // 8, after, gated)
    else:
        _cpu.full_linear(*addresses)
    keep(weight, x, bias, out)
    return out
