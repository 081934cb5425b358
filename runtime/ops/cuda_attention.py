"""CUDA attention, rotary embedding and the KV cache: check what came, allocate the result, call the launcher."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nibblelm.ops.cuda_device import CACHE_DTYPES, DTYPES, kernels, launch_args, mma_sync
from nibblelm.ops.cuda_ops import address, require_arguments, rows, vector
from nibblelm.ops.types import PAGE, Int8Pages, Pages

# ---- rope and the cache --------------------------------------------------------------------------------------------


def _rope_table(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Any:
    streams = positions.ndim
    fits = cos.shape == sin.shape and 2 * cos.shape[1] * streams <= x.shape[2]
    tables = cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
    index = positions.dtype == torch.int32 and positions.is_contiguous() and positions.shape[-1] == x.shape[0]
    require_arguments(
        x.ndim == 3 and rows(x) and fits and tables and index and positions.shape[: streams - 1] in {(), (2,)},
        "rope", "x (M, H, D), positions (M,) or (2, M) int32, cos and sin (T, R / 2) fp32", x, positions, cos, sin,
    )  # fmt: skip
    entries, half = cos.shape
    return kernels.RopeTable(positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), half, streams, interleaved, entries)


def _pool(pool: Pages) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What is stored, and in int8 the scales and the pool to unpack to."""
    return (pool.codes, pool.scales, pool.unpacked) if isinstance(pool, Int8Pages) else (pool, None, None)


def _with_unpacked(pool: Pages) -> Pages:
    """A pool that prompts can read: int8 with a bf16 pool to unpack to, which is used up by the call if it is new."""
    if not isinstance(pool, Int8Pages) or pool.unpacked is not None:
        return pool
    return replace(pool, unpacked=torch.empty(pool.shape, dtype=torch.bfloat16, device=pool.codes.device))


def _paged_cache(
    op: str, m: int, k_cache: Pages, v_cache: Pages, slots: Tensor, positions: Tensor, tables: Tensor
) -> Any:
    (k, *k_int8), (v, *v_int8) = _pool(k_cache), _pool(v_cache)
    int8 = isinstance(k_cache, Int8Pages) and isinstance(v_cache, Int8Pages)
    wanted = {torch.int8} if int8 else {torch.float32, torch.bfloat16}
    scales, unpacked = zip(k_int8, v_int8, strict=True)
    require_arguments(
        k.ndim == 4 and k.shape[2] == PAGE and k.shape == v.shape and k.dtype == v.dtype and k.dtype in wanted
        and k.is_contiguous() and v.is_contiguous() and k.shape[0] > 0
        and all(t is None or (t.shape == k.shape[:3] and t.dtype == torch.float32 and t.is_contiguous())
                for t in scales)
        and all(t is None or (t.shape == k.shape and t.dtype == torch.bfloat16 and t.is_contiguous())
                for t in unpacked)
        and vector(slots, m, torch.int32) and vector(positions, m, torch.int32)
        and tables.ndim == 2 and tables.shape[1] > 0 and tables.dtype == torch.int32 and tables.stride(1) == 1,
        op, f"caches (P, Hkv, {PAGE}, D) fp32, bf16 or both Int8Pages, slots and positions (M,) int32, tables (S, W) "
        "int32", k, *k_int8, v, *v_int8, slots, positions, tables,
    )  # fmt: skip
    (pages, kv_heads, _, head_dim), (slot_count, table_width) = k.shape, tables.shape
    return kernels.PagedCache(
        k=k.data_ptr(), v=v.data_ptr(), k_scales=address(scales[0]), v_scales=address(scales[1]),
        k_unpacked=address(unpacked[0]), v_unpacked=address(unpacked[1]), tables=tables.data_ptr(),
        slots=slots.data_ptr(), positions=positions.data_ptr(), pages=pages, slot_count=slot_count,
        table_width=table_width, table_stride=tables.stride(0), kv_heads=kv_heads, head_dim=head_dim,
        dtype=CACHE_DTYPES[k.dtype],
    )  # fmt: skip


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    table = _rope_table(x, positions, cos, sin, interleaved)
    m, heads, head_dim = x.shape
    kernels.rope(x.data_ptr(), x.stride(0), m, heads, head_dim, table, DTYPES[x.dtype], *launch_args())
    return x


