"""CUDA attention against float64: every kernel, mask and head size, decode and prefill, and rows on their own."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.ops import cuda
from nibblelm.ops.cuda_device import fusion

USABLE, REASON = cuda.available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")]
pytestmark = gpu
DEVICE = torch.device("cuda")
BF16, FP32 = torch.bfloat16, torch.float32
# Of the sum of p |v|: weights and result are each rounded to bf16, 2^-8 at most; in fp32 what counts is the rounding of
# the scores, about 1e-6 times a score of at most 10.
BOUND = {BF16: 2.0**-7, FP32: 2e-5}


def make(
    m: int, heads: int, kv_heads: int, d: int, capacity: int, dtype: torch.dtype, slots: int = 1, seed: int = 0
) -> dict[str, Any]:
    """Inputs with garbage (NaN) at every position that nobody may read."""
    g = torch.Generator(device=DEVICE).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, device=DEVICE).to(dtype)

    return {
        "q": normal(m, heads * d + 16)[:, : heads * d].unflatten(1, (heads, d)),
        "k_cache": normal(slots, kv_heads, capacity, d),
        "v_cache": normal(slots, kv_heads, capacity, d),
        "slots": torch.zeros(m, dtype=torch.int32, device=DEVICE),
        "positions": torch.arange(capacity - m, capacity, dtype=torch.int32, device=DEVICE),
        "scale": d**-0.5,
    }


def oracle(c: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    """Float64 attention with every mask written out as a matrix: the result and the same with |v|."""
    q, k_cache, v_cache = (c[name].double() for name in ("q", "k_cache", "v_cache"))
    m, heads, _ = q.shape
    per_kv, columns = heads // k_cache.shape[1], torch.arange(k_cache.shape[2], device=DEVICE)
    position = c["positions"].long().view(m, 1)
    allowed = columns <= position
    if (prefix := options.get("prefix_lengths")) is not None:
        allowed |= columns < prefix.view(m, 1)
    if window := options.get("window", 0):
        allowed &= columns > position - window
    if (starts := options.get("starts")) is not None:
        allowed &= columns >= starts[c["slots"].long()].view(m, 1)
    out, magnitude = [], []
    for row in range(m):
        k, v = (t[c["slots"][row]].repeat_interleave(per_kv, 0) for t in (k_cache, v_cache))
        seen = allowed[row].clone()
        scores = torch.einsum("hd,hpd->hp", q[row], k.masked_fill(~seen.view(1, -1, 1), 0)) * c["scale"]
        if softcap := options.get("softcap", 0.0):
            scores = softcap * torch.tanh(scores / softcap)
        if (slopes := options.get("alibi_slopes")) is not None:
            scores = scores + slopes.double().view(-1, 1) * (columns - position[row])
        if (mask := options.get("mask")) is not None:
            seen[mask.shape[1] :] = False
            scores = scores + torch.nn.functional.pad(mask[row].double(), (0, columns.numel() - mask.shape[1]))
        p = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).nan_to_num(0.0)
        v = v.masked_fill(~seen.view(1, -1, 1), 0)
        out.append(torch.einsum("hp,hpd->hd", p, v).flatten())
        magnitude.append(torch.einsum("hp,hpd->hd", p, v.abs()).flatten())
    return torch.stack(out), torch.stack(magnitude)


def check(c: dict[str, Any], one_sequence: bool = False, **options: Any) -> Tensor:
    got = ops.attention(**c, **options, one_sequence=one_sequence)
    want, magnitude = oracle(c, **options)
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
# (head_dim, dtype): every tensor-core size, then the plain kernel in each of its four widths and both cache types
HEADS = [(64, BF16), (128, BF16), (256, BF16), (8, BF16), (40, BF16), (80, BF16), (192, BF16)]
HEADS += [(8, FP32), (64, FP32), (128, FP32), (256, FP32)]


@pytest.mark.sanitize
@pytest.mark.parametrize("option", ["plain", "mask"])
@pytest.mark.parametrize(("d", "dtype"), HEADS)
def test_small(d: int, dtype: torch.dtype, option: str) -> None:
    """Each kernel, with and without options, few positions: decode of one split and of three, and prefill."""
    for capacity in (19, 600):
        c = make(2, 4, 2, d, capacity, dtype)
        check(c, **options_of(option, 2, 4, capacity, 1))
    c = make(33, 2, 1, d, 50, dtype)
    check(c, one_sequence=True, **options_of(option, 33, 2, 50, 1))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("d", "dtype"), [(64, BF16), (128, BF16), (256, BF16), (96, BF16), (128, FP32), (8, FP32)])
def test_decode_options(d: int, dtype: torch.dtype, option: str) -> None:
    c = make(5, 8, 2, d, 1500, dtype, slots=3)
    c["slots"] = torch.tensor([2, 0, 1, 1, 0], dtype=torch.int32, device=DEVICE)
    c["positions"] = torch.tensor([0, 255, 256, 777, 1499], dtype=torch.int32, device=DEVICE)
    check(c, **options_of(option, 5, 8, 1500, 3))


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("d", "dtype"), [(64, BF16), (128, BF16), (256, BF16), (96, BF16), (128, FP32), (8, FP32)])
def test_prefill_options(d: int, dtype: torch.dtype, option: str) -> None:
    """A chunk of 331 rows that starts at position 172, with a ragged last tile."""
    c = make(331, 4, 2, d, 503, dtype, slots=2)
    c["slots"].fill_(1)
    check(c, one_sequence=True, **options_of(option, 331, 4, 503, 2))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (71, 1), (12, 2), (32, 8)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_groups_of_heads(heads: int, kv_heads: int, dtype: torch.dtype) -> None:
    """From one head a KV head to 71: more than the columns of one tensor-core tile and than one block."""
    check(make(3, heads, kv_heads, 64, 300, dtype))
    check(make(40, heads, kv_heads, 64, 77, dtype), one_sequence=True)


@pytest.mark.parametrize("capacity", [1, 3, 17, 63, 255, 256, 257, 4099, 33000])
def test_lengths(capacity: int) -> None:
    """The last takes splits of twice the usual span."""
    check(make(1, 4, 1, 128, capacity, BF16))
    check(make(1, 4, 1, 72, capacity, FP32))


def test_unwritten_positions_are_not_read() -> None:
    for dtype in (BF16, FP32):
        for m, one_sequence in ((1, False), (40, True)):
            c = make(m, 4, 2, 128, 700, dtype)
            c["positions"] -= 123
            for name in ("k_cache", "v_cache"):
                c[name][:, :, 700 - 123 :] = torch.nan
            got = ops.attention(**c, one_sequence=one_sequence)
            for name in ("k_cache", "v_cache"):
                c[name] = c[name].nan_to_num(1.0)
            assert torch.equal(got, ops.attention(**c, one_sequence=one_sequence))
            check(c, one_sequence=one_sequence)


def test_rows_that_see_nothing_give_zeros() -> None:
    for dtype in (BF16, FP32):
        for m, one_sequence in ((3, False), (40, True)):
            c = make(m, 4, 2, 64, 600, dtype)
            mask = torch.zeros(m, 600, device=DEVICE)
            mask[1] = -torch.inf
            got = check(c, one_sequence=one_sequence, mask=mask)
            assert got[1].eq(0).all()
            starts = torch.tensor([598], dtype=torch.int32, device=DEVICE)
            got = check(c, one_sequence=one_sequence, starts=starts)
            assert got[0].eq(0).all()
            if not one_sequence:
                c["slots"][2] = -1
                assert ops.attention(**c)[2].eq(0).all()


@pytest.mark.parametrize(("d", "dtype"), [(64, BF16), (128, BF16), (256, BF16), (96, BF16), (128, FP32)])
def test_rows_do_not_depend_on_each_other(d: int, dtype: torch.dtype) -> None:
    """Bit for bit: a decode batch equals its rows alone, a prefill chunk equals the same rows in two chunks."""
    c = make(9, 8, 2, d, 2100, dtype, slots=9)
    c["slots"] = torch.randperm(9, device=DEVICE).int()
    c["positions"] = torch.tensor([0, 5, 100, 255, 256, 900, 1700, 2098, 2099], dtype=torch.int32, device=DEVICE)
    whole = ops.attention(**c)
    for m in range(9):
        row = {name: c[name][m : m + 1] for name in ("q", "slots", "positions")}
        assert torch.equal(whole[m : m + 1], ops.attention(**(c | row)))
    c = make(300, 4, 2, d, 420, dtype)
    whole = ops.attention(**c, one_sequence=True)
    for first, last in ((0, 77), (77, 300)):
        rows = {name: c[name][first:last] for name in ("q", "slots", "positions")}
        assert torch.equal(whole[first:last], ops.attention(**(c | rows), one_sequence=True))


def test_merging_is_associative() -> None:
    """A long row over many splits equals float64 also where the maximum sits in the first, middle or last split."""
    for place in (0, 2000, 4098):
        c = make(1, 4, 1, 128, 4099, BF16)
        c["k_cache"][:, :, place] = c["q"][0, 0] * 4
        check(c)


def test_mixed_dtypes() -> None:
    c = make(3, 4, 2, 64, 300, BF16)
    c["q"] = c["q"].float()
    check(c)


@pytest.mark.parametrize("dtype", [BF16, FP32])
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
    program.replay()
    assert torch.equal(out, ops.attention(**c))
    check(c)


# ---- rope_attention ------------------------------------------------------------------------------------------------

# Around the tiles, the least share of a block, what one cluster takes (2,048) and the length of the cache.
LENGTHS = [1, 16, 17, 63, 64, 65, 255, 256, 257, 511, 513, 2047, 2048, 2049, 3333, 5000]


def make_projection(
    lengths: list[int], heads: int, kv_heads: int, d: int, dtype: torch.dtype = BF16, capacity: int = 5000
) -> dict[str, Any]:
    """One row of each length, in slots out of order; keys and values behind a row's position are NaN."""
    m = len(lengths)
    c = make(m, heads + 2 * kv_heads, kv_heads, d, capacity, dtype, slots=m + 1)
    c["slots"] = torch.tensor([(5 * i + 3) % (m + 1) for i in range(m)], dtype=torch.int32, device=DEVICE)
    if len(set(c["slots"].tolist())) < m:
        c["slots"] = torch.arange(m, dtype=torch.int32, device=DEVICE).flip(0)
    c["positions"] = torch.tensor(lengths, dtype=torch.int32, device=DEVICE) - 1
    for slot, length in zip(c["slots"].tolist(), lengths, strict=True):
        c["k_cache"][slot, :, length - 1 :] = torch.nan
        c["v_cache"][slot, :, length - 1 :] = torch.nan
    angles = torch.arange(capacity, device=DEVICE).double().unsqueeze(1) * 1e4 ** (
        -torch.arange(d // 2, device=DEVICE).double() / (d // 2)
    )
    return {"qkv": c.pop("q"), "cos": angles.cos().float(), "sin": angles.sin().float()} | c


def run_rope_attention(c: dict[str, Any], fused: bool, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The result and the caches, on copies of what is written."""
    copies = {name: c[name].clone() for name in ("qkv", "k_cache", "v_cache")}
    with fusion(fused):
        out = ops.rope_attention(**(c | copies), **options)
    return out, copies["k_cache"], copies["v_cache"]


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))  # NaN too


def check_rope_attention(c: dict[str, Any], **options: Any) -> Tensor:
    """Fused and not: the same bits, caches included; and float64 attention of what rope_append made."""
    fused, apart = run_rope_attention(c, True, **options), run_rope_attention(c, False, **options)
    for got, want in zip(fused, apart, strict=True):
        assert same(got, want)
    window = options.pop("window", 0)
    options.pop("one_sequence", None)
    caches = {name: c[name].clone() for name in ("k_cache", "v_cache")}
    places = [c[name] for name in ("positions", "slots", "cos", "sin")]
    q = ops.rope_append(c["qkv"].clone(), *places, *caches.values(), **options)
    main = c["positions"] if c["positions"].ndim == 1 else c["positions"][0]
    plain = {"q": q, "slots": c["slots"], "positions": main, "scale": c["scale"], **caches}
    assert same(ops.attention(**plain, window=window), fused[0])
    live = c["slots"] >= 0
    rows = {name: plain[name][live] for name in ("q", "slots", "positions")}
    check(plain | rows, window=window)
    assert fused[0][~live].eq(0).all()
    return fused[0]


@pytest.mark.sanitize
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "lengths", "capacity"),
    [(8, 2, [1, 64, 65, 300], 300), (4, 2, [200], 200), (1, 1, [70], 16400)],
    ids=["batch", "one row", "long cache"],
)
def test_rope_attention_small(heads: int, kv_heads: int, d: int, lengths: list[int], capacity: int) -> None:
    """Each kernel."""
    check_rope_attention(make_projection(lengths, heads, kv_heads, d, capacity=capacity))


@pytest.mark.sanitize
def test_rope_attention_of_several_clusters() -> None:
    check_rope_attention(make_projection([2300, 9], 4, 1, 64, capacity=2400))


@pytest.mark.parametrize("d", [64, 128])
def test_rope_attention_of_a_long_cache(d: int) -> None:
    """Where tiles wait in a longer ring: one row, and the same in a batch."""
    c = make_projection([20000, 40, 17000], 8, 2, d, capacity=20000)
    whole = check_rope_attention(c)
    for m in range(3):
        row = {name: c[name][m : m + 1] for name in ("qkv", "slots", "positions")}
        assert same(whole[m : m + 1], check_rope_attention(c | row))
    short = {name: c[name][:, :, :300].contiguous() for name in ("k_cache", "v_cache")}
    row = {name: c[name][1:2] for name in ("qkv", "slots", "positions")}
    assert same(whole[1:2], check_rope_attention(c | short | row))


@pytest.mark.parametrize("window", [0, 100, 3000])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (8, 2), (7, 1), (8, 1), (12, 1), (16, 4), (8, 8)])
def test_rope_attention_is_the_ops_it_fuses(heads: int, kv_heads: int, d: int, window: int) -> None:
    """Rows of every length, each as it is alone; one head a KV head up to more than the tile has columns."""
    c = make_projection(LENGTHS, heads, kv_heads, d)
    whole = check_rope_attention(c, window=window)
    for m in range(len(LENGTHS)):
        row = {name: c[name][m : m + 1] for name in ("qkv", "slots", "positions")}
        assert same(whole[m : m + 1], run_rope_attention(c | row, True, window=window)[0])


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_rope_attention_with_norms(d: int, plus_one: bool) -> None:
    c = make_projection([1, 77, 1000], 16, 8, d, capacity=1000)
    norms = {"q_norm": torch.rand(d, device=DEVICE) + 0.5, "k_norm": torch.rand(d, device=DEVICE)}
    check_rope_attention(c, **norms, eps=1e-5, plus_one=plus_one)


def test_rope_attention_leaves_idle_rows_and_full_slots_alone() -> None:
    c = make_projection([30, 500, 700, 200], 8, 2, 128, capacity=700)
    c["slots"][1] = -1
    c["cos"], c["sin"] = (torch.cat([t, t]) for t in (c["cos"], c["sin"]))
    c["k_cache"], c["v_cache"] = (c[name].nan_to_num(1.0) for name in ("k_cache", "v_cache"))
    c["positions"][2] = 700  # beyond the cache: not written, the row sees what is there
    check_rope_attention(c)


@pytest.mark.parametrize(("d", "dtype"), [(96, BF16), (256, BF16), (64, FP32)])
def test_rope_attention_without_a_fused_kernel(d: int, dtype: torch.dtype) -> None:
    c = make_projection([1, 100], 4, 2, d, dtype, capacity=200)
    check_rope_attention(c)
    check_rope_attention(c, interleaved=True)
    half = {name: c[name][:, : d // 4].contiguous() for name in ("cos", "sin")}
    check_rope_attention(c | half)
    check_rope_attention(c | half | {"positions": torch.stack((c["positions"], c["positions"] // 2))})


def test_rope_attention_of_one_sequence() -> None:
    """Rows that attend to each other's keys."""
    for m in (1, 5, 40):
        c = make_projection([m + 60] * m, 4, 2, 128, capacity=300)
        c["slots"].fill_(2)
        c["positions"] = torch.arange(60, 60 + m, dtype=torch.int32, device=DEVICE)
        c["k_cache"].normal_()
        c["v_cache"].normal_()
        fused, apart = run_rope_attention(c, True, one_sequence=True), run_rope_attention(c, False, one_sequence=True)
        assert all(same(a, b) for a, b in zip(fused, apart, strict=True))


def test_rope_attention_in_a_graph() -> None:
    """Twelve steps of two layers, each step recorded behind the other: as one by one, kernel by kernel."""
    steps = 12
    c = make_projection([100, 1, 60, 2047], 8, 2, 128, capacity=4000)
    inputs = [torch.randn_like(c["qkv"], dtype=FP32).to(BF16) for _ in range(2 * steps)]
    caches = [[c[name].clone() for name in ("k_cache", "v_cache")] for _ in range(4)]
    positions = c["positions"].clone()

    def step(x: Tensor, where: Tensor, layer: list[Tensor]) -> Tensor:
        places = {"positions": where, "k_cache": layer[0], "v_cache": layer[1]}
        return ops.rope_attention(**(c | {"qkv": x} | places))

    apart = [step(x.clone(), positions + i // 2, caches[i % 2]) for i, x in enumerate(inputs)]
    with fusion(True):
        step(inputs[0].clone(), positions, caches[2])  # the first call loads the kernel
        torch.cuda.synchronize()
        with ops.capture(DEVICE) as program:
            fused = [step(x, positions + i // 2, caches[2 + i % 2]) for i, x in enumerate(inputs)]
    for _ in range(20):
        program.replay()
    assert all(same(a, b) for a, b in zip(fused, apart, strict=True))
    for one, other in zip(caches[:2], caches[2:], strict=True):
        assert all(same(a, b) for a, b in zip(one, other, strict=True))


def test_rope_attention_sees_positions_that_change_just_before() -> None:
    """The kernel ahead moves the rows on while this one has started and guessed where they are."""
    c = make_projection([64, 1, 128, 2047], 8, 2, 128, capacity=2100)
    state, steps, m = ops.SamplingState.greedy(4, DEVICE), 6, 4
    logits, positions = torch.randn(m, 128256, device=DEVICE), c["positions"].clone()
    qkv = [torch.randn_like(c["qkv"], dtype=FP32).to(BF16) for _ in range(steps)]
    caches = [[c[name].nan_to_num(0.5) for name in ("k_cache", "v_cache")] for _ in range(2)]

    def run(caches: list[Tensor]) -> list[Tensor]:
        results = []
        for x in qkv:
            ops.sample(logits, state, positions=positions)
            places = {"qkv": x.clone(), "positions": positions, "k_cache": caches[0], "v_cache": caches[1]}
            results.append(ops.rope_attention(**(c | places)))
        return results

    want = run(caches[0])
    with fusion(True):
        run([t.clone() for t in caches[1]])
    with ops.capture(DEVICE) as program:
        got = run(caches[1])
    for _ in range(3):
        positions.copy_(c["positions"])
        program.replay()
        assert all(same(a, b) for a, b in zip(got, want, strict=True))
    assert all(same(a, b) for a, b in zip(*caches, strict=True))


def test_contract_errors() -> None:
    c = make(2, 4, 2, 64, 30, BF16)
    with pytest.raises(ValueError, match="multiple of 8"):
        ops.attention(**make(2, 4, 2, 12, 30, FP32))
    with pytest.raises(ValueError, match="int32"):
        ops.attention(**(c | {"positions": c["positions"].long()}))
    with pytest.raises(ValueError, match="mask"):
        ops.attention(**c, mask=torch.zeros(3, 30, device=DEVICE))
