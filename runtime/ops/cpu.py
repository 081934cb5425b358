"""CPU side of the op contract: checks what was passed, allocates the result, calls the kernels of `nibblelm._cpu`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nibblelm import _cpu
from nibblelm.ops import reference
from nibblelm.ops.cpu_checks import FLOATS, describe, dtype_name, flat, indices, row_stride
from nibblelm.ops.cpu_linear import ACTIVATIONS, linear, linear_activation, pack_linear, quantized_part
from nibblelm.ops.cpu_program import Program, capture, keep, through_reference
from nibblelm.ops.types import PAGE, Int8Pages, Pages, QuantizedWeight, Weight

__all__ = ["Program", "capture", "linear", "linear_activation", "pack_linear"]


def keep_freed_memory() -> None:
    """Let this process reuse freed blocks instead of returning them to the system (csrc/cpu/memory.h says why)."""
    _cpu.keep_freed_memory()


def set_threads(count: int) -> None:
    """Use `count` threads, the caller's included, but no more than the cores this process may use; 0: as many."""
    if count < 0:
        raise ValueError(f"the number of threads must not be negative, got {count}")
    _cpu.set_threads(min(count, _cpu.usable_cores()))


# ---------------------------------------------------------------------------------------------- layer ops


def _rms_norm_into(
    out: Tensor, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, plus_one: bool
) -> Tensor:
    """`out` (which may be x) = the norm; returns x + residual, or x."""
    shape = tuple(x.shape)
    x_stride, out_stride = row_stride("x", x, x.ndim), row_stride("out", out, x.ndim, shape)
    width, heads = shape[-1], shape[1] if x.ndim == 3 else 1
    total, residual_at, residual_stride, sum_at = x, 0, 0, 0
    if residual is not None:
        residual_stride = row_stride("residual", residual, x.ndim, shape)
        total = torch.empty(shape)
        residual_at, sum_at = residual.data_ptr(), total.data_ptr()
    weight_at = flat("weight", weight, (width,), torch.float32)
    sizes = (shape[0], heads, width, x_stride, residual_stride, out_stride)
    _cpu.rms_norm(x.data_ptr(), residual_at, weight_at, out.data_ptr(), sum_at, *sizes, eps, plus_one)
    keep(x, residual, weight, out, total)
    return total


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, plus_one: bool) -> tuple[Tensor, Tensor]:
    if x.ndim not in (2, 3):
        raise ValueError(f"x must be (M, H) or (M, heads, D), got {describe(x)}")
    out = torch.empty(x.shape)
    return out, _rms_norm_into(out, x, weight, eps, residual, plus_one)


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    stride = row_stride("x", x, 3)
    (m, heads, width), (capacity, half) = x.shape, cos.shape
    streams = positions.shape[0] if positions.ndim == 2 else 1
    if 2 * half * streams > width or streams > 2:
        raise ValueError(f"tables of {2 * half} and positions {tuple(positions.shape)} do not fit heads of {width}")
    tables = (flat("cos", cos, cos.shape, torch.float32), flat("sin", sin, cos.shape, torch.float32))
    for i, stream in enumerate(positions if positions.ndim == 2 else (positions,)):
        address = x.data_ptr() + i * (width // 2) * 4
        sizes = (m, heads, width, stride, half, capacity)
        _cpu.rope(address, indices("positions", stream, m), *tables, *sizes, interleaved)
    keep(x, positions, cos, sin)
    return x


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    if x.ndim not in (2, 3):
        raise ValueError(f"x must be (M, H) or (M, heads, D), got {describe(x)}")
    shape = tuple(x.shape)
    x_stride, width, heads = row_stride("x", x, x.ndim), shape[-1], shape[1] if x.ndim == 3 else 1
    out, total = torch.empty(shape), x
    residual_at, residual_stride, sum_at = 0, 0, 0
    if residual is not None:
        residual_stride, total = row_stride("residual", residual, x.ndim, shape), torch.empty(shape)
        residual_at, sum_at = residual.data_ptr(), total.data_ptr()
    per_head = weight.ndim == 2
    weight_at = flat("weight", weight, (heads, width) if per_head else (width,), torch.float32)
    bias_at = 0 if bias is None else flat("bias", bias, (width,), torch.float32)
    at = (x.data_ptr(), residual_at, weight_at, bias_at, out.data_ptr(), sum_at)
    _cpu.layer_norm(*at, shape[0], heads, width, x_stride, residual_stride, eps, per_head)
    keep(x, residual, weight, bias, out, total)
    return out, total


def add(x: Tensor, y: Tensor) -> Tensor:
    strides, (m, width) = (row_stride("x", x, 2), row_stride("y", y, 2, tuple(x.shape))), x.shape
    out = torch.empty(m, width)
    _cpu.add(x.data_ptr(), y.data_ptr(), out.data_ptr(), m, width, *strides)
    keep(x, y, out)
    return out


def _activate(x: Tensor, form: str, gated: bool, cap: float = 0.0) -> Tensor:
    stride, (m, columns) = row_stride("x", x, 2), x.shape
    if gated and columns % 2:
        raise ValueError(f"gate_up must have an even number of columns, got {describe(x)}")
    if form not in ACTIVATIONS or (form == "softcap" and not cap > 0):
        raise ValueError(f"activation {form!r} with cap {cap} is not supported; forms: {list(ACTIVATIONS)}, cap > 0")
    width = columns // 2 if gated else columns
    out = torch.empty(m, width)
    _cpu.activate(x.data_ptr(), out.data_ptr(), m, width, stride, ACTIVATIONS.index(form), gated, cap)
    keep(x, out)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    return _activate(gate_up, "silu", True)


def geglu(gate_up: Tensor, form: str) -> Tensor:
    return _activate(gate_up, form, True)


def gelu(x: Tensor, form: str) -> Tensor:
    return _activate(x, form, False)


def silu(x: Tensor) -> Tensor:
    return _activate(x, "silu", False)


def softcap(x: Tensor, cap: float) -> Tensor:
    return _activate(x, "softcap", False, cap)


def relu(x: Tensor) -> Tensor:
    return _activate(x, "relu", False)


def scale(x: Tensor, factor: float) -> Tensor:
    return _activate(x, "scale", False, factor)


# ---------------------------------------------------------------------------------------------- attention


def _pool(name: str, pool: Pages, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, int]:
    """The addresses of a pool's values and, in int8, its scales (else 0), after checking both."""
    if isinstance(pool, Int8Pages):
        scales = flat(f"the scales of {name}", pool.scales, shape[:3], torch.float32)
        return flat(name, pool.codes, shape, dtype), scales
    return flat(name, pool, shape, dtype), 0


def _cache(k_cache: Pages, v_cache: Pages, tables: Tensor) -> tuple[_cpu.KvCache, int, int]:
    """The cache, its number of heads and their width."""
    shape, dtype, quantized = k_cache.shape, k_cache.dtype, isinstance(k_cache, Int8Pages)
    known = (torch.int8,) if quantized else (torch.float32, torch.bfloat16)
    if len(shape) != 4 or shape[2] != PAGE or dtype not in known or isinstance(v_cache, Int8Pages) != quantized:
        got = f"{tuple(shape)} {dtype} and {type(v_cache).__name__} of {v_cache.dtype}"
        raise ValueError(f"k_cache must be (P, heads, {PAGE}, D) fp32, bf16 or Int8Pages, v_cache the same, got {got}")
    if tables.ndim != 2:
        raise ValueError(f"tables must be (S, W) int32, got {describe(tables)}")
    (pages, heads, _, width), (slots, table_width) = shape, tables.shape
    (k, k_scales), (v, v_scales) = _pool("k_cache", k_cache, shape, dtype), _pool("v_cache", v_cache, shape, dtype)
    cache = _cpu.KvCache(
        k=k, v=v, k_scales=k_scales, v_scales=v_scales, tables=flat("tables", tables, tables.shape, torch.int32),
        pages=pages, slots=slots, table_width=table_width, heads=heads, width=width, bytes=dtype.itemsize,
    )  # fmt: skip
    return cache, heads, width


def kv_append(
    k: Tensor, v: Tensor, k_cache: Pages, v_cache: Pages, slots: Tensor, positions: Tensor, tables: Tensor
) -> None:
    cache, heads, width = _cache(k_cache, v_cache, tables)
    m = k.shape[0]
    strides = row_stride("k", k, 3, (m, heads, width)), row_stride("v", v, 3, (m, heads, width))
    where = indices("slots", slots, m), indices("positions", positions, m)
    _cpu.kv_append(k.data_ptr(), v.data_ptr(), cache, *where, m, *strides)
    keep(k, v, k_cache, v_cache, slots, positions, tables)


def rope_append(
    qkv: Tensor,
    positions: Tensor,
    places: Tensor,
    slots: Tensor,
    tables: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Pages,
    v_cache: Pages,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    plus_one: bool,
    interleaved: bool,
) -> Tensor:
    kv_heads = k_cache.shape[1]
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    for part, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            _rms_norm_into(part, part, weight, eps, None, plus_one)
        rope(part, places, cos, sin, interleaved)
    kv_append(k, v, k_cache, v_cache, slots, positions, tables)
    return q


def attention(
    q: Tensor,
    k_cache: Pages,
    v_cache: Pages,
    slots: Tensor,
    positions: Tensor,
    tables: Tensor,
    scale: float,
    window: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    prefix_lengths: Tensor | None,
    starts: Tensor | None,
    mask: Tensor | None,
    tiles: Tensor | None,
    generated: int,
) -> Tensor:
    del tiles, generated  # one kernel for all
    cache, kv_heads, width = _cache(k_cache, v_cache, tables)
    stride, (m, heads, _) = row_stride("q", q, 3, (None, None, width)), q.shape
    if heads % kv_heads or window < 0:
        raise ValueError(f"{heads} query heads on {kv_heads} kv heads with window {window} is not possible")
    out = torch.empty(m, heads * width)
    where = indices("slots", slots, m), indices("positions", positions, m)
    options = (
        0 if alibi_slopes is None else flat("alibi_slopes", alibi_slopes, (heads,), torch.float32),
        0 if prefix_lengths is None else indices("prefix_lengths", prefix_lengths, m),
        0 if starts is None else indices("starts", starts, tables.shape[0]),
        *((0, 0, 0) if mask is None else (mask.data_ptr(), row_stride("mask", mask, 2, (m, None)), mask.shape[1])),
    )
    _cpu.attention(q.data_ptr(), cache, *where, out.data_ptr(), m, heads, stride, window, scale, softcap, *options)
    keep(q, k_cache, v_cache, slots, positions, tables, out, alibi_slopes, prefix_lengths, starts, mask)
    return out


# ---------------------------------------------------------------------------------------------- tables and rows


def embedding(ids: Tensor, table: Weight, dtype: torch.dtype, multiplier: float) -> Tensor:
    if dtype != torch.float32:
        raise ValueError(f"activations on the CPU are fp32, got {dtype}")
    m, (rows, width) = ids.numel(), table.shape
    if width < 1:
        raise ValueError(f"table must have at least one column, got {tuple(table.shape)}")
    out = torch.empty(m, width)
    where = indices("ids", ids, m), out.data_ptr(), m, multiplier
    if isinstance(table, QuantizedWeight):
        scale_type = dtype_name(table.scale.dtype)
        _cpu.embedding_quantized(*where, quantized_part(table), width, table.group_size, table.bits, scale_type)
    else:
        if table.dtype not in FLOATS:
            raise ValueError(f"table must be fp32, bf16 or fp16, got {describe(table)}")
        _cpu.embedding_full(
            *where, flat("table", table, (rows, width), table.dtype), rows, width, dtype_name(table.dtype)
        )
    keep(ids, table, out)
    return out


def _map_rows(kernel: Callable[[int, int, int, int, int], None], x: Tensor, out: Tensor) -> Tensor:
    stride = row_stride("x", x, 2)
    kernel(x.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], stride)
    keep(x, out)
    return out


def softmax(x: Tensor) -> Tensor:
    return _map_rows(_cpu.softmax, x, torch.empty(x.shape))


def log_softmax(x: Tensor) -> Tensor:
    return _map_rows(_cpu.log_softmax, x, torch.empty(x.shape))


def argmax(x: Tensor) -> Tensor:
    return _map_rows(_cpu.argmax, x, torch.empty(x.shape[0], dtype=torch.int32))


def mask_logits(x: Tensor, mask: Tensor) -> Tensor:
    mask_at = flat("mask, a bit for each logit,", mask, (x.shape[0], -(-x.shape[1] // 32)), torch.int32)

    def kernel(x_at: int, out_at: int, rows: int, columns: int, stride: int) -> None:
        _cpu.mask_logits(x_at, mask_at, out_at, rows, columns, stride)
        keep(mask)

    return _map_rows(kernel, x, torch.empty(x.shape))


# ---------------------------------------------------------------------------------------------- without kernels


attention_mask = through_reference(reference.attention_mask)
alibi_mask = through_reference(reference.alibi_mask)
