"""CUDA attention against float64: every kernel, mask and head size, decode and prefill, and rows on their own."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.ops import cuda

sys.path.insert(0, str(Path(__file__).parent))
from kv_pages import PAGE, moved, paged, paged_int8, positions_of, stored, table_of

USABLE, REASON = cuda.available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")]
pytestmark = gpu
DEVICE = torch.device("cuda")
BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.int8
# Of the sum of p |v|: weights and result are each rounded to bf16, 2^-8 at most; in fp32 what counts is the rounding of
# the scores, about 1e-6 times a score of at most 10. With an int8 cache the weights are rounded times the scales of
# values, once all the same; queries have 15 bits below their head's largest value, a hundredth of weights' rounding.
BOUND = {BF16: 2.0**-7, FP32: 2e-5}


def make(
    m: int, heads: int, kv_heads: int, d: int, capacity: int, dtype: torch.dtype, slots: int = 1, seed: int = 0
) -> dict[str, Any]:
    """Inputs on pages in random order; what no slot has is NaN. `dtype` int8: of the cache, under bf16."""
    cache, dtype = (paged_int8, BF16) if dtype == INT8 else (paged, dtype)
    g = torch.Generator(device=DEVICE).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=DEVICE).to(dtype)

    q = normal(m, heads * d + 16)[:, : heads * d].unflatten(1, (heads, d))
    tables = table_of(slots, capacity, DEVICE, seed)
    return {
        "q": q,
        "k_cache": cache(normal(slots, kv_heads, capacity, d), tables),
        "v_cache": cache(normal(slots, kv_heads, capacity, d), tables),
        "tables": tables,
        "slots": torch.zeros(m, dtype=torch.int32, device=DEVICE),
        "positions": torch.arange(capacity - m, capacity, dtype=torch.int32, device=DEVICE),
        "scale": d**-0.5,
    }


def in_order(c: dict[str, Any]) -> dict[str, Any]:
    """The same case on pages in their order."""
    tables = torch.arange(c["tables"].numel(), dtype=torch.int32, device=DEVICE).view_as(c["tables"])
    pools = {name: moved(c[name], c["tables"], tables) for name in ("k_cache", "v_cache")}
    return c | pools | {"tables": tables}


def oracle(c: dict[str, Any], unpacked: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
    """Float64 attention with every mask written out as a matrix: the result and the same with |v|. `unpacked`: of an
    int8 cache rounded to bf16, as prompts read it."""
    q, slots = c["q"].double(), c["slots"].long()
    k_cache, v_cache = (positions_of(c[name], c["tables"]) for name in ("k_cache", "v_cache"))
    if unpacked and c["k_cache"].dtype == INT8:
        k_cache, v_cache = k_cache.float().to(BF16), v_cache.float().to(BF16)
    per_kv, columns = q.shape[1] // k_cache.shape[1], torch.arange(k_cache.shape[2], device=DEVICE)
    position = c["positions"].long()[:, None]
    allowed = columns <= position
    if (prefix := options.get("prefix_lengths")) is not None:
        allowed |= columns < prefix[:, None]
    if window := options.get("window", 0):
        allowed &= columns > position - window
    if (starts := options.get("starts")) is not None:
        allowed &= columns >= starts[slots][:, None]
    bias = torch.zeros(len(q), 1, columns.numel(), dtype=torch.float64, device=DEVICE)
    if (mask := options.get("mask")) is not None:
        allowed[:, mask.shape[1] :] = False
        bias[:, 0, : mask.shape[1]] = mask
    if (slopes := options.get("alibi_slopes")) is not None:
        bias = bias + slopes.double()[:, None] * (columns - position)[:, None]
    out, magnitude = torch.zeros_like(q), torch.zeros_like(q)
    for slot in slots.unique().tolist():  # with all of its rows
        rows = slots == slot
        seen = allowed[rows]
        k, v = (t[slot].double().repeat_interleave(per_kv, 0) for t in (k_cache, v_cache))
        scores = torch.einsum("rhd,hpd->rhp", q[rows], k) * c["scale"]
        if softcap := options.get("softcap", 0.0):
            scores = softcap * torch.tanh(scores / softcap)
        p = (scores + bias[rows]).masked_fill(~seen[:, None], -torch.inf).softmax(-1).nan_to_num(0.0)
        v = v.masked_fill(~seen.any(0)[:, None], 0)  # where no row looks may be anything
        out[rows] = torch.einsum("rhp,hpd->rhd", p, v)
        magnitude[rows] = torch.einsum("rhp,hpd->rhd", p, v.abs())
    return out.flatten(1), magnitude.flatten(1)


def prompts(*counts: int) -> dict[str, Any]:
    """The option that says so: rows of prompts, one behind the other."""
    return {"tiles": torch.tensor(ops.prompt_tiles(counts), dtype=torch.int32, device=DEVICE)}


def check(c: dict[str, Any], tiles: Tensor | None = None, **options: Any) -> Tensor:
    got = ops.attention(**c, **options, tiles=tiles)
    want, magnitude = oracle(c, tiles is not None, **options)
    bound = BOUND[c["q"].dtype] if c["k_cache"].dtype == c["q"].dtype else BOUND[BF16]
    assert got.isfinite().all()
    assert ((got.double() - want).abs() <= bound * (magnitude + 1e-3)).all(), (got.double() - want).abs().max()
    return got


def options_of(name: str, m: int, heads: int, capacity: int, slots: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(5)
    if name == "window":
        return {"window": 37}
    if name == "softcap":
        return {"softcap": 3.0}
    if name == "alibi":
        return {"alibi_slopes": (2.0 ** -torch.linspace(1, 8, heads)).to(DEVICE)}
    if name == "prefix":
        return {"prefix_lengths": torch.randint(0, capacity, (m,), generator=g).int().to(DEVICE)}
    if name == "starts":
        return {"starts": torch.randint(0, capacity, (slots,), generator=g).int().to(DEVICE)}
    if name == "mask":
        mask = torch.randn(m, capacity - 3, generator=g)
        mask[:, ::5] = -torch.inf
        mask[0] = -torch.inf
        return {"mask": mask.to(DEVICE)}
    return {}


OPTIONS = ["plain", "window", "softcap", "alibi", "prefix", "starts", "mask"]
# (head_dim, dtype): every size with tensor-core kernels of its own, some that share those for up to 128 and up to 256
# (72 and 200, no multiples of 16, in prompts alone), then the plain kernel and all cache types
HEADS = [(d, dtype) for dtype in (BF16, INT8) for d in (64, 128, 256, 80, 96, 160, 8, 40, 72, 200)]
HEADS += [(8, FP32), (64, FP32), (128, FP32), (256, FP32)]
# the same in short: of decode, and of prompts
DECODE = [(d, dtype) for dtype in (BF16, INT8) for d in (64, 128, 256, 96, 160, 72)]
PROMPTS = [(d, dtype) for dtype in (BF16, INT8) for d in (64, 128, 256, 96, 160, 200, 40)]


@pytest.mark.sanitize
@pytest.mark.parametrize("option", ["plain", "mask"])
@pytest.mark.parametrize(("d", "dtype"), HEADS)
def test_small(d: int, dtype: torch.dtype, option: str) -> None:
    """Each kernel, with and without options, few positions: decode of rows, one row, a long cache, and prefill."""
    for m, capacity in ((2, 19), (2, 600), (1, 600), (1, 16400)):
        c = make(m, 4, 2, d, capacity, dtype)
        c["positions"].clamp_(max=599)
        check(c, **options_of(option, m, 4, capacity, 1))
    c = make(33, 2, 1, d, 50, dtype)
    for wgmma in (True, False):
        with cuda.wgmma(wgmma):
            check(c, **prompts(33), **options_of(option, 33, 2, 50, 1))


@pytest.mark.parametrize("dtype", [BF16, INT8])
@pytest.mark.parametrize("d", [d for d in range(64, 257, 16) if d not in {64, 128, 256}])
def test_every_multiple_of_16(d: int, dtype: torch.dtype) -> None:
    """Head sizes that share kernels: rows in clusters, a long row and many, with options and without."""
    for m, capacity in ((3, 1100), (1, 16400), (150, 700)):
        c = make(m, 8, 2, d, capacity, dtype)
        for option in ("plain", "alibi"):
            options = options_of(option, m, 8, capacity, 1)
            got = check(c, **options)
            row = {name: c[name][m - 1 :] for name in ("q", "slots", "positions")}
            assert torch.equal(got[m - 1 :], ops.attention(**(c | row), **options))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("d", "dtype"), [*DECODE, (128, FP32), (8, FP32)])
def test_decode_options(d: int, dtype: torch.dtype, option: str) -> None:
    c = make(5, 8, 2, d, 1500, dtype, slots=3)
    c["slots"] = torch.tensor([2, 0, 1, 1, 0], dtype=torch.int32, device=DEVICE)
    c["positions"] = torch.tensor([0, 255, 256, 777, 1499], dtype=torch.int32, device=DEVICE)
    check(c, **options_of(option, 5, 8, 1500, 3))


def mean_squares(m: int, d: int, seed: int) -> tuple[float, float]:
    """Of the errors to float64 of this and of torch's attention: of prompts, or of one row each of m sequences."""
    one = m == 1
    slots, capacity = (64, 512) if one else (1, m)
    c = make(slots * m, 8, 2, d, capacity, BF16, slots=slots, seed=seed)
    if one:
        c["slots"], c["positions"] = torch.arange(slots, device=DEVICE).int(), torch.full_like(c["slots"], capacity - 1)
    got = ops.attention(**c, **({} if one else prompts(m))).unflatten(1, (8, d))
    want = oracle(c)[0].unflatten(1, (8, d))
    k, v = (positions_of(c[name], c["tables"]).repeat_interleave(4, 1) for name in ("k_cache", "v_cache"))
    q = c["q"].unflatten(0, (slots, m)).transpose(1, 2)
    torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=not one, scale=c["scale"])
    errors = got.double() - want, torchs.transpose(1, 2).flatten(0, 1).double() - want
    return errors[0].square().mean().item(), errors[1].square().mean().item()


