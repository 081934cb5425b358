"""CUDA norms, rotary embedding and KV writes against float64, over odd sizes and strides."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.ops import Int8Pages, Pages, cuda, reference

sys.path.insert(0, str(Path(__file__).parent))
from kv_pages import PAGE, positions_of, quantized, same_bits, table_of

USABLE, REASON = cuda.available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")]
DEVICE = torch.device("cuda")
BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.int8
DTYPES = [BF16, FP32]
ROUNDING = {BF16: 2.0**-8, FP32: 2.0**-20}  # of a result in bf16; of a few operations and a sum in fp32
BF16_TO_INT8 = 2.0**-8 + 1 / 127  # then a code more or less


def close(got: Tensor, want: Tensor, scale: float = 1.0) -> None:
    """Within the dtype's rounding of each value, plus as much of `scale` for cancellation."""
    error = (got.double() - want.double()).abs()
    assert got.isfinite().all()
    assert (error <= ROUNDING[got.dtype] * (want.double().abs() + scale * 1e-2)).all(), error.max()


def normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def filled(pages: int, heads: int, d: int, dtype: torch.dtype, value: float = 0.0) -> Pages:
    """A pool of `value`, in int8 of codes and scales of it."""
    values = torch.full((pages, heads, PAGE, d), value, dtype=dtype, device=DEVICE)
    return Int8Pages(values, values[..., 0].float()) if dtype == INT8 else values


def norm_oracle(kind: str, h: Tensor, weight: Tensor, bias: Tensor | None, eps: float, plus_one: bool) -> Tensor:
    h = h.double()
    h = h - h.mean(-1, keepdim=True) if kind == "layer" else h
    y = h / torch.sqrt((h * h).mean(-1, keepdim=True) + eps) * (weight.double() + (1 if plus_one else 0))
    return y if bias is None else y + bias.double()


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("columns", [1, 3, 17, 63, 64, 172, 331, 1331, 2048, 4099, 4096, 33024])
def test_norms(kind: str, columns: int, dtype: torch.dtype) -> None:
    for m in (1, 3, 17):
        wide = normal(m, columns + 24, dtype=dtype) * 3 + 1
        x, residual = wide[:, :columns], normal(m, columns, dtype=dtype, seed=1)
        weight, bias = normal(columns, seed=2), normal(columns, seed=3)
        for plus_one, with_bias, added in ((False, False, None), (True, True, residual)):
            h = x if added is None else x + added
            if kind == "rms":
                y, got_h = ops.rms_norm(x, weight, 1e-5, added, plus_one)
                want = norm_oracle(kind, h, weight, None, 1e-5, plus_one)
            else:
                y, got_h = ops.layer_norm(x, weight, bias if with_bias else None, 1e-5, added)
                want = norm_oracle(kind, h, weight, bias if with_bias else None, 1e-5, False)
            assert torch.equal(got_h, h)
            if kind == "rms" or columns > 1:  # the LayerNorm of one column is its bias, up to cancellation
                close(y, want, scale=100)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [24, 64, 80, 128])
@pytest.mark.parametrize("per_head", [False, True])
def test_layer_norm_of_heads(per_head: bool, head_dim: int, dtype: torch.dtype) -> None:
    """With one gain, or one of each head, on strided rows, as q and k lie in a fused projection."""
    for m in (1, 17):
        x = normal(m, 7 * head_dim, dtype=dtype)[:, head_dim : 4 * head_dim].unflatten(1, (3, head_dim))
        gain, bias = normal(*([3] if per_head else []), head_dim, seed=1), normal(head_dim, seed=2)
        for offset in (None, bias):
            got, same = ops.layer_norm(x, gain, offset, 1e-5)
            assert same is x
            close(got, norm_oracle("layer", x, gain, offset, 1e-5, False), scale=100)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_long_rows_and_batch(dtype: torch.dtype) -> None:
    x, weight = normal(40, 20000, dtype=dtype), normal(20000)
    whole = ops.rms_norm(x, weight, 1e-6)[0]
    close(whole, norm_oracle("rms", x, weight, None, 1e-6, False))
    assert torch.equal(whole[7:8], ops.rms_norm(x[7:8], weight, 1e-6)[0])
    x = x * 1e4  # squares far beyond bf16 and fp16
    close(ops.rms_norm(x, weight, 1e-6)[0], norm_oracle("rms", x, weight, None, 1e-6, False))
    x = normal(3, 4096, dtype=FP32) + 1000  # LayerNorm of a large mean: two passes keep the digits
    got = ops.layer_norm(x, weight[:4096], None, 1e-6)[0]
    error = (got.double() - norm_oracle("layer", x, weight[:4096], None, 1e-6, False)).norm() / got.norm()
    assert error < 1e-4
    for kind, op in (("rms", ops.rms_norm), ("layer", lambda *a: ops.layer_norm(a[0], a[1], None, *a[2:]))):
        x, residual, weight = normal(2, 50001, dtype=dtype), normal(2, 50001, dtype=dtype), normal(50001)
        y, h = op(x, weight, 1e-6, residual)
        assert torch.equal(h, x + residual)
        close(y, norm_oracle(kind, h, weight, None, 1e-6, False), scale=100)


