"""CUDA rope_attention: the bits of the ops it fuses, whatever the batch and the cache, and float64 attention."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.ops import cuda

sys.path.insert(0, str(Path(__file__).parent))
from cuda_weights import activations, quantized
from kv_pages import PAGE, copied, moved, paged, paged_int8, positions_of, same_bits, stored, table_of

USABLE, REASON = cuda.available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")]
pytestmark = gpu
DEVICE = torch.device("cuda")
BF16, FP32, INT8 = torch.bfloat16, torch.float32, torch.int8
CACHES = [BF16, INT8]
FILLED = [80, 96, 112]  # head sizes that share a kernel, filled up with zeros to 128
BOUND = {BF16: 2.0**-7, FP32: 2e-5}  # of the sum of p |v|, as in test_cuda_attention.py

# Around the tiles, the least share of a block, what one cluster takes (2,048) and the length of the cache.
LENGTHS = [1, 16, 17, 63, 64, 65, 255, 256, 257, 511, 513, 2047, 2048, 2049, 3333, 5000]


def make_projection(
    lengths: list[int], heads: int, kv_heads: int, d: int, dtype: torch.dtype = BF16, capacity: int = 5000
) -> dict[str, Any]:
    """One row of each length, in slots out of order; keys and values behind a row's position are NaN. `dtype` int8: of
    the cache, under bf16."""
    m, pool, dtype = len(lengths), paged_int8 if dtype == INT8 else paged, BF16 if dtype == INT8 else dtype
    g = torch.Generator(device=DEVICE).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=DEVICE).to(dtype)

    columns = (heads + 2 * kv_heads) * d
    c = {"qkv": normal(m, columns + 16)[:, :columns].unflatten(1, (-1, d)), "scale": d**-0.5}
    caches = {name: normal(m + 1, kv_heads, capacity, d) for name in ("k_cache", "v_cache")}
    c["slots"] = torch.tensor([(5 * i + 3) % (m + 1) for i in range(m)], dtype=torch.int32, device=DEVICE)
    if len(set(c["slots"].tolist())) < m:
        c["slots"] = torch.arange(m, dtype=torch.int32, device=DEVICE).flip(0)
    c["positions"] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE) - 1
    for slot, length in zip(c["slots"].tolist(), lengths, strict=True):
        for cache in caches.values():
            cache[slot, :, length - 1 :] = torch.nan
    c["tables"] = table_of(m + 1, capacity, DEVICE)
    c |= {name: pool(cache, c["tables"]) for name, cache in caches.items()}
    angles = torch.arange(c["tables"].shape[1] * PAGE, device=DEVICE).double().unsqueeze(1) * 1e4 ** (
        -torch.arange(d // 2, device=DEVICE).double() / (d // 2)
    )
    return c | {"cos": angles.cos().float(), "sin": angles.sin().float()}


def by_parts(c: dict[str, Any], window: int = 0, softcap: float = 0.0, **norms: Any) -> Tensor:
    """rope_append, then attention."""
    q = ops.rope_append(**{name: value for name, value in c.items() if name != "scale"}, **norms)
    places = [c[name] for name in ("k_cache", "v_cache", "slots", "positions", "tables", "scale")]
    return ops.attention(q, *places, window, softcap=softcap)


def run_rope_attention(c: dict[str, Any], together: bool, **options: Any) -> tuple[Tensor, Any, Any]:
    """The result and the caches, on copies of what is written."""
    copies = {name: copied(c[name]) for name in ("qkv", "k_cache", "v_cache")}
    out = cuda.rope_attention(**(c | copies), **options) if together else by_parts(c | copies, **options)
    return out, copies["k_cache"], copies["v_cache"]


def each_alone(c: dict[str, Any], rows: Sequence[int], **options: Any) -> Iterator[tuple[int, Tensor]]:
    """Every row's result without the others, all on one copy of the caches: each writes the place that is its own."""
    caches = {name: copied(c[name]) for name in ("k_cache", "v_cache")}
    for m in rows:
        row = {name: c[name][m : m + 1].clone() for name in ("qkv", "slots", "positions")}
        yield m, cuda.rope_attention(**(c | caches | row), **options)