@pytest.mark.parametrize("d", [64, 72, 96, 128, 160, 256])
@pytest.mark.parametrize("m", [1, 1024])
def test_the_error_is_within_that_of_torch(m: int, d: int) -> None:
    """In the mean over several draws what torch's attention is off at most in one of them."""
    ours, torchs = zip(*(mean_squares(m, d, seed) for seed in range(6)), strict=True)
    assert sum(ours) / len(ours) <= max(torchs), (ours, torchs)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("d", "dtype"), [*PROMPTS, (128, FP32), (8, FP32)])
def test_prefill_options(d: int, dtype: torch.dtype, option: str) -> None:
    """A chunk of 331 rows that starts at position 172, with a ragged last tile."""
    c = make(331, 4, 2, d, 503, dtype, slots=2)
    c["slots"].fill_(1)
    check(c, **prompts(331), **options_of(option, 331, 4, 503, 2))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (71, 1), (12, 2), (32, 8)])
@pytest.mark.parametrize("dtype", [BF16, FP32, INT8])
@pytest.mark.parametrize("d", [64, 96, 160])
def test_groups_of_heads(d: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """From one head a KV head to 71: more than the columns of one tensor-core tile and than one block. In decode of few
    rows and of many."""
    for m in (3, 100):
        check(make(m, heads, kv_heads, d, 300, dtype))
    check(make(40, heads, kv_heads, d, 77, dtype), **prompts(40))


@pytest.mark.parametrize("capacity", [1, 3, 17, 63, 255, 256, 257, 4099, 33000])
def test_lengths(capacity: int) -> None:
    """The last takes splits of twice the usual span, and is a long row."""
    check(make(1, 4, 1, 128, capacity, BF16))
    check(make(1, 4, 1, 72, capacity, FP32))
    check(make(1, 4, 1, 128, capacity, INT8))


def test_a_very_long_row_of_int8() -> None:
    """A warp takes twice as many tiles as it has lanes, whose pages it keeps one a lane; of a window it begins within a
    tile and a page."""
    c = make(1, 8, 8, 64, 131_072, INT8)
    check(c)
    check(c, window=131_029)


def test_unwritten_positions_are_not_read() -> None:
    for d, dtype in ((128, BF16), (96, BF16), (160, BF16), (128, FP32)):
        for m, kind in ((1, {}), (40, prompts(40))):
            c = make(m, 4, 2, d, 700, dtype)
            c["positions"] -= 123
            for name in ("k_cache", "v_cache"):
                cache = positions_of(c[name], c["tables"])
                cache[:, :, 700 - 123 :] = torch.nan
                c[name] = paged(cache, c["tables"])
            got = ops.attention(**c, **kind)
            for name in ("k_cache", "v_cache"):
                c[name] = c[name].nan_to_num(1.0)
            assert torch.equal(got, ops.attention(**c, **kind))
            check(c, **kind)


@pytest.mark.parametrize("d", [64, 128, 256, 96, 160, 72])
@pytest.mark.parametrize(("m", "tiles"), [(1, False), (150, False), (40, True)])
def test_unwritten_positions_of_int8_are_not_read(m: int, tiles: bool, d: int) -> None:
    """Their scales are NaN, then not."""
    kind = prompts(m) if tiles else {}
    c = make(m, 4, 2, d, 700, INT8)
    c["positions"] = (torch.arange(m, device=DEVICE) + 577 - m).int()
    caches = [torch.randn(1, 2, 700, d, device=DEVICE) for _ in range(2)]
    results = []
    for rest in (torch.nan, 1.0):
        for name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
            cache[:, :, 577:] = rest
            c[name] = paged_int8(cache, c["tables"])
        results.append(ops.attention(**c, **kind))
    assert torch.equal(*results)
    check(c, **kind)


@pytest.mark.parametrize("d", [64, 128, 256, 80, 96, 160, 72])
@pytest.mark.parametrize("m", [1, 150])
def test_queries_of_very_different_values(m: int, d: int) -> None:
    """One a thousand times the others, tiny ones, zeros: against an int8 cache; one that is not finite gives NaN."""
    c = make(m, 4, 2, d, 700, INT8)
    c["q"][:, 0] *= 1e-30
    c["q"][:, 1, 3] *= 1000
    c["q"][:, 2] = 0
    c["q"][:, 3, ::2] *= 1e-5
    # q has 15 bits below its largest value, and what it loses moves a score by less than that times the sum of |k|
    step = 2.0 ** (c["q"].double().abs().amax(-1).clamp_min(2.0**-100).log2().floor() - 14)
    keys = positions_of(c["k_cache"], c["tables"])[0, :, :700].abs().sum(-1).amax(-1).repeat_interleave(2)
    bound = BOUND[BF16] + torch.expm1(step * keys * c["scale"]).repeat_interleave(d, 1)
    want, magnitude = oracle(c)
    got = ops.attention(**c).double()
    assert ((got - want).abs() <= bound * (magnitude + 1e-3)).all()
    c["q"][0, 1, 5] = torch.inf
    got = ops.attention(**c).view(m, 4, d)
    assert got[0, 1].isnan().all()
    assert got[0, [0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("d", [64, 96, 160])
def test_rows_that_see_nothing_give_zeros(d: int) -> None:
    for dtype in (BF16, FP32, INT8):
        for m, kind in ((3, {}), (40, prompts(40))):
            c = make(m, 4, 2, d, 600, dtype)
            mask = torch.zeros(m, 600, device=DEVICE)
            mask[1] = -torch.inf
            got = check(c, mask=mask, **kind)
            assert got[1].eq(0).all()
            starts = torch.tensor([598], dtype=torch.int32, device=DEVICE)
            got = check(c, starts=starts, **kind)
            assert got[0].eq(0).all()
            c["slots"][2] = -1
            assert ops.attention(**c, **kind)[2].eq(0).all()


@pytest.mark.parametrize(("d", "dtype"), [*DECODE, (128, FP32)])
def test_rows_do_not_depend_on_each_other(d: int, dtype: torch.dtype) -> None:
    """Bit for bit: a decode batch equals its rows alone, a prefill chunk equals the same rows in chunks of any size."""
    c = make(9, 8, 2, d, 2100, dtype, slots=9)
    c["slots"] = torch.randperm(9, device=DEVICE).int()
    c["positions"] = torch.tensor([0, 5, 100, 255, 256, 900, 1700, 2098, 2099], dtype=torch.int32, device=DEVICE)
    whole = ops.attention(**c)
    for m in range(9):
        row = {name: c[name][m : m + 1] for name in ("q", "slots", "positions")}
        assert torch.equal(whole[m : m + 1], ops.attention(**(c | row)))
    c = make(300, 4, 2, d, 420, dtype)
    whole = ops.attention(**c, **prompts(300))
    for first, last in ((0, 77), (77, 78), (78, 94), (94, 300)):
        rows = {name: c[name][first:last] for name in ("q", "slots", "positions")}
        assert torch.equal(whole[first:last], ops.attention(**(c | rows), **prompts(last - first)))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("d", "dtype"), HEADS)
def test_pages_may_be_anywhere(d: int, dtype: torch.dtype, option: str) -> None:
    """Bit for bit as on pages in order: decode in blocks of one part and of many, and prefill from within a page."""
    c = make(9, 8, 2, d, 2100, dtype, slots=9)
    c["slots"] = torch.randperm(9, device=DEVICE).int()
    c["positions"] = torch.tensor([0, 5, 63, 64, 256, 900, 1700, 2098, 2099], dtype=torch.int32, device=DEVICE)
    options = options_of(option, 9, 8, 2100, 9)
    assert torch.equal(ops.attention(**c, **options), ops.attention(**in_order(c), **options))
    c = make(1, 4, 1, d, 17000, dtype)
    options = options_of(option, 1, 4, 17000, 1)
    assert torch.equal(ops.attention(**c, **options), ops.attention(**in_order(c), **options))
    c = make(300, 4, 2, d, 420, dtype)
    options = options_of(option, 300, 4, 420, 1) | prompts(300)
    assert torch.equal(ops.attention(**c, **options), ops.attention(**in_order(c), **options))


@pytest.mark.parametrize("window", range(33, 33 + 17))
@pytest.mark.parametrize(("d", "dtype"), [*DECODE, (64, FP32)])
def test_windows_that_start_anywhere_on_a_page(d: int, dtype: torch.dtype, window: int) -> None:
    """Tiles of decode start where the window does, and so on two pages."""
    c = make(4, 4, 2, d, 1200, dtype, slots=2)
    c["slots"] = torch.tensor([0, 1, 0, 1], dtype=torch.int32, device=DEVICE)
    c["positions"] = torch.tensor([62, 80, 777, 1199], dtype=torch.int32, device=DEVICE)
    for wide in (window, window + 640):
        assert torch.equal(check(c, window=wide), ops.attention(**in_order(c), window=wide))


@pytest.mark.sanitize
@pytest.mark.parametrize("window", [1, 64, 100, 333])
@pytest.mark.parametrize(("d", "dtype"), [*DECODE, (128, FP32)])
@pytest.mark.parametrize("wgmma", [True, False])
def test_pages_before_the_window_are_not_read(wgmma: bool, d: int, dtype: torch.dtype, window: int) -> None:
    """The same bits without them in the table, and NaN on them and on the page that stands in for one that is not."""
    loads: list[tuple[int, int, dict[str, Any]]] = [(1, 1500, {}), (150, 900, {}), (140, 900, prompts(140))]
    for m, capacity, kind in [*loads, (1, 17000, {})]:
        c = make(m, 4, 2, d, capacity, dtype)
        last = (c["tables"] == c["tables"].numel()).nonzero()
        if len(last):  # the page that stands in is nobody's
            free = c["tables"].numel() * (c["tables"].numel() + 1) // 2 - int(c["tables"].sum())
            other = c["tables"].clone()
            other[tuple(last[0])] = free
            c |= {name: moved(c[name], c["tables"], other) for name in ("k_cache", "v_cache")} | {"tables": other}
        unseen = max(int(c["positions"][0]) + 1 - window, 0) // PAGE
        with cuda.wgmma(wgmma):
            want = check(c, window=window, **kind)
            for pool in (c["k_cache"], c["v_cache"]):
                stored(pool)[-1][[*c["tables"][0, :unseen].tolist(), -1]] = torch.nan
            c["tables"][:, :unseen] = -1
            assert torch.equal(ops.attention(**c, window=window, **kind), want), (m, capacity)


@pytest.mark.parametrize("option", ["plain", "window", "softcap"])
@pytest.mark.parametrize(("d", "dtype"), [*PROMPTS, (128, FP32)])
def test_prompts_of_several_sequences(d: int, dtype: torch.dtype, option: str) -> None:
    """In one call, with rows of no tile and tiles of no row between: each as it is alone."""
    counts, starts = (1, 130, 64, 7, 256), (0, 60, 300, 411, 164)
    c = make(sum(counts) + 9, 4, 2, d, 420, dtype, slots=5)
    first = torch.tensor([0, 4, 134, 198, 205])  # rows 1, 2 and 3 are of nobody, like the last ones
    for slot, (row, count, start) in enumerate(zip(first.tolist(), counts, starts, strict=True)):
        c["slots"][row : row + count] = slot
        c["positions"][row : row + count] = torch.arange(start, start + count, device=DEVICE)
    tiles = [
        (row + at, n) for row, count in zip(first.tolist(), counts, strict=True) for at, n in ops.prompt_tiles([count])
    ]
    table = torch.tensor([*tiles[:2], (0, 0), *tiles[2:], (0, 0)], dtype=torch.int32, device=DEVICE)
    options = options_of(option, len(c["q"]), 4, 420, 5)
    together = ops.attention(**c, **options, tiles=table)
    for row, count in zip(first.tolist(), counts, strict=True):
        rows = {name: c[name][row : row + count] for name in ("q", "slots", "positions")}
        assert torch.equal(together[row : row + count], check(c | rows, **prompts(count), **options))


@pytest.mark.parametrize("option", [*OPTIONS, "wide window"])
@pytest.mark.parametrize(("d", "dtype"), [(d, dtype) for d in (64, 128, 256, 96, 160) for dtype in (BF16, INT8)])
@pytest.mark.parametrize("wgmma", [True, False])
def test_prompts_cut_anywhere(wgmma: bool, d: int, dtype: torch.dtype, option: str) -> None:
    """With wgmma and as on cards without it: right, and bit for bit the same in pieces of any size."""
    c = make(500, 4, 2, d, 537, dtype)
    options = {"window": 200} if option == "wide window" else options_of(option, 500, 4, 537, 1)
    with cuda.wgmma(wgmma):
        whole = check(c, **prompts(500), **options)
        for size in (1, 7, 64, 100, 333):
            for first in range(0, 500, size if size > 1 else 19):
                piece = slice(first, min(first + size, 500))
                rows = {name: c[name][piece] for name in ("q", "slots", "positions")}
                own = {name: t[piece] if name in ("prefix_lengths", "mask") else t for name, t in options.items()}
                count = piece.stop - piece.start
                assert torch.equal(whole[piece], ops.attention(**(c | rows), **own, **prompts(count))), (first, size)


@pytest.mark.parametrize("window", [0, 700])
@pytest.mark.parametrize(("d", "dtype"), [(d, dtype) for d in (64, 128, 256, 96, 160) for dtype in (BF16, INT8)])
@pytest.mark.parametrize("wgmma", [True, False])
def test_a_piece_of_a_long_prompt(wgmma: bool, d: int, dtype: torch.dtype, window: int) -> None:
    """More pages than a warp has lanes."""
    c = make(150, 4, 2, d, 5000, dtype)
    with cuda.wgmma(wgmma):
        check(c, **prompts(150), window=window)


@pytest.mark.sanitize
@pytest.mark.parametrize("option", ["plain", "mask"])
@pytest.mark.parametrize("d", [64, 128, 256, 96, 160])
def test_more_tiles_of_prompts_than_multiprocessors(d: int, option: str) -> None:
    """Every block of the kernel takes several, one after the other."""
    c = make(3, 300, 2, d, 140, BF16)
    check(c, **prompts(3), **options_of(option, 3, 300, 140, 1))


@pytest.mark.sanitize
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("d", "dtype"), [(d, dtype) for d, dtype in DECODE if d != 72])
@pytest.mark.parametrize("capacity", [700, 2048, 5000])
def test_a_block_for_each_of_many_rows(capacity: int, d: int, dtype: torch.dtype, option: str) -> None:
    """Rows of very different lengths, so many that a block takes all parts of one, or several: each as it is alone."""
    c = make(150, 8, 2, d, capacity, dtype, slots=2)
    c["slots"] = torch.arange(150, device=DEVICE).int() % 2
    c["positions"] = (torch.arange(150, device=DEVICE) ** 2 * 7 % capacity).int()
    options = options_of(option, 150, 8, capacity, 2)
    whole = ops.attention(**c, **options)
    for m in (0, 1, 2, 3, 77, 148, 149):
        row = {name: c[name][m : m + 1] for name in ("q", "slots", "positions")}
        own = {name: t[m : m + 1] if name in ("prefix_lengths", "mask") else t for name, t in options.items()}
        assert torch.equal(whole[m : m + 1], check(c | row, **own))


@pytest.mark.parametrize(("d", "dtype"), [*DECODE, (64, FP32)])
def test_many_rows(d: int, dtype: torch.dtype) -> None:
    """256 sequences in one call, whose workspace takes several launches in fp32: each as it is alone."""
    c = make(256, 8, 2, d, 40000, dtype, slots=2)
    c["slots"] = torch.arange(256, device=DEVICE).int() % 2
    c["positions"] = (torch.arange(256, device=DEVICE) * 157 % 40000).int()
    whole = ops.attention(**c)
    for m in range(0, 256, 5):
        row = {name: c[name][m : m + 1] for name in ("q", "slots", "positions")}
        assert torch.equal(whole[m : m + 1], ops.attention(**(c | row)))


def test_merging_is_associative() -> None:
    """A long row over many splits equals float64 also where the maximum sits in the first, middle or last split."""
    for place in (0, 2000, 4098):
        c = make(1, 4, 1, 128, 4099, BF16)
        c["k_cache"][c["tables"][0, place // PAGE], :, place % PAGE] = c["q"][0, 0] * 4
        check(c)


@pytest.mark.parametrize("dtype", [BF16, INT8])
def test_mixed_dtypes(dtype: torch.dtype) -> None:
    for m, kind in ((3, {}), (40, prompts(40))):
        c = make(m, 4, 2, 64, 300, dtype)
        c["q"] = c["q"].float()
        check(c, **kind)


@pytest.mark.parametrize("dtype", [BF16, FP32, INT8])
def test_repeats_bit_for_bit_and_in_a_graph(dtype: torch.dtype) -> None:
    c = make(4, 8, 2, 128, 3000, dtype)
    c["positions"] = torch.tensor([2999, 10, 256, 1800], dtype=torch.int32, device=DEVICE)
    want = ops.attention(**c)
    with cuda.programmatic_launch(True), ops.capture(DEVICE) as program:
        out = ops.attention(**c)
    for _ in range(50):
        program.replay()
    assert torch.equal(out, want)
    c["positions"].copy_(torch.tensor([1, 2999, 300, 0], dtype=torch.int32, device=DEVICE))
    ordered = in_order(c)
    c["tables"].copy_(ordered["tables"])  # the program reads them at replay
    for name in ("k_cache", "v_cache"):
        for to, of in zip(stored(c[name]), stored(ordered[name]), strict=True):
            to.copy_(of)
    program.replay()
    assert torch.equal(out, ops.attention(**c))
    check(c)


def test_contract_errors() -> None:
    c = make(2, 4, 2, 64, 30, BF16)
    with pytest.raises(ValueError, match="multiple of 8"):
        ops.attention(**make(2, 4, 2, 12, 30, FP32))
    with pytest.raises(ValueError, match="int32"):
        ops.attention(**(c | {"positions": c["positions"].long()}))
    with pytest.raises(ValueError, match="tables"):
        ops.attention(**(c | {"tables": c["tables"][0]}))
    with pytest.raises(ValueError, match="caches"):
        ops.attention(**(c | {name: c[name][:, :, :32].contiguous() for name in ("k_cache", "v_cache")}))
    with pytest.raises(ValueError, match="mask"):
        ops.attention(**c, mask=torch.zeros(3, 30, device=DEVICE))
    with pytest.raises(ValueError, match="tiles"):
        ops.attention(**c, tiles=torch.zeros(3, dtype=torch.int32, device=DEVICE))