@pytest.mark.parametrize("dtype", DTYPES)
def test_qk_norm(dtype: torch.dtype) -> None:
    qkv = normal(5, 12, 64, dtype=dtype)
    q, weight = qkv[:, 2:9], normal(64)
    y, h = ops.rms_norm(q, weight, 1e-6)
    assert y.shape == q.shape
    assert h is q
    close(y, norm_oracle("rms", q, weight, None, 1e-6, False))


def tables(positions: int, half: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(positions).double().unsqueeze(1) * 10000.0 ** (-torch.arange(half).double() / half)
    return angles.cos().float().to(DEVICE), angles.sin().float().to(DEVICE)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("d", "rotated", "streams"), [(8, 8, 1), (64, 64, 1), (128, 32, 1), (80, 20, 1), (128, 64, 2)])
def test_rope(d: int, rotated: int, streams: int, interleaved: bool, dtype: torch.dtype) -> None:
    for m, heads in ((1, 1), (5, 3), (33, 32)):
        x = normal(m, heads * d + 8, dtype=dtype)[:, : heads * d].unflatten(1, (heads, d))
        positions = torch.randint(0, 500, (2, m)).int()
        positions = positions if streams == 2 else positions[0]
        cos, sin = tables(500, rotated // 2)
        want = reference.rope(x.cpu().float(), positions, cos.cpu(), sin.cpu(), interleaved)
        got = ops.rope(x, positions.to(DEVICE), cos, sin, interleaved)
        assert got is x
        close(got.cpu(), want, scale=100)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", [*DTYPES, INT8])
@pytest.mark.parametrize(("normed", "streams"), [(False, 1), (True, 1), (False, 2)])
def test_rope_append(normed: bool, streams: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """The fused kernel writes the bits that rms_norm, rope and kv_append write one after the other."""
    for m, heads, kv_heads, d in ((1, 4, 4, 8), (7, 6, 2, 80), (3, 32, 8, 128), (2, 2, 1, 256)):
        qkv = normal(m, heads + 2 * kv_heads, d, dtype=dtype)
        slots = torch.arange(m, device=DEVICE).int()
        positions = torch.randint(0, 150, (2, m)).int().to(DEVICE)
        positions = positions if streams == 2 else positions[0].contiguous()
        cos, sin = tables(150, d // 2 // streams)
        norm = normal(d, seed=4) if normed else None
        page_tables = table_of(m, 150, DEVICE)
        caches = [filled(3 * m + 1, kv_heads, d, cache_dtype) for _ in range(4)]
        q, k, v = qkv.clone().split((heads, kv_heads, kv_heads), 1)
        if norm is not None:
            q, k = ops.rms_norm(q, norm, 1e-6, None, True)[0], ops.rms_norm(k, norm, 1e-6, None, True)[0]
        want = ops.rope(q, positions, cos, sin)
        ops.rope(k, positions, cos, sin)
        main = positions if streams == 1 else positions[0]
        ops.kv_append(k, v, caches[0], caches[1], slots, main, page_tables)
        places = None if streams == 1 else positions
        got = ops.rope_append(
            qkv, main, slots, page_tables, cos, sin, *caches[2:], norm, norm, 1e-6, True, places=places
        )
        for both in ((got, want), (caches[2], caches[0]), (caches[3], caches[1])):
            if normed:  # the squares are added in another order: now and then a norm rounds the other way
                new, old = (positions_of(t, page_tables) if isinstance(t, Int8Pages) else t for t in both)
                rounding = 4 * ROUNDING.get(new.dtype, BF16_TO_INT8)
                assert (new - old).abs().max() <= rounding * old.abs().max()
            else:
                assert same_bits(*both)
        written = positions_of(caches[1], page_tables)[slots.long(), :, main.long()]
        if cache_dtype == INT8:
            codes, scales = quantized(v)
            assert torch.equal(written, codes.double() * scales.double().unsqueeze(-1))
        else:
            assert torch.equal(written, v.to(cache_dtype))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", [BF16, INT8])
@pytest.mark.parametrize("per_head", [False, True])
def test_layer_norm_append(per_head: bool, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """The bits of layer_norm, rope and kv_append one after the other."""
    for m, heads, kv_heads, d, part, interleaved in (
        (1, 4, 4, 8, 1, False), (7, 6, 2, 80, 4, False), (3, 32, 8, 160, 4, False), (5, 8, 8, 128, 1, True),
        (2, 2, 1, 256, 2, False),
    ):  # fmt: skip
        qkv = normal(m, heads + 2 * kv_heads, d, dtype=dtype) + 0.5
        slots, positions = torch.arange(m, device=DEVICE).int(), torch.randint(0, 150, (m,)).int().to(DEVICE)
        cos, sin = tables(150, d // 2 // part)
        gains = [normal(*((count, d) if per_head else (d,)), seed=count) for count in (heads, kv_heads)]
        biases = [None, None] if per_head else [normal(d, seed=8), normal(d, seed=9)]
        page_tables = table_of(m, 150, DEVICE)
        caches = [filled(3 * m + 1, kv_heads, d, cache_dtype) for _ in range(4)]
        q, k, v = qkv.clone().split((heads, kv_heads, kv_heads), 1)
        want, k = (ops.layer_norm(x, gain, bias, 1e-5)[0] for x, gain, bias in zip((q, k), gains, biases, strict=True))
        for x in (want, k):
            ops.rope(x, positions, cos, sin, interleaved)
        ops.kv_append(k, v, caches[0], caches[1], slots, positions, page_tables)
        got = ops.backend(DEVICE).layer_norm_append(
            qkv, positions, slots, page_tables, cos, sin, *caches[2:], *gains, *biases, 1e-5, interleaved
        )
        assert got.isfinite().all()
        for both in ((got, want), (caches[2], caches[0]), (caches[3], caches[1])):
            assert same_bits(*both)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_append_in_int8(dtype: torch.dtype) -> None:
    """Codes and scales of the definition to the bit: ties, zeros, tiny and huge rows, and some that are not finite."""
    for d in (8, 40, 128, 256):
        rows = normal(4, 6, d, dtype=FP32) * torch.tensor([1.0, 1e-3, 1e4, 1.0], device=DEVICE).view(4, 1, 1)
        rows[0, 2], rows[0, 4] = 0.0, torch.arange(d, device=DEVICE) % 120 + 0.5
        rows[0, 4, -1] = 127.0
        rows[1, 2], rows[1, 3] = rows[1, 2] * 1e-38, 3e38
        rows[3, 2, 1], rows[3, 5, 0] = torch.nan, -torch.inf
        rows = rows.to(dtype)
        tables = table_of(4, 100, DEVICE)
        slots, positions = torch.arange(4, device=DEVICE).int(), torch.tensor([63, 0, 64, 99], device=DEVICE).int()
        caches = [filled(9, 2, d, INT8) for _ in range(2)]
        ops.kv_append(rows[:, 2:4], rows[:, 4:], *caches, slots, positions, tables)
        for new, pool in zip((rows[:, 2:4], rows[:, 4:]), caches, strict=True):
            assert isinstance(pool, Int8Pages)
            codes, scales = quantized(new)
            for got, want in ((pool.codes, codes), (pool.scales.unsqueeze(-1), scales.unsqueeze(-1))):
                written = positions_of(got, tables)[slots.long(), :, positions.long()]
                assert torch.equal(written.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [BF16, INT8])
def test_kv_append_leaves_the_rest_alone(dtype: torch.dtype) -> None:
    k, v = normal(4, 2, 16), normal(4, 2, 16, seed=1)
    caches = [filled(4, 2, 16, dtype, 7.0) for _ in range(2)]
    slots = torch.tensor([1, -1, 0, 0], dtype=torch.int32, device=DEVICE)
    positions = torch.tensor([72, 3, 128, 65], dtype=torch.int32, device=DEVICE)  # idle, beyond, without a page
    page_tables = torch.tensor([[0, -1], [1, 3]], dtype=torch.int32, device=DEVICE)
    ops.kv_append(k, v, caches[0], caches[1], slots, positions, page_tables)
    for cache, new in zip(caches, (k, v), strict=True):
        values, wanted = (cache.codes, None) if isinstance(cache, Int8Pages) else (cache, new[0].to(BF16))
        if isinstance(cache, Int8Pages):
            wanted, scales = quantized(new[0])
            assert torch.equal(cache.scales[3, :, 8], scales)
            cache.scales[3, :, 8] = 7.0
            assert cache.scales.eq(7).all()
        assert wanted is not None
        assert torch.equal(values[3, :, 8], wanted)
        values[3, :, 8] = 7
        assert values.eq(7).all()