def oracle(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Float64 attention row by row: the result and the same with |v|."""
    out, magnitude = [], []
    for row, slot, position in zip(q.double(), slots.tolist(), positions.tolist(), strict=True):
        seen = slice(max(0, position + 1 - window) if window else 0, position + 1)
        k, v = (t[slot, :, seen].double().repeat_interleave(len(row) // t.shape[1], 0) for t in (k_cache, v_cache))
        scores = torch.einsum("hd,hpd->hp", row, k) * scale
        p = torch.softmax(softcap * torch.tanh(scores / softcap) if softcap else scores, -1)
        out.append(torch.einsum("hp,hpd->hd", p, v).flatten())
        magnitude.append(torch.einsum("hp,hpd->hd", p, v.abs()).flatten())
    return torch.stack(out), torch.stack(magnitude)


def check_rope_attention(c: dict[str, Any], together: bool = True, **options: Any) -> Tensor:
    """Fused and not: the same bits, caches included; and float64 attention of what rope_append made. `together` False:
    the fused kernel refuses, and the parts alone are compared."""
    apart = fused = run_rope_attention(c, False, **options)
    if together:
        fused = run_rope_attention(c, True, **options)
        for got, want in zip(fused, apart, strict=True):
            assert same_bits(got, want)
    else:
        with pytest.raises(ValueError, match=r"rope_attention|attention: got|rope: got"):
            run_rope_attention(c, True, **options)
    window, softcap = options.pop("window", 0), options.pop("softcap", 0.0)
    caches = {name: copied(c[name]) for name in ("k_cache", "v_cache")}
    places = [c[name] for name in ("positions", "slots", "tables", "cos", "sin")]
    q = ops.rope_append(c["qkv"].clone(), *places, *caches.values(), **options)
    plain = {"q": q, "slots": c["slots"], "positions": c["positions"], "scale": c["scale"], **caches}
    assert same_bits(ops.attention(**plain, tables=c["tables"], window=window, softcap=softcap), fused[0])
    live = c["slots"] >= 0
    rows = {name: plain[name][live] for name in ("q", "slots", "positions")}
    caches = {name: positions_of(cache, c["tables"]) for name, cache in caches.items()}
    want, magnitude = oracle(**(plain | rows | caches), window=window, softcap=softcap)
    assert ((fused[0][live].double() - want).abs() <= BOUND[q.dtype] * (magnitude + 1e-3)).all()
    assert fused[0][~live].eq(0).all()
    return fused[0]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("d", [64, *FILLED, 128, 256])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "lengths", "capacity"),
    [(8, 2, [1, 64, 65, 300], 300), (4, 2, [200], 200), (17, 17, [500], 500), (1, 1, [70], 16400)],
    ids=["batch", "one row", "many KV heads", "long cache"],
)
def test_small(heads: int, kv_heads: int, d: int, lengths: list[int], capacity: int, dtype: torch.dtype) -> None:
    """Each kernel."""
    check_rope_attention(make_projection(lengths, heads, kv_heads, d, dtype, capacity))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("d", [64, 96, 128, 256])
@pytest.mark.parametrize("capacity", [700, 5000])
def test_a_block_for_each_row(capacity: int, d: int, dtype: torch.dtype) -> None:
    """So many KV heads of rows that a block takes all parts of one, or most where it may be longer."""
    c = make_projection([1, 64, 65, 300, 16, 63, 128, 129, 192, 257, 20, 447, 448, 699], 8, 8, d, dtype, capacity)
    check_rope_attention(c)
    if d >= 128:
        check_rope_attention(c, softcap=0.5)


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [64, 128])
def test_of_a_long_cache_behind_a_linear_that_leaves_no_room(d: int) -> None:
    weight = ops.pack_linear([quantized(64, 4096, 4, -1, "zero", BF16)[0]], DEVICE)
    c = make_projection([70], 1, 1, d, capacity=16400)
    want = check_rope_attention(c)
    ops.linear(activations(16, 4096, BF16), weight)
    assert same_bits(run_rope_attention(c, True)[0], want)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("d", [64, 80, 96])
def test_of_several_clusters(d: int, dtype: torch.dtype) -> None:
    check_rope_attention(make_projection([2300, 9], 4, 1, d, dtype, capacity=2400))


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("d", [64, *FILLED, 128, 256])
def test_the_newest_position_at_every_place_of_a_tile(d: int, dtype: torch.dtype) -> None:
    """Of the first tile, of one that another warp takes and of one whose ring has gone around; alone and together."""
    lengths = [start + i for start in (1, 97, 1985) for i in range(16)]
    c = make_projection(lengths, 4, 4, d, dtype, capacity=2100)
    whole = check_rope_attention(c)
    for m, alone in each_alone(c, range(len(lengths))):
        assert same_bits(whole[m : m + 1], alone)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize(("d", "heads", "kv_heads"), [(64, 16, 8), (80, 4, 4), (96, 16, 8), (128, 8, 2), (256, 4, 2)])
def test_of_a_long_cache(d: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """Rows of more than 16,384 and 32,768 positions and a short one: alone (without clusters where
    no other size shares the kernel), and the same in a batch. Of 16,384 in 8 KV heads a warp takes as many tiles as it
    has lanes."""
    c = make_projection([32769, 40, 16385, 20000, 16384], heads, kv_heads, d, dtype, capacity=33000)
    whole = check_rope_attention(c)
    for m in range(5):
        row = {name: c[name][m : m + 1] for name in ("qkv", "slots", "positions")}
        assert same_bits(whole[m : m + 1], check_rope_attention(c | row))
    short = {"tables": c["tables"][:, : -(-300 // PAGE)]}
    row = {name: c[name][1:2] for name in ("qkv", "slots", "positions")}
    assert same_bits(whole[1:2], check_rope_attention(c | short | row))


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize(
    ("d", "heads", "kv_heads"),
    [pytest.param(64, 4, 2, marks=pytest.mark.sanitize), (64, 32, 8), (128, 4, 1), (128, 32, 8)],
)
@pytest.mark.parametrize("length", [70, 16384, 16385, 32769])
def test_of_a_long_cache_behind_a_linear(length: int, d: int, heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """One row behind linears beside which a block fits, so that it begins before they end; and by parts."""
    weight = ops.pack_linear([quantized(8192, 4096, 4, -1, "zero", BF16)[0]], DEVICE)
    c = make_projection([length], heads, kv_heads, d, dtype, capacity=33000)
    x, qkv, result = activations(1, 4096, BF16), c["qkv"].clone(), torch.empty(1, 8192, dtype=BF16, device=DEVICE)
    ops.linear(x, weight, out=result)  # the first call loads the kernel
    for window in (0, 3000):
        want = check_rope_attention(c, window=window)
        with cuda.programmatic_launch(True), ops.capture(DEVICE) as program:
            ops.linear(x, weight, out=result)
            got = cuda.rope_attention(**(c | {"qkv": qkv}), window=window)
            ops.linear(x, weight, out=result)
        for _ in range(5):
            qkv.copy_(c["qkv"])
            program.replay()
            assert same_bits(got, want)


@pytest.mark.parametrize(("bits", "hidden"), [(4, 2048), (8, 2048), (8, 14336)])
@pytest.mark.parametrize(  # the last with so few weights that racecheck comes to its end beside long rows of x, too
    ("d", "heads", "kv_heads"), [(64, 32, 8), (96, 32, 32), (128, 32, 8), (128, 2, 1)]
)
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.sanitize), 2, 4, 8, 16, 40])
def test_linears_that_start_before_its_wait(
    rows: int, d: int, heads: int, kv_heads: int, bits: int, hidden: int
) -> None:
    """Of one row, and of few, what comes behind it may start first; it reads what this layer and this replay stored.
    Beside long rows of x in int8 there is less room."""
    columns = (heads + 2 * kv_heads) * d
    first, last = (
        ops.pack_linear([quantized(n, k, bits, -1, "zero", BF16)[0]], DEVICE)
        for n, k in ((columns, hidden), (hidden, heads * d))
    )
    c = make_projection([470 - 9 * i for i in range(rows)], heads, kv_heads, d, capacity=512)

    def layers(x: Tensor, together: bool = True) -> Tensor:
        for _ in range(3):
            projected = c | {"qkv": ops.linear(x, first).unflatten(1, (-1, d))}
            attended = cuda.rope_attention(**projected) if together else by_parts(projected)
            x = ops.linear(attended.flatten(1), last)
        return x

    inputs = [activations(rows, hidden, BF16), activations(rows, hidden, BF16).flip(1).contiguous()]
    want = [layers(x, together=False) for x in inputs]
    assert all(torch.equal(layers(x), result) for x, result in zip(inputs, want, strict=True))
    assert all(x.isfinite().all() for x in want)
    assert not torch.equal(*want)
    x = torch.empty_like(inputs[0])
    with cuda.programmatic_launch(True), ops.capture(DEVICE) as program:
        got = layers(x)
    for i in range(20):
        x.copy_(inputs[i % 2])
        program.replay()
        assert torch.equal(got, want[i % 2])


@pytest.mark.parametrize("window", [0, 100, 3000])
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize(
    ("d", "heads", "kv_heads"),
    [
        *(
            (d, *heads)
            for d in (64, 80, 96, 128)
            for heads in ((2, 2), (8, 2), (7, 1), (8, 1), (12, 1), (16, 4), (8, 8))
        ),
        (256, 4, 2),
        (256, 7, 1),
    ],
)
def test_is_the_ops_it_fuses(heads: int, kv_heads: int, d: int, window: int, dtype: torch.dtype) -> None:
    """Rows of every length, each as it is alone; one head a KV head up to more than the tile has columns."""
    c = make_projection(LENGTHS, heads, kv_heads, d, dtype)
    whole = check_rope_attention(c, window=window)
    for m, alone in each_alone(c, range(len(LENGTHS)), window=window):
        assert same_bits(whole[m : m + 1], alone)


@pytest.mark.parametrize("window", [0, 45, 450])
@pytest.mark.parametrize("d", [64, *FILLED, 128])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "few"), [(17, 17, 4), (32, 32, 2), (64, 32, 2), (200, 20, 2), (45, 45, 2), (32, 8, 8)]
)
def test_of_a_short_row_of_many_kv_heads(heads: int, kv_heads: int, few: int, d: int, window: int) -> None:
    """Its parts are dealt to a few blocks, each as it is in a batch and what it writes as by parts; those of a few rows
    to the teams of a block; one of the rows may be idle."""
    lengths = [1, 16, 63, 64, 65, 128, 129, 192, 193, 257, 320, 383, 447, 448, 511, 512]
    c = make_projection(lengths, heads, kv_heads, d, capacity=512)
    whole = check_rope_attention(c, window=window)
    for m in range(len(lengths)):
        row = {name: c[name][m : m + 1] for name in ("qkv", "slots", "positions")}
        fused, apart = (run_rope_attention(c | row, together, window=window) for together in (True, False))
        assert all(same_bits(a, b) for a, b in zip(fused, apart, strict=True))
        assert same_bits(whole[m : m + 1], fused[0])
    for m in range(0, len(lengths) - few + 1, 3):
        rows = {name: c[name][m : m + few].clone() for name in ("qkv", "slots", "positions")}
        if m % 2:
            rows["slots"][m % few] = -1
        fused, apart = (run_rope_attention(c | rows, together, window=window) for together in (True, False))
        assert all(same_bits(a, b) for a, b in zip(fused, apart, strict=True))
        live = rows["slots"] >= 0
        assert same_bits(whole[m : m + few][live], fused[0][live])


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("d", [64, *FILLED, 128])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows"),
    [
        pytest.param(16, 8, 5, marks=pytest.mark.sanitize),  # the fewest rows of 8 KV heads whose blocks have teams
        (32, 8, 16),  # the most, with 132 multiprocessors
        (48, 8, 9),  # six and eight heads find room for teams where these are of 64 or of int8, or not at all
        (64, 8, 12),
        (96, 8, 6),  # two groups of heads
        (16, 16, 8),
        (11, 11, 12),
    ],
)
def test_of_some_short_rows(heads: int, kv_heads: int, rows: int, d: int, dtype: torch.dtype) -> None:
    """A block has four teams, each with a part at a time; of rows with fewer parts some have none. Each row as it is
    alone, and some are idle."""
    lengths = [1, 64, 65, 300, 512, 16, 63, 128, 129, 449, 192, 257, 448, 20, 385, 511][:rows]
    c = make_projection(lengths, heads, kv_heads, d, dtype, capacity=512)
    for window in (0, 45, 300):
        whole = check_rope_attention(c, window=window)
        for m, alone in each_alone(c, range(rows), window=window):
            assert same_bits(whole[m : m + 1], alone)
        some = c | {"slots": c["slots"].clone()}
        some["slots"][1::3] = -1
        live = some["slots"] >= 0
        assert same_bits(whole[live], check_rope_attention(some, window=window)[live])


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("d", [*FILLED, 128])
@pytest.mark.parametrize("rows", [104, 140])
def test_of_very_many_short_rows(rows: int, d: int, dtype: torch.dtype) -> None:
    """A warp takes all positions of a KV head of a row, in bf16 of more rows with fewer tiles; some rows are idle."""
    c = make_projection([i * 7 % 300 + 1 for i in range(rows)], 8, 8, d, dtype, capacity=320)
    c["slots"][5::30] = -1
    check_rope_attention(c)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("d", [80, 128])
@pytest.mark.parametrize(
    ("heads", "more", "capacity"),  # what takes a row's head of a bf16 / an int8 cache, with 132 multiprocessors
    [
        (8, 60, 512),  # a warp with 16 KB of tiles / a block
        (8, 96, 512),  # a warp with 16 KB / with 8
        (24, 12, 512),  # a block, two a multiprocessor
        (24, 60, 512),  # a warp with 16 KB / with 8, of an odd number of heads
        (32, 60, 512),  # a warp with 16 KB / with 8
        (32, 96, 512),  # a warp with 8 KB
        (48, 60, 512),  # a block: six heads leave no room for enough warps
        (64, 96, 512),  # a block with eight heads
        (32, 60, 576),  # a block: rows may be longer
    ],
)
def test_of_very_many_rows(heads: int, more: int, capacity: int, d: int, dtype: torch.dtype) -> None:
    """Rows of every length, each as it is alone."""
    lengths = [length for length in LENGTHS if length <= capacity] + [i * 37 % capacity + 1 for i in range(more)]
    c = make_projection(lengths, heads, 8, d, dtype, capacity)
    for window in (0, 45, 300):
        whole = check_rope_attention(c, window=window)
        for m, alone in each_alone(c, (*range(12), *range(40, len(lengths), 32)), window=window):
            assert same_bits(whole[m : m + 1], alone)


@pytest.mark.parametrize(("heads", "kv_heads"), [pytest.param(8, 2, marks=pytest.mark.sanitize), (20, 5)])
@pytest.mark.parametrize("dtype", CACHES)
def test_what_long_rows_have_is_shared_out_at_each_replay(dtype: torch.dtype, heads: int, kv_heads: int) -> None:
    """Of many rows some are long, then others, then none: each time as it is by parts. At most one row's head a
    multiprocessor, and three."""
    c = make_projection([*LENGTHS, *[9000 - 111 * i for i in range(44)]], heads, kv_heads, 128, dtype, capacity=9000)
    x = c["qkv"].clone()
    places = {name: c[name].clone() for name in ("positions", "slots")}
    cuda.rope_attention(**(c | {"qkv": x.clone()} | places))  # the first call loads the kernel
    torch.cuda.synchronize()
    with cuda.programmatic_launch(True), ops.capture(DEVICE) as program:
        got = cuda.rope_attention(**(c | {"qkv": x} | places))
    for most in (9000, 3000, 64, 5000):
        places["positions"].copy_(c["positions"].clamp(max=most - 1))
        want = run_rope_attention(c | places, False)[0]
        for _ in range(5):
            x.copy_(c["qkv"])
            program.replay()
            assert same_bits(got, want)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "capacity"),
    [([1, 77, 1000], 16, 8, 1000), ([1, 77, 400], 16, 16, 400), ([300], 32, 32, 400)],
)
def test_with_norms(
    lengths: list[int], heads: int, kv_heads: int, capacity: int, d: int, plus_one: bool, dtype: torch.dtype
) -> None:
    c = make_projection(lengths, heads, kv_heads, d, dtype, capacity)
    norms = {"q_norm": torch.rand(d, device=DEVICE) + 0.5, "k_norm": torch.rand(d, device=DEVICE)}
    check_rope_attention(c, **norms, eps=1e-5, plus_one=plus_one)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize(("d", "together"), [(64, False), (96, False), (128, True), (256, True)])
def test_with_a_soft_cap(d: int, together: bool, dtype: torch.dtype) -> None:
    """Of large and of small scores, a row alone and several, with a window and without."""
    c = make_projection([1, 16, 77, 300, 999, 1000], 4, 2, d, dtype, capacity=1000)
    for window, softcap, scale in ((0, 50.0, 1.0), (100, 0.5, 0.01)):
        cap = {"window": window, "softcap": softcap}
        whole = check_rope_attention(c | {"scale": scale}, together, **cap)
        row = {name: c[name][3:4] for name in ("qkv", "slots", "positions")}
        assert same_bits(whole[3:4], check_rope_attention(c | row | {"scale": scale}, together, **cap))


@pytest.mark.parametrize("d", [96, 128])
def test_leaves_idle_rows_and_full_slots_alone(d: int) -> None:
    c = make_projection([30, 500, 704, 200], 8, 2, d, capacity=704)
    c["slots"][1] = -1
    c["cos"], c["sin"] = (torch.cat([t, t]) for t in (c["cos"], c["sin"]))
    c["k_cache"], c["v_cache"] = (c[name].nan_to_num(1.0) for name in ("k_cache", "v_cache"))
    c["positions"][2] = 704  # beyond the cache: not written, the row sees what is there
    check_rope_attention(c)
    c["tables"][c["slots"][3], 199 // PAGE] = -1  # not written; what the row sees is undefined
    fused, apart = run_rope_attention(c, True), run_rope_attention(c, False)
    assert same_bits(fused[0][:3], apart[0][:3])
    for got, want in zip(fused[1:], apart[1:], strict=True):
        assert same_bits(got, want)


@pytest.mark.parametrize("d", [96, 128])
def test_leaves_an_idle_row_and_a_full_slot_of_many_kv_heads_alone(d: int) -> None:
    c = make_projection([500], 32, 32, d, capacity=512)
    c["cos"], c["sin"] = (torch.cat([t, t]) for t in (c["cos"], c["sin"]))
    c["k_cache"], c["v_cache"] = (c[name].nan_to_num(1.0) for name in ("k_cache", "v_cache"))
    for change in ({"positions": c["positions"] + 13}, {"slots": torch.full_like(c["slots"], -1)}):
        fused, apart = (run_rope_attention(c | change, together) for together in (True, False))
        assert all(same_bits(a, b) for a, b in zip(fused, apart, strict=True))
        assert all(same_bits(a, c[name]) for a, name in zip(fused[1:], ("k_cache", "v_cache"), strict=True))


@pytest.mark.parametrize(("d", "dtype"), [(192, BF16), (72, BF16), (64, FP32), (256, FP32), (96, FP32), (192, INT8)])
def test_without_a_fused_kernel(d: int, dtype: torch.dtype) -> None:
    c = make_projection([1, 100], 4, 2, d, dtype, capacity=200)
    check_rope_attention(c, together=False)
    check_rope_attention(c, together=False, interleaved=True)
    half = {name: c[name][:, : d // 4].contiguous() for name in ("cos", "sin")}
    check_rope_attention(c | half, together=False)
    two = torch.stack((c["positions"], c["positions"] // 2))
    _, *got = run_rope_attention(c | half, False, places=two)
    x, k_cache, v_cache = (copied(c[name]) for name in ("qkv", "k_cache", "v_cache"))
    for heads in (x[:, :4], x[:, 4:6]):
        ops.rope(heads, two, half["cos"], half["sin"])
    ops.kv_append(x[:, 4:6], x[:, 6:], k_cache, v_cache, c["slots"], c["positions"], c["tables"])
    assert same_bits(got[0], k_cache)
    assert same_bits(got[1], v_cache)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("d", FILLED)
def test_what_filled_kernels_lack(d: int, dtype: torch.dtype) -> None:
    """Norms, which no other size refuses, and what all of them refuse."""
    c = make_projection([1, 100], 4, 2, d, dtype, capacity=200)
    gain = torch.rand(d, device=DEVICE) + 0.5
    for norms in ({"q_norm": gain, "k_norm": gain}, {"q_norm": gain}, {"k_norm": gain}):
        check_rope_attention(c, together=False, **norms)
    check_rope_attention(c, together=False, interleaved=True)
    half = {name: c[name][:, : d // 4].contiguous() for name in ("cos", "sin")}
    check_rope_attention(c | half, together=False)


@pytest.mark.parametrize("window", [0, 45, 777])
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("d", [64, 80, 96, 128, 256])
def test_pages_may_be_anywhere(d: int, window: int, dtype: torch.dtype) -> None:
    """Bit for bit as on pages in order, what is written too."""
    c = make_projection(LENGTHS, 8, 2, d, dtype)
    tables = torch.arange(c["tables"].numel(), dtype=torch.int32, device=DEVICE).view_as(c["tables"])
    pools = {name: moved(c[name], c["tables"], tables) for name in ("k_cache", "v_cache")}
    anywhere, ordered = (run_rope_attention(case, True, window=window) for case in (c, c | pools | {"tables": tables}))
    assert same_bits(anywhere[0], ordered[0])
    for a, b in zip(anywhere[1:], ordered[1:], strict=True):
        assert same_bits(positions_of(a, c["tables"]), positions_of(b, tables))


def test_pages_are_read_at_replay() -> None:
    """Between replays of one program the rows get other pages, with what the old ones had."""
    c = make_projection([64, 1, 300, 2047], 8, 2, 128, capacity=2100)
    cuda.rope_attention(**(c | {"qkv": c["qkv"].clone()}))
    with ops.capture(DEVICE) as program:
        x = c["qkv"].clone()
        got = cuda.rope_attention(**(c | {"qkv": x}))
    before = {name: c[name].clone() for name in ("k_cache", "v_cache", "tables")}
    want = run_rope_attention(c, False)[0]
    for seed in (1, 2, 3):
        tables = table_of(*c["tables"].shape[:1], 2100, DEVICE, seed)
        for name in ("k_cache", "v_cache"):
            c[name].copy_(paged(positions_of(before[name], before["tables"]), tables))
        c["tables"].copy_(tables)
        x.copy_(c["qkv"])
        program.replay()
        assert same_bits(got, want)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("d", [96, 128])
def test_in_a_graph(d: int, dtype: torch.dtype) -> None:
    """Twelve steps of two layers, each step recorded behind the other: as one by one, kernel by kernel."""
    steps = 12
    c = make_projection([100, 1, 60, 2047], 8, 2, d, dtype, capacity=4000)
    inputs = [torch.randn_like(c["qkv"], dtype=FP32).to(BF16) for _ in range(2 * steps)]
    caches = [[copied(c[name]) for name in ("k_cache", "v_cache")] for _ in range(4)]
    positions = c["positions"].clone()

    def at(x: Tensor, where: Tensor, layer: list[Any]) -> dict[str, Any]:
        return c | {"qkv": x, "positions": where, "k_cache": layer[0], "v_cache": layer[1]}

    apart = [by_parts(at(x.clone(), positions + i // 2, caches[i % 2])) for i, x in enumerate(inputs)]
    cuda.rope_attention(**at(inputs[0].clone(), positions, caches[2]))  # the first call loads the kernel
    torch.cuda.synchronize()
    with ops.capture(DEVICE) as program:
        fused = [cuda.rope_attention(**at(x, positions + i // 2, caches[2 + i % 2])) for i, x in enumerate(inputs)]
    for _ in range(20):
        program.replay()
    assert all(same_bits(a, b) for a, b in zip(fused, apart, strict=True))
    for one, other in zip(caches[:2], caches[2:], strict=True):
        assert all(same_bits(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("d", [96, 128])
@pytest.mark.parametrize(
    ("lengths", "heads", "kv_heads", "capacity"),
    [([64, 1, 128, 2047], 8, 2, 2100), ([64, 1, 128], 16, 16, 400), ([126], 32, 32, 400)],
)
def test_sees_positions_that_change_just_before(
    lengths: list[int], heads: int, kv_heads: int, capacity: int, d: int, dtype: torch.dtype
) -> None:
    """The kernel ahead moves the rows on while this one has started and guessed where they are."""
    m, steps = len(lengths), 6
    c, state = make_projection(lengths, heads, kv_heads, d, dtype, capacity), ops.SamplingState.greedy(m, DEVICE)
    logits, positions = torch.randn(m, 128256, device=DEVICE), c["positions"].clone()
    qkv = [torch.randn_like(c["qkv"], dtype=FP32).to(BF16) for _ in range(steps)]
    caches = [[copied(c[name]) for name in ("k_cache", "v_cache")] for _ in range(2)]
    for pool in caches[0] + caches[1]:
        stored(pool)[-1].nan_to_num_(0.5)

    def run(caches: list[Any], together: bool = True) -> list[Tensor]:
        results = []
        for x in qkv:
            ops.sample(logits, state, positions=positions)
            places = {"qkv": x.clone(), "positions": positions, "k_cache": caches[0], "v_cache": caches[1]}
            results.append(cuda.rope_attention(**(c | places)) if together else by_parts(c | places))
        return results

    want = run(caches[0], together=False)
    run([copied(pool) for pool in caches[1]])
    with ops.capture(DEVICE) as program:
        got = run(caches[1])
    for _ in range(3):
        positions.copy_(c["positions"])
        program.replay()
        assert all(same_bits(a, b) for a, b in zip(got, want, strict=True))
    assert all(same_bits(a, b) for a, b in zip(*caches, strict=True))
