"""Benchmarks of the CUDA ops other than linear, for bench_ops.py: one function per op, each yielding `Row`s."""

# Triton exists only on GPU machines:
# pyright: reportMissingImports=false, reportIndexIssue=false

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from bench_ops import DEVICE, Limits, Row, copies, time_us
from torch import Tensor
from torch.nn import functional

from nibblelm import ops
from nibblelm.ops import SamplingState, cuda_attention, cuda_ops

BF16 = torch.bfloat16


def moving(
    op: str, shape: str, dtype: str, nbytes: int, time: float, peak: float, baseline: str, baseline_time: float
) -> Row:
    """A row for an op that moves memory: percent of the peak it can reach, copy or read."""
    gb_s = nbytes / time / 1e3
    return Row(op, shape, dtype, time, gb_s, None, 100 * gb_s / peak, baseline, baseline_time)


@triton.jit
def triton_softmax_kernel(x, y, columns, block: tl.constexpr):  # pyright: ignore
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, block)
    values = tl.load(x + row * columns + offsets, mask=offsets < columns, other=-float("inf"))
    values = tl.exp(values - tl.max(values, 0))
    tl.store(y + row * columns + offsets, values / tl.sum(values, 0), mask=offsets < columns)


def triton_softmax(warps: int, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    triton_softmax_kernel[(x.shape[0],)](x, y, x.shape[1], block=triton.next_power_of_2(x.shape[1]), num_warps=warps)
    return y


def bench_softmax(limits: Limits, quick: bool) -> Iterator[Row]:
    sizes = [128, *(2**n for n in range(10, 18)), 128256] if quick else [2**n for n in range(7, 18)] + [128256]
    for columns in sorted(sizes):
        rows = 2**27 // columns
        buffers = [torch.randn(rows, columns, device=DEVICE) for _ in range(2)]
        nbytes = 2 * buffers[0].nbytes
        time = time_us(ops.softmax, buffers, 10)
        best = [("torch.softmax", time_us(partial(torch.softmax, dim=-1), buffers, 5))]
        if columns <= 65536:
            warps = 4 if columns <= 2048 else 8 if columns <= 8192 else 32
            best.append((f"Triton, {warps} warps", time_us(partial(triton_softmax, warps), buffers, 5)))
        baseline = min(best, key=lambda pair: pair[1])
        yield moving("softmax", f"{rows}x{columns}", "fp32", nbytes, time, limits.copy_gb_s, *baseline)
    if not quick:
        for form in ("block", "cluster", "online"):
            x = [torch.randn(2**27 // 16384, 16384, device=DEVICE) for _ in range(2)]
            time = time_us(partial(cuda_ops.softmax, form=form), x, 10)
            yield moving("softmax", f"8192x16384 {form}", "fp32", 2 * x[0].nbytes, time, limits.copy_gb_s, "", 0)


def bench_norms(limits: Limits, quick: bool) -> Iterator[Row]:
    for dtype, label in ((torch.float32, "fp32"), (BF16, "bf16")):
        for rows, columns in ((1, 4096), (2**26 // 4096, 4096)) if quick else (
            (1, 4096), (2**26 // 1024, 1024), (2**26 // 4096, 4096), (2**26 // 8192, 8192)
        ):  # fmt: skip
            count = 8 if rows == 1 else 3
            buffers = [torch.randn(rows, columns, device=DEVICE).to(dtype) for _ in range(count)]
            weight, bias = torch.randn(columns, device=DEVICE), torch.randn(columns, device=DEVICE)
            like, like_bias = weight.to(dtype), bias.to(dtype)
            nbytes, peak, shape = 2 * buffers[0].nbytes, limits.copy_gb_s, f"{rows}x{columns}"
            time = time_us(lambda x, w=weight: ops.rms_norm(x, w, 1e-5), buffers)
            base = time_us(lambda x, w=like, n=columns: functional.rms_norm(x, (n,), w, 1e-5), buffers)
            yield moving("rms_norm", shape, label, nbytes, time, peak, "F.rms_norm", base)
            time = time_us(lambda x, w=weight, b=bias: ops.layer_norm(x, w, b, 1e-5), buffers)
            base = time_us(
                lambda x, w=like, b=like_bias, n=columns: functional.layer_norm(x, (n,), w, b, 1e-5), buffers
            )
            yield moving("layer_norm", shape, label, nbytes, time, peak, "F.layer_norm", base)


def caches(length: int, batch: int, count: int, d: int = 128) -> list[tuple[Tensor, Tensor]]:
    """Pools of pages, 8 KV heads of `d` values. A baseline takes the same memory as (batch, 8, length, d)."""
    shape = (batch * length // ops.PAGE, 8, ops.PAGE, d)
    return [tuple(torch.randn(shape, device=DEVICE).to(BF16) for _ in range(2)) for _ in range(count)]  # type: ignore[misc]


def int8_caches(length: int, batch: int, count: int, d: int = 128) -> list[tuple[ops.Int8Pages, ops.Int8Pages]]:
    """The same in int8."""

    def pool() -> ops.Int8Pages:
        shape = (batch * length // ops.PAGE, 8, ops.PAGE, d)
        codes = torch.randint(-127, 128, shape, dtype=torch.int8, device=DEVICE)
        return ops.Int8Pages(codes, torch.rand(codes.shape[:3], device=DEVICE) / 50)

    return [(pool(), pool()) for _ in range(count)]


def page_tables(length: int, batch: int) -> Tensor:
    """Pages in random order, as a server has them after a while."""
    pages = torch.randperm(batch * length // ops.PAGE, generator=torch.Generator().manual_seed(0))
    return pages.view(batch, -1).int().to(DEVICE)


def bench_decode_attention(limits: Limits, quick: bool) -> Iterator[Row]:
    """32 query and 8 KV heads of 128, bf16, and with an int8 cache, whose bytes count with their scales; it is read
    once. SDPA, of bf16, has neither rotation nor KV write."""
    cases = [(256, 1), (1024, 1), (8192, 1), (32768, 1), (131072, 1), (1024, 256)]
    cases += [] if quick else [(128, 1), (4096, 32)]
    for length, batch in cases:
        q = torch.randn(batch, 32, 128, device=DEVICE).to(BF16)
        nbytes = 2 * batch * 8 * length * 128 * 2
        pairs = caches(length, batch, copies(nbytes))
        slots = torch.arange(batch, device=DEVICE).int()
        positions = torch.full((batch,), length - 1, device=DEVICE).int()
        where = (slots, positions, page_tables(length, batch))

        def ours(kv: Any, q: Tensor = q, where: tuple[Tensor, ...] = where) -> Tensor:
            return ops.attention(q, *kv, *where, 128**-0.5)

        def sdpa(kv: Any, q: Tensor = q, shape: tuple[int, ...] = (batch, 8, length, 128)) -> Tensor:
            k, v = (t.view(shape) for t in kv)
            return functional.scaled_dot_product_attention(q.unsqueeze(2), k, v, enable_gqa=True)

        qkv, cos = torch.randn(batch, 48, 128, device=DEVICE).to(BF16), torch.rand(length, 64, device=DEVICE)
        places = (qkv, positions, slots, where[2], cos, cos)

        def fused(kv: Any, places: tuple[Tensor, ...] = places) -> Tensor:
            return cuda_attention.rope_attention(*places, *kv, scale=128**-0.5)

        time, base = time_us(ours, pairs), time_us(sdpa, pairs)
        yield moving("decode", f"B={batch} L={length}", "bf16", nbytes, time, limits.read_gb_s, "SDPA", base)
        time = time_us(fused, pairs)
        yield moving("rope_attention", f"B={batch} L={length}", "bf16", nbytes, time, limits.read_gb_s, "SDPA", base)
        del pairs
        int8_bytes = 2 * batch * 8 * length * (128 + 4)
        quantized = int8_caches(length, batch, copies(int8_bytes))
        for op, call in (("decode", ours), ("rope_attention", fused)):
            shape = f"B={batch} L={length}"
            yield moving(op, shape, "int8 KV", int8_bytes, time_us(call, quantized), limits.read_gb_s, "SDPA", base)
        del quantized
        torch.cuda.empty_cache()


def bench_prefill_attention(limits: Limits, quick: bool) -> Iterator[Row]:
    """Causal, 32 query and 8 KV heads, bf16, and of an int8 cache; half the products count. Heads of 128 values, then
    of sizes that share kernels."""
    for length, d in ((2048, 128), (8192, 128), (32768, 128), (8192, 80), (8192, 96), (8192, 160), (8192, 192)):
        pairs = caches(length, 1, 4, d)
        q = torch.randn(length, 32, d, device=DEVICE).to(BF16)
        slots = torch.zeros(length, device=DEVICE).int()
        where = (slots, torch.arange(length, device=DEVICE).int(), page_tables(length, 1))
        tiles = torch.tensor(ops.prompt_tiles([length]), dtype=torch.int32, device=DEVICE)
        heads_first = q.transpose(0, 1).unsqueeze(0).contiguous()

        def ours(kv: Any, q: Tensor = q, where: tuple[Tensor, ...] = where, tiles: Tensor = tiles) -> Tensor:
            return ops.attention(q, *kv, *where, q.shape[2] ** -0.5, tiles=tiles)

        def sdpa(kv: Any, q: Tensor = heads_first, shape: tuple[int, ...] = (1, 8, length, d)) -> Tensor:
            k, v = (t.view(shape) for t in kv)
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        base = time_us(sdpa, pairs, 5)
        shape = f"L={length} causal" + (f" D={d}" if d != 128 else "")
        for label, kv in (("bf16", pairs), ("int8 KV", int8_caches(length, 1, 4, d))):
            time = time_us(ours, kv, 5)
            rate = 2 * length * length * d * 32 / time / 1e6
            percent = 100 * rate / limits.bf16_tflop_s
            yield Row("prefill", shape, label, time, None, rate, percent, "SDPA", base)


def bench_small(limits: Limits, quick: bool) -> Iterator[Row]:
    """The remaining ops of a step, at M = 1 (where the launch is what counts) and at sizes that fill the device."""
    for rows in (1, 4096):
        buffers = [torch.randn(rows, 28672, device=DEVICE).to(BF16) for _ in range(8 if rows == 1 else 3)]
        time = time_us(ops.swiglu, buffers)
        base = time_us(lambda x: functional.silu(x[:, :14336]) * x[:, 14336:], buffers)
        nbytes = buffers[0].nbytes * 3 // 2
        yield moving("swiglu", f"{rows}x2x14336", "bf16", nbytes, time, limits.copy_gb_s, "torch", base)
    for rows in (1, 16, 1024):
        buffers = [torch.randn(rows, 128256, device=DEVICE) * 3 for _ in range(16 if rows < 1024 else 2)]
        time, base = time_us(ops.argmax, buffers), time_us(partial(torch.argmax, dim=-1), buffers)
        nbytes, peak = buffers[0].nbytes, limits.read_gb_s
        yield moving("argmax", f"{rows}x128256", "fp32", nbytes, time, peak, "torch.argmax", base)
        if rows > 16:
            continue
        drawn = ("softmax+multinomial", time_us(lambda x: torch.multinomial(torch.softmax(x / 0.8, -1), 1), buffers))
        for name, fields in (
            ("greedy", {"temperature": 0.0}),
            ("T", {}),
            ("T top-p", {"top_p": 0.95}),
            ("T top-k top-p", {"top_p": 0.95, "top_k": 50}),
        ):
            state = SamplingState.greedy(rows, DEVICE)
            state.temperature.fill_(0.8)
            for field, value in fields.items():
                getattr(state, field).fill_(value)
            ids, positions = torch.zeros(2, rows, device=DEVICE).int().unbind()
            time = time_us(lambda x, s=state, i=ids, p=positions: ops.sample(x, s, out=i, positions=p), buffers)
            baseline = ("torch.argmax", base) if name == "greedy" else drawn
            yield moving("sample", f"{rows}x128256 {name}", "fp32", nbytes, time, peak, *baseline)
    qkv = [torch.randn(1, 48, 128, device=DEVICE).to(BF16) for _ in range(8)]
    cos = torch.rand(8192, 64, device=DEVICE)
    kv, slot = caches(8192, 1, 1)[0], torch.zeros(1, device=DEVICE).int()
    table = page_tables(8192, 1)
    time = time_us(lambda x: ops.rope_append(x, slot, slot, table, cos, cos, *kv), qkv)
    yield Row("rope_append", "1x48x128", "bf16", time)


def bench_rope(limits: Limits, quick: bool) -> Iterator[Row]:
    """A prefill of 2048 tokens, 32 query and 8 KV heads of 128: the queries rotated, keys and values written."""
    positions, slots = torch.arange(2048, device=DEVICE).int(), torch.zeros(2048, device=DEVICE).int()
    angles = torch.rand(2048, 64, device=DEVICE) * 6.28
    cos, sin = angles.cos(), angles.sin()
    wide_cos, wide_sin = (torch.cat((t, t), -1).to(BF16).unsqueeze(1) for t in (cos, sin))

    def rotated(x: Tensor) -> Tensor:
        low, high = x.chunk(2, -1)
        return x * wide_cos + torch.cat((-high, low), -1) * wide_sin

    nbytes = 2048 * 32 * 128 * 2
    queries = [torch.randn(2048, 32, 128, device=DEVICE).to(BF16) for _ in range(copies(nbytes))]
    time = time_us(lambda x: ops.rope(x, positions, cos, sin), queries)
    base = time_us(rotated, queries)
    yield moving("rope", "2048x32x128", "bf16", 2 * nbytes, time, limits.copy_gb_s, "torch", base)
    del queries

    nbytes, index = 2 * 2048 * 8 * 128 * 2, positions.long()
    count = copies(2 * nbytes)
    new = [torch.randn(2048, 16, 128, device=DEVICE).to(BF16).split(8, 1) for _ in range(count)]
    places = [(*kv, *cache) for kv, cache in zip(new, caches(2048, 1, count), strict=True)]

    def copied(place: tuple[Tensor, ...]) -> None:
        for source, cache in zip(place[:2], place[2:], strict=True):
            cache.view(8, 2048, 128).index_copy_(1, index, source.transpose(0, 1))

    tables = page_tables(2048, 1)
    time = time_us(lambda place: ops.kv_append(*place, slots, positions, tables), places)
    base = time_us(copied, places)
    yield moving("kv_append", "2x2048x8x128", "bf16", 2 * nbytes, time, limits.copy_gb_s, "index_copy_", base)


def bench_embedding(limits: Limits, quick: bool) -> Iterator[Row]:
    """16384 different rows of a table of 1 GB; the ids rotate."""
    table = torch.randn(128256, 4096, device=DEVICE, dtype=BF16)
    nbytes = 16384 * 4096 * 2
    ids = [torch.randperm(128256, device=DEVICE)[:16384].int() for _ in range(copies(nbytes))]
    time = time_us(lambda i: ops.embedding(i, table, BF16), ids)
    base = time_us(lambda i: functional.embedding(i, table), ids)
    yield moving("embedding", "16384 of 128256x4096", "bf16", 2 * nbytes, time, limits.copy_gb_s, "F.embedding", base)


def bench_activations(limits: Limits, quick: bool) -> Iterator[Row]:
    """gelu, silu, geglu at the width of gate and up together."""
    x = [torch.randn(4096, 28672, device=DEVICE).to(BF16) for _ in range(3)]
    nbytes, peak, shape = x[0].nbytes, limits.copy_gb_s, "4096x28672"
    tanh = partial(functional.gelu, approximate="tanh")
    time, base = time_us(ops.gelu, x), time_us(tanh, x)
    yield moving("gelu", f"{shape} tanh", "bf16", 2 * nbytes, time, peak, "F.gelu", base)
    time, base = time_us(partial(ops.gelu, form="erf"), x), time_us(functional.gelu, x)
    yield moving("gelu", f"{shape} erf", "bf16", 2 * nbytes, time, peak, "F.gelu", base)
    time, base = time_us(ops.silu, x), time_us(functional.silu, x)
    yield moving("silu", shape, "bf16", 2 * nbytes, time, peak, "F.silu", base)
    time, base = time_us(ops.geglu, x), time_us(lambda x: tanh(x[:, :14336]) * x[:, 14336:], x)
    yield moving("geglu", "4096x2x14336 tanh", "bf16", nbytes * 3 // 2, time, peak, "torch", base)


def bench_log_softmax(limits: Limits, quick: bool) -> Iterator[Row]:
    """Over the vocabulary, as a perplexity takes it."""
    x = [torch.randn(1024, 128256, device=DEVICE) for _ in range(2)]
    time, base = time_us(ops.log_softmax, x, 10), time_us(partial(torch.log_softmax, dim=-1), x, 5)
    yield moving("log_softmax", "1024x128256", "fp32", 2 * x[0].nbytes, time, limits.copy_gb_s, "torch", base)


def bench_masks(limits: Limits, quick: bool) -> Iterator[Row]:
    """32 heads of 2048 x 2048 scores, in place, with the upper half forbidden: half the scores need only be written.

    The first op need not touch the other half. Its mask, of 8 MB, stays in L2.
    """
    scores = [torch.randn(1, 32, 2048, 2048, device=DEVICE).to(BF16) for _ in range(2)]
    nbytes, shape = scores[0].nbytes, "1x32x2048x2048"
    mask = torch.ones(1, 2048, 2048, device=DEVICE).triu(1).to(BF16)
    forbidden, slopes = mask.bool().unsqueeze(1), 2.0 ** (-torch.arange(1, 33, device=DEVICE) / 4)
    bias = (slopes.view(-1, 1, 1) * torch.arange(2048, device=DEVICE)).to(BF16)

    time = time_us(lambda s: ops.attention_mask(s, mask), scores)
    base = time_us(lambda s: s.masked_fill_(forbidden, -10000.0), scores)
    moved = nbytes // 2 + mask.nbytes
    yield moving("attention_mask", shape, "bf16", moved, time, limits.copy_gb_s, "masked_fill_", base)
    time = time_us(lambda s: ops.alibi_mask(s, slopes), scores)
    base = time_us(lambda s: s.add_(bias).masked_fill_(forbidden, -10000.0), scores)
    yield moving("alibi_mask", shape, "bf16", nbytes * 3 // 2, time, limits.copy_gb_s, "add_, masked_fill_", base)


BENCHMARKS: dict[str, Callable[[Limits, bool], Iterator[Row]]] = {
    "softmax": bench_softmax,
    "norms": bench_norms,
    "decode": bench_decode_attention,
    "prefill": bench_prefill_attention,
    "small": bench_small,
    "rope": bench_rope,
    "embedding": bench_embedding,
    "activations": bench_activations,
    "log_softmax": bench_log_softmax,
    "masks": bench_masks,
}
