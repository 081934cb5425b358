"""CPU attention and the ops around it against float64: masks, GQA, odd widths, both cache types, and rows alone."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nibblelm import _cpu, ops
from nibblelm.ops import Int8Pages, reference

sys.path.insert(0, str(Path(__file__).parent))
from kv_pages import PAGE, paged, paged_int8, positions_of, quantized, table_of

FP32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8


def cache(slots: int, heads: int, capacity: int, width: int, filled: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values with NaN at every position that nobody may read; what will be int8 comes in fp32."""
    pair = []
    for seed in (1, 2):
        full = torch.full((slots, heads, capacity, width), torch.nan)
        generator = torch.Generator().manual_seed(seed)
        full[:, :, :filled] = torch.randn(slots, heads, filled, width, generator=generator)
        pair.append(full if dtype == INT8 else full.to(dtype))
    return pair[0], pair[1]


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def oracle(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor, scale: float, window: int, softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Float64 attention, and the same with |v|: what errors are held against."""
    shared, out, magnitude = q.shape[1] // k.shape[1], [], []
    for row, slot, position in zip(q.double(), slots.tolist(), positions.tolist(), strict=True):
        first = max(0, position + 1 - window) if window else 0
        seen_k, seen_v = (t[slot, :, first : position + 1].double().repeat_interleave(shared, 0) for t in (k, v))
        scores = torch.einsum("hd,hpd->hp", row, seen_k) * scale
        weights = torch.softmax(softcap * torch.tanh(scores / softcap) if softcap else scores, -1)
        out.append(torch.einsum("hp,hpd->hd", weights, seen_v).flatten())
        magnitude.append(torch.einsum("hp,hpd->hd", weights, seen_v.abs()).flatten())
    return torch.stack(out), torch.stack(magnitude)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    positions: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    seed: int | None = 0,
    int8: bool = False,
) -> Tensor:
    """The op on the pages of caches in positions."""
    tables = table_of(k.shape[0], k.shape[2], seed=seed)
    pools = (paged_int8(t, tables) if int8 else paged(t, tables) for t in (k, v))
    return ops.attention(q, *pools, slots, positions, tables, scale, window, softcap=softcap)


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    positions: Tensor,
    window: int = 0,
    softcap: float = 0.0,
    int8: bool = False,
) -> Tensor:
    scale = q.shape[2] ** -0.5
    got = attention(q, k, v, slots, positions, scale, window, softcap, int8=int8)
    if int8:  # what the codes and scales stand for
        k, v = (codes.double() * scales.double().unsqueeze(-1) for codes, scales in map(quantized, (k, v)))
    want, magnitude = oracle(q, k, v, slots, positions, scale, window, softcap)
    # Scores of up to about 10 are rounded to 2^-24 of themselves a few times; that becomes relative in the weights.
    assert ((got - want).abs() <= 4e-6 * magnitude).all(), ((got - want).abs() / magnitude).max()
    return got


@pytest.mark.parametrize("dtype", [FP32, BF16, INT8])
@pytest.mark.parametrize("width", [8, 16, 64, 80, 128])
def test_decode(isa: str, width: int, dtype: torch.dtype) -> None:
    """One token per slot at positions on both sides of a block of keys, with grouped heads."""
    positions = [0, 1, 62, 63, 64, 65, 127, 300]
    k, v = cache(2, 4, 320, width, 301, dtype)
    q = torch.randn(len(positions), 8, width)
    slots = int32([i % 2 for i in range(len(positions))])
    for window in (0, 1, 40, 64):
        check(q, k, v, slots, int32(positions), window, int8=dtype == INT8)


@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (6, 1)])
@pytest.mark.parametrize("window", [0, 50])
def test_prefill(isa: str, heads: tuple[int, int], window: int) -> None:
    k, v = cache(1, heads[1], 200, 64, 150, FP32)
    q = torch.randn(110, heads[0], 64)
    check(q, k, v, torch.zeros(110, dtype=torch.int32), torch.arange(40, 150, dtype=torch.int32), window)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_softcap(isa: str, softcap: float) -> None:
    """Prompts, and one token of several slots, some of them beyond a split."""
    k, v = cache(2, 2, 1100, 24, 1050, FP32)
    positions = torch.arange(40, 70, dtype=torch.int32)
    check(torch.randn(30, 4, 24) * 3, k, v, torch.zeros(30, dtype=torch.int32), positions, 20, softcap)
    check(torch.randn(3, 4, 24) * 3, k, v, int32([0, 1, 0]), int32([0, 700, 1049]), 0, softcap)


def options_of(name: str, rows: int, heads: int, columns: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    mask = torch.randn(rows, columns, generator=generator)
    mask[torch.rand(rows, columns, generator=generator) < 0.3] = -torch.inf
    mask[0] = -torch.inf
    mask[1, :128] = -torch.inf  # whole pages of it
    return {
        "alibi": dict(alibi_slopes=2.0 ** -torch.linspace(1, 8, heads)),
        "prefix": dict(prefix_lengths=torch.randint(0, columns, (rows,), generator=generator).int()),
        "starts": dict(starts=int32([70, 3])),
        "mask": dict(mask=mask),
        "all": dict(
            alibi_slopes=-torch.rand(heads, generator=generator), softcap=3.0, starts=int32([5, 130]), window=100,
            prefix_lengths=torch.full((rows,), 200, dtype=torch.int32), mask=mask,
        ),
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", ["alibi", "prefix", "starts", "mask", "all"])
def test_options(isa: str, name: str) -> None:
    """Against the same in float64, position by position; and a row alone has its bits, beyond a split too."""
    k, v = cache(2, 2, 1100, 24, 1100, FP32)
    positions = torch.cat((torch.arange(60, 80), torch.arange(1030, 1050))).int()
    slots, q = int32([0] * 20 + [1] * 20), torch.randn(40, 4, 24)
    options = options_of(name, 40, 4, 1060)
    tables = table_of(2, 1100)
    places = (paged(k, tables), paged(v, tables))

    def run(rows: slice) -> Tensor:
        own = {key: value[rows] if key in ("prefix_lengths", "mask") else value for key, value in options.items()}
        return ops.attention(q[rows], *places, slots[rows], positions[rows], tables, 0.2, **own)

    got = run(slice(None))
    for row in range(40):
        assert torch.equal(run(slice(row, row + 1))[0], got[row]), row
        slot, at = int(slots[row]), int(positions[row])
        p = torch.arange(1100)
        seen = (p <= at) | (p < (int(options["prefix_lengths"][row]) if "prefix_lengths" in options else 0))
        seen &= p > at - options.get("window", 1 << 30)
        seen &= p >= (int(options["starts"][slot]) if "starts" in options else 0)
        scores = torch.einsum("hd,hpd->hp", q[row].double(), k[slot].double().repeat_interleave(2, 0)) * 0.2
        if "softcap" in options:
            scores = 3.0 * torch.tanh(scores / 3.0)
        if "alibi_slopes" in options:
            scores = scores + options["alibi_slopes"].double()[:, None] * (p - at)
        if "mask" in options:
            mask = torch.nn.functional.pad(options["mask"][row].double(), (0, 40), value=-torch.inf)
            scores, seen = scores + mask, seen & mask.isfinite()
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).nan_to_num(0.0)
        values = v[slot].double().repeat_interleave(2, 0)
        want, magnitude = (torch.einsum("hp,hpd->hd", weights, t).flatten() for t in (values, values.abs()))
        # Scores of up to 500 (a slope of 1 over that many positions) are rounded to 2^-24 of themselves.
        assert ((got[row] - want).abs() <= 6e-5 * magnitude).all(), row
    if name in ("mask", "all"):
        assert got[0].eq(0).all()  # nothing to see


def test_more_heads_share_keys_than_are_taken_at_once() -> None:
    k, v = cache(1, 1, 70, 16, 70, FP32)
    check(torch.randn(3, 71, 16), k, v, int32([0, 0, 0]), int32([3, 68, 69]))


@pytest.mark.parametrize("dtype", [FP32, BF16, INT8])
def test_long_context_is_split_over_positions(isa: str, dtype: torch.dtype) -> None:
    k, v = cache(2, 2, 3100, 64, 3001, dtype)
    q = torch.randn(4, 4, 64)
    slots, positions = int32([0, 1, 1, 0]), int32([3000, 511, 512, 1])
    for window in (0, 600):
        check(q, k, v, slots, positions, window, int8=dtype == INT8)


def test_large_scores_stay_finite(isa: str) -> None:
    k, v = cache(1, 1, 100, 64, 100, FP32)
    got = attention(torch.randn(2, 1, 64) * 1e4, k * 1e4, v, int32([0, 0]), int32([99, 50]), 1.0)
    assert got.isfinite().all()


@pytest.mark.parametrize("dtype", [FP32, BF16, INT8])
@pytest.mark.parametrize("window", [0, 100])
def test_a_row_does_not_depend_on_its_batch_or_on_the_threads(isa: str, dtype: torch.dtype, window: int) -> None:
    """Prefill of 1,200 positions in one call equals decode bit for bit, also where decode splits the positions."""
    count = 1200
    k, v = cache(1, 2, count, 16, count, dtype)
    q, slots = torch.randn(count, 4, 16), torch.zeros(count, dtype=torch.int32)
    positions = torch.arange(count, dtype=torch.int32)
    int8 = dtype == INT8
    together = attention(q, k, v, slots, positions, 0.25, window, int8=int8)
    for row in (0, 1, 63, 64, 511, 512, 1000, 1199):
        alone = attention(q[row : row + 1], k, v, slots[:1], positions[row : row + 1], 0.25, window, int8=int8)
        assert torch.equal(alone[0], together[row]), row
    _cpu.set_threads(1)
    assert torch.equal(attention(q, k, v, slots, positions, 0.25, window, int8=int8), together)
    _cpu.set_threads(0)


def test_instruction_sets_agree_bit_for_bit(each_isa: Callable[[Callable[[], Tensor]], list[Tensor]]) -> None:
    k, v = cache(1, 2, 700, 80, 700, BF16)
    q, positions = torch.randn(20, 4, 80), torch.arange(680, 700, dtype=torch.int32)
    slots = torch.zeros(20, dtype=torch.int32)
    for int8 in (False, True):
        results = each_isa(lambda int8=int8: attention(q, k, v, slots, positions, 0.1, int8=int8))
        assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_kv_append_rounds_to_nearest_even(isa: str, dtype: torch.dtype) -> None:
    tables = table_of(3, 100)
    k_cache, v_cache = torch.zeros(2, 7, 2, PAGE, 24, dtype=dtype).unbind()
    rows = torch.randn(4, 6, 24)
    rows[0, 2, :4] = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, torch.inf, torch.nan])  # two ties
    k, v = rows[:, 2:4], rows[:, 4:]
    slots, positions = [2, 0, 2, 1], [63, 0, 64, 99]
    ops.kv_append(k, v, k_cache, v_cache, int32(slots), int32(positions), tables)
    for new, pool in ((k, k_cache), (v, v_cache)):
        written = positions_of(pool, tables)
        want = torch.zeros_like(written)
        want[slots, :, positions] = new.to(dtype)
        assert torch.equal(written.nan_to_num(7.0), want.nan_to_num(7.0))
        assert pool[7 * 6 // 2 - int(tables.sum())].eq(0).all()  # the page of no slot


def test_int8_codes_of_the_reference() -> None:
    """Values beside ties: their codes differ where 127 / top is not the quotient but 127 times a rounded reciprocal."""
    steps = torch.cat(((torch.arange(127) + 0.5) / 127, torch.ones(1)))
    rows = torch.rand(500, 1) * steps
    for got, want in zip(reference.quantize_rows(rows), quantized(rows), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("width", [7, 16, 80, 200])
def test_kv_append_in_int8(isa: str, width: int) -> None:
    """Codes and scales of the definition to the bit: ties, zeros, tiny and huge rows; a row that is not finite reads as
    NaN, and its neighbours do not."""
    rows = torch.randn(5, 6, width) * torch.tensor([1.0, 1e-3, 1e4, 1.0, 1.0]).view(5, 1, 1)
    rows[0, 2], rows[0, 4] = 0.0, torch.arange(width) % 120 + 0.5  # ties, in a row whose scale is exact
    rows[0, 4, -1] = 127.0
    rows[1, 2], rows[1, 3] = rows[1, 2] * 1e-38, 3e38
    rows[3, 2, 1], rows[3, 5, 0] = torch.nan, -torch.inf
    k, v = rows[:, 2:4], rows[:, 4:]
    tables, slots, positions = table_of(3, 100), [2, 0, 2, 1, 1], [63, 0, 64, 99, 98]
    caches = [Int8Pages(torch.zeros(7, 2, PAGE, width, dtype=INT8), torch.zeros(7, 2, PAGE)) for _ in range(2)]
    ops.kv_append(k, v, *caches, int32(slots), int32(positions), tables)
    for new, pool in zip((k, v), caches, strict=True):
        codes, scales = quantized(new)
        for got, want in ((pool.codes, codes), (pool.scales.unsqueeze(-1), scales.unsqueeze(-1))):
            written = positions_of(got, tables)
            wanted = torch.zeros_like(written)
            wanted[slots, :, positions] = want
            assert torch.equal(written.nan_to_num(7.0), wanted.nan_to_num(7.0))
        for got, want in zip(reference.quantize_rows(new), (codes, scales), strict=True):
            assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    where = int32(slots), int32(positions), tables
    out = ops.attention(torch.zeros(5, 2, width), *caches, *where, 1.0, window=1).view(5, 2, width)  # values alone
    assert out[3, 1].isnan().all()
    assert out[[0, 1, 2, 4]].isfinite().all()
    want = reference.attention(torch.zeros(5, 2, width), *caches, *where, 1.0, window=1).view(5, 2, width)
    assert torch.equal(out[[0, 1, 2, 4]], want[[0, 1, 2, 4]])
    # half a step of the largest value, and the roundings of scale and product
    finite = [0, 1, 2, 4]
    error = (out[finite] - v[finite]).abs() / v[finite].abs().amax(-1, keepdim=True)
    assert (error <= (0.5 + 2**-15) / 127).all()


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("window", [0, 100])
def test_pages_may_be_anywhere(isa: str, dtype: torch.dtype, window: int) -> None:
    """The bits of pages in order, whatever their order, for a prompt and for rows with the splits of a long one."""
    k, v = cache(2, 2, 1100, 80, 1100, dtype)
    q, slots = torch.randn(40, 4, 80), int32([0] * 17 + [1] * 23)
    positions = torch.cat((torch.arange(600, 617), torch.arange(1077, 1100))).int()
    for rows in (slice(None), slice(16, 18)):
        case = (q[rows], k, v, slots[rows], positions[rows], 0.1, window)
        want = attention(*case, seed=None)
        assert all(torch.equal(attention(*case, seed=seed), want) for seed in (1, 2))


def test_out_of_range_slots_positions_and_pages_are_refused() -> None:
    pool, tables, q = torch.zeros(3, 1, PAGE, 16), int32([0, 1, 2, 7]).view(2, 2), torch.randn(1, 1, 16)
    for slot, position in ((2, 0), (-1, 0), (0, 128), (0, -1), (1, 64)):
        where = (int32([slot]), int32([position]), tables)
        with pytest.raises(ValueError, match="outside the cache"):
            ops.attention(q, pool, pool, *where, 1.0)
        with pytest.raises(ValueError, match="outside the cache"):
            ops.kv_append(q, q, pool, pool, *where)
    where = (int32([1]), int32([70]), int32([7, -1, -1, 1]).view(2, 2))
    ops.kv_append(q, q, pool, pool, *where)  # what a row does not touch need not be there
    ops.attention(q, pool, pool, *where, 1.0, window=7)
    with pytest.raises(ValueError, match="outside the cache"):
        ops.attention(q, pool, pool, *where, 1.0, window=8)
    with pytest.raises(ValueError, match="outside the cache"):
        ops.attention(q, pool, pool, *where, 1.0, softcap=1.0)


def test_broken_contracts_are_refused() -> None:
    pool, tables = torch.zeros(1, 2, PAGE, 16), int32([0]).view(1, 1)
    where = int32([0]), int32([3]), tables
    with pytest.raises(ValueError, match="query heads"):
        ops.attention(torch.randn(1, 3, 16), pool, pool, *where, 1.0)
    with pytest.raises(ValueError, match="q must be"):
        ops.attention(torch.randn(1, 4, 8), pool, pool, *where, 1.0)
    with pytest.raises(ValueError, match="k_cache must be"):
        ops.attention(torch.randn(1, 4, 16), pool.half(), pool.half(), *where, 1.0)
    with pytest.raises(ValueError, match="k_cache must be"):
        ops.attention(torch.randn(1, 4, 16), pool[:, :, :32], pool[:, :, :32], *where, 1.0)
    with pytest.raises(ValueError, match="v_cache must be"):
        ops.attention(torch.randn(1, 4, 16), pool, pool[:, :1], *where, 1.0)
    int8 = Int8Pages(pool.to(INT8), torch.zeros(1, 2, PAGE))
    with pytest.raises(ValueError, match="v_cache the same"):
        ops.attention(torch.randn(1, 4, 16), int8, pool, *where, 1.0)
    with pytest.raises(ValueError, match="k_cache must be"):
        ops.attention(torch.randn(1, 4, 16), int8.codes, int8.codes, *where, 1.0)
    with pytest.raises(ValueError, match="the scales of v_cache must be"):
        ops.attention(torch.randn(1, 4, 16), int8, Int8Pages(int8.codes, int8.scales[:, :1]), *where, 1.0)
    with pytest.raises(ValueError, match="positions must be"):
        ops.attention(torch.randn(1, 4, 16), pool, pool, where[0], where[1].long(), tables, 1.0)
    with pytest.raises(ValueError, match="tables must be"):
        ops.attention(torch.randn(1, 4, 16), pool, pool, *where[:2], tables[0], 1.0)
    with pytest.raises(ValueError, match="tables must be"):
        ops.attention(torch.randn(1, 4, 16), pool, pool, *where[:2], tables.long(), 1.0)