def kv_append(
    k: Tensor, v: Tensor, k_cache: Pages, v_cache: Pages, slots: Tensor, positions: Tensor, tables: Tensor
) -> None:
    m = k.shape[0]
    cache = _paged_cache("kv_append", m, k_cache, v_cache, slots, positions, tables)
    shape = (m, k_cache.shape[1], k_cache.shape[3])
    same = k.shape == shape and v.shape == shape and k.dtype == v.dtype
    require_arguments(same and rows(k) and rows(v), "kv_append", f"k and v {shape} of one dtype", k, v)
    kernels.kv_append(k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0), m, cache, DTYPES[k.dtype], *launch_args())


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
    table = _rope_table(qkv, places, cos, sin, interleaved)
    m, all_heads, head_dim = qkv.shape
    cache = _paged_cache("rope_append", m, k_cache, v_cache, slots, positions, tables)
    heads = all_heads - 2 * k_cache.shape[1]
    fits = heads > 0 and head_dim == k_cache.shape[3] and vector(q_norm, head_dim) and vector(k_norm, head_dim)
    require_arguments(fits, "rope_append", "qkv (M, H + 2 Hkv, D), norms (D,) fp32", qkv, q_norm, k_norm)
    norms = kernels.HeadNorms(q=address(q_norm), k=address(k_norm), eps=eps, plus_one=plus_one)
    kernels.rope_append(qkv.data_ptr(), qkv.stride(0), m, heads, table, cache, norms, DTYPES[qkv.dtype], *launch_args())
    return qkv[:, :heads]


def layer_norm_append(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    tables: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Pages,
    v_cache: Pages,
    q_norm: Tensor,
    k_norm: Tensor,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    eps: float,
    interleaved: bool = False,
    places: Tensor | None = None,
) -> Tensor:
    """`layer_norm` of each head of q and k, then `rope_append` without norms, with their bits, in one kernel.

    q_norm and k_norm (D,), or (H, D) and (Hkv, D), q_bias and k_bias (D,) or None, fp32; D a multiple of 8; else as in
    `rope_append`.
    """
    table = _rope_table(qkv, positions if places is None else places, cos, sin, interleaved)
    m, all_heads, head_dim = qkv.shape
    cache = _paged_cache("layer_norm_append", m, k_cache, v_cache, slots, positions, tables)
    heads, per_head = all_heads - 2 * k_cache.shape[1], q_norm.ndim == 2
    q_gains, k_gains = ((count, head_dim) if per_head else (head_dim,) for count in (heads, k_cache.shape[1]))
    fits = heads > 0 and head_dim == k_cache.shape[3] and vector(q_bias, head_dim) and vector(k_bias, head_dim)
    gains = q_norm.shape == q_gains and k_norm.shape == k_gains and q_norm.dtype == k_norm.dtype == torch.float32
    require_arguments(
        fits and gains and q_norm.is_contiguous() and k_norm.is_contiguous() and head_dim % 8 == 0,
        "layer_norm_append", "qkv (M, H + 2 Hkv, D), D a multiple of 8, gains (D,) or (H, D) and (Hkv, D), biases (D,) "
        "fp32", qkv, q_norm, k_norm, q_bias, k_bias,
    )  # fmt: skip
    norms = kernels.HeadNorms(
        q=q_norm.data_ptr(), k=k_norm.data_ptr(), q_bias=address(q_bias), k_bias=address(k_bias), eps=eps,
        centred=True, per_head=per_head,
    )  # fmt: skip
    kernels.rope_append(qkv.data_ptr(), qkv.stride(0), m, heads, table, cache, norms, DTYPES[qkv.dtype], *launch_args())
    return qkv[:, :heads]


# ---- attention -----------------------------------------------------------------------------------------------------


AttentionOptions = tuple[float, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
_PLAIN: AttentionOptions = (0.0, None, None, None, None)


def _attention_args(
    q: Tensor,
    k_cache: Pages,
    v_cache: Pages,
    slots: Tensor,
    positions: Tensor,
    tables: Tensor,
    scale: float,
    window: int,
    options: AttentionOptions,
    tiles: Tensor | None,
    out: Tensor | None = None,
) -> tuple[Any, Tensor, object]:
    """The launchers' argument, the result (in `out` if given), and what is to be kept until the launch."""
    softcap, alibi_slopes, prefix_lengths, starts, mask = options
    m, heads, head_dim = q.shape
    if tiles is not None:
        k_cache, v_cache = (_with_unpacked(pool) for pool in (k_cache, v_cache))
    cache = _paged_cache("attention", m, k_cache, v_cache, slots, positions, tables)
    require_arguments(
        rows(q) and k_cache.shape[3] == head_dim and heads % k_cache.shape[1] == 0
        and head_dim % 8 == 0 and head_dim <= 256 and scale > 0,
        "attention", f"q (M, H, D), D a multiple of 8 up to 256, H a multiple of Hkv; scale {scale} > 0; cache "
        f"{tuple(k_cache.shape)}", q,
    )  # fmt: skip
    fits = mask is None or (mask.ndim == 2 and mask.shape[0] == m and mask.stride(1) == 1)
    require_arguments(
        fits and (mask is None or mask.dtype == torch.float32) and vector(alibi_slopes, heads)
        and vector(prefix_lengths, m, torch.int32) and vector(starts, tables.shape[0], torch.int32),
        "attention", "alibi_slopes (H,) and mask (M, columns) fp32, prefix_lengths (M,) and starts (S,) int32",
        alibi_slopes, prefix_lengths, starts, mask,
    )  # fmt: skip
    table = tiles is None or (tiles.ndim == 2 and tiles.shape[1] == 2 and tiles.is_contiguous())
    require_arguments(table and (tiles is None or tiles.dtype == torch.int32), "attention", "tiles (T, 2) int32", tiles)
    out = torch.empty(m, heads * head_dim, dtype=q.dtype, device=q.device) if out is None else out
    args = kernels.AttentionArgs(
        q=q.data_ptr(), out=out.data_ptr(), cache=cache, slopes=address(alibi_slopes),
        prefix=address(prefix_lengths), starts=address(starts), mask=address(mask), tiles=address(tiles),
        q_stride=q.stride(0), mask_stride=0 if mask is None else mask.stride(0), rows=m,
        tile_count=0 if tiles is None else len(tiles), mask_columns=0 if mask is None else mask.shape[1],
        heads=heads, window=window, scale=scale, softcap=softcap, mma_sync=mma_sync(), dtype=DTYPES[q.dtype],
    )  # fmt: skip
    bytes_needed = 0 if tiles is not None else kernels.attention_workspace(args)
    workspace = torch.empty(bytes_needed, dtype=torch.uint8, device=q.device)
    args.workspace = workspace.data_ptr()
    return args, out, (workspace, k_cache, v_cache)


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
    options = (softcap, alibi_slopes, prefix_lengths, starts, mask)
    if not generated:
        args, out, _kept = _attention_args(q, k_cache, v_cache, slots, positions, tables, scale, window, options, tiles)
        (kernels.attention_decode if tiles is None else kernels.attention_prefill)(args, *launch_args())
        return out
    require_arguments(
        tiles is not None and 0 < generated < len(q) and prefix_lengths is None and mask is None,
        "attention", f"generated {generated} > 0: fewer than the rows, tiles, no prefix_lengths, no mask", q, tiles,
    )  # fmt: skip
    first, out = len(q) - generated, torch.empty(len(q), q.shape[1] * q.shape[2], dtype=q.dtype, device=q.device)
    for part, own in ((slice(first), tiles), (slice(first, None), None)):
        where = slots[part], positions[part], tables
        args, _, _kept = _attention_args(q[part], k_cache, v_cache, *where, scale, window, options, own, out[part])
        (kernels.attention_decode if own is None else kernels.attention_prefill)(args, *launch_args())
    return out


def has_room_to_rotate(head_dim: int, device: torch.device) -> bool:
    """Whether `rope_attention` fits on a card: heads of 256 take 103 KB of a multiprocessor's shared memory, which is
    more than sm_86, 89 and 120 have."""
    if head_dim < 256 or device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor >= 128 << 10


def rope_attention(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    tables: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Pages,
    v_cache: Pages,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    plus_one: bool = False,
    interleaved: bool = False,
) -> Tensor:
    """`rope_append`, then `attention`: (M, H + 2 Hkv, D) -> (M, H * D), with their bits, in one kernel.

    Arguments as in the two; bf16 (the cache also int8), D 64, 128, 256 or, without norms, 80, 96 or 112, whole heads
    rotated in halves, cos and sin with a row for every position of a table, a soft-cap only with D 128 or 256, room on
    the card (else ValueError). Rows have different slots. qkv is undefined afterwards.
    """
    q = qkv[:, : qkv.shape[1] - 2 * k_cache.shape[1]]
    table = _rope_table(qkv, positions, cos, sin, interleaved)
    capped: AttentionOptions = (softcap, None, None, None, None)
    args, out, _kept = _attention_args(q, k_cache, v_cache, slots, positions, tables, scale, window, capped, None)
    normed = q_norm is not None or k_norm is not None
    require_arguments(
        cos.shape[0] >= tables.shape[1] * PAGE and kernels.attention_fuses(args, table, normed)
        and has_room_to_rotate(q.shape[2], q.device) and vector(q_norm, q.shape[2]) and vector(k_norm, q.shape[2]),
        "rope_attention", "bf16 of D 64, 128, 256 or, without norms, 80, 96 or 112, rotated whole in halves, cos of "
        "W * PAGE rows or more, norms (D,), a soft-cap with D 128 or 256", qkv, cos, q_norm, k_norm,
    )  # fmt: skip
    norms = (address(q_norm), address(k_norm), eps, plus_one)
    kernels.attention_rope(args, table, *norms, *launch_args())
    return out
