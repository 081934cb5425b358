"""Fused CUDA ops against the separate ones, bit for bit, and gate/up in pairs against float64."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.ops import PackedLinear, QuantizedWeight, cuda
from nibblelm.ops.types import ActivationBits, After, Gate, LinearStep, PostNorm, Weight

USABLE, REASON = cuda.available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")]
DEVICE = torch.device("cuda")
KINDS = [(4, -1), (4, 32), (4, 128), (8, -1), (8, 64), (16, torch.bfloat16), (16, torch.float16), (16, torch.float32)]
EPS = 1e-5


def random_weight(n: int, k: int, kind: tuple[int, int | torch.dtype], seed: int) -> Weight:
    generator = torch.Generator().manual_seed(seed)
    bits, detail = kind
    if isinstance(detail, torch.dtype):
        return (torch.randn(n, k, generator=generator) * k**-0.5).to(detail)
    groups = 1 if detail == -1 else -(-k // detail)

    def words(rows: int, columns: int) -> Tensor:
        return torch.randint(-(1 << 31), 1 << 31, (rows, columns), generator=generator).int()

    scale = ((torch.rand(n, groups, generator=generator) + 0.5) * 0.2 * k**-0.5).bfloat16()
    codes, zeros = words(n, -(-k * bits // 32)), words(-(-n * bits // 32), groups)
    return QuantizedWeight(codes, scale, zeros, bits, detail, (n, k))  # type: ignore[arg-type]


def packed(n: int, k: int, kind: tuple[int, int | torch.dtype], pairs: bool, seed: int = 0) -> PackedLinear:
    parts = [random_weight(n // 2, k, kind, seed), random_weight(n // 2, k, kind, seed + 1)]
    return ops.pack_linear(parts, DEVICE, pairs)


def rows(m: int, k: int, seed: int) -> Tensor:
    """Rows of different sizes, some elements far larger than the rest."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator) * torch.logspace(-2, 2, m).unsqueeze(1)
    x[:, 3] *= 50
    return x.bfloat16().to(DEVICE)


def norm_linear_by_parts(
    x: Tensor,
    gain: Tensor | None,
    residual: Tensor | None,
    weight: PackedLinear,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    plus_one: bool = False,
    gate: Gate | None = None,
    post: PostNorm | None = None,
    centred: bool = False,
    gain_bias: Tensor | None = None,
    addend: Tensor | None = None,
    after: After | None = None,
    activation_bits: ActivationBits = 24,
) -> tuple[Tensor, Tensor]:
    if post is not None:
        x = ops.rms_norm(x, *post, None, plus_one)[0]
    if addend is not None:
        x = ops.add(addend, x)
    if gain is None:
        normed = h = ops.add(x, residual)  # type: ignore[arg-type]
    elif centred:
        normed, h = ops.layer_norm(x, gain, gain_bias, EPS, residual)
    else:
        normed, h = ops.rms_norm(x, gain, EPS, residual, plus_one)
    y = ops.linear(normed, weight, bias, activation_bits, dtype=dtype)
    if gate is not None:
        y = ops.swiglu(y, weight.pairs) if gate == "silu" else ops.geglu(y, "tanh", weight.pairs)
    if after is not None:
        y = ops.relu(y) if after == "relu" else ops.gelu(y, "tanh" if after == "gelu_tanh" else "erf")
    return y, h


def chain_by_parts(x: Tensor, residual: Tensor, steps: list[LinearStep]) -> tuple[Tensor, ...]:
    held, results = {"x": x, "residual": residual}, list[Tensor]()
    for i, s in enumerate(steps):
        own, rest, addend = (held.get(name) if name else None for name in (s.x, s.residual, s.addend))
        assert own is not None
        if s.norms:
            how = (s.weight, s.bias, x.dtype, s.plus_one, s.gate, s.post, s.centred, s.gain_bias, addend, s.after)
            held[f"y{i}"], held[f"h{i}"] = norm_linear_by_parts(own, s.gain, rest, *how)
        else:
            held[f"y{i}"] = ops.linear(own, s.weight, s.bias)
        results += [held[f"y{i}"]] if rest is None else [held[f"y{i}"], held[f"h{i}"]]
    return tuple(results)


def _divides(kind: tuple[int, int | torch.dtype], k: int) -> bool:
    return isinstance(kind[1], torch.dtype) or kind[1] == -1 or k % kind[1] == 0


SIZES = [(kind, k) for kind in KINDS for k in (64, 520, 896, 2048, 4096, 5120, 14336) if _divides(kind, k)]


@pytest.mark.parametrize(("kind", "k"), SIZES, ids=str)
@pytest.mark.parametrize("gate", [None, "silu", "tanh"])
def test_norm_linear_has_the_bits_of_its_parts(kind: tuple[int, int | torch.dtype], k: int, gate: Gate | None) -> None:
    weight = packed(160, k, kind, pairs=gate is not None)
    assert weight.pairs == (gate is not None)
    gain = (torch.rand(k, generator=torch.Generator().manual_seed(5)) + 0.5).to(DEVICE)
    bias = None if gate else torch.randn(160, device=DEVICE)
    post = (torch.randn(k, generator=torch.Generator().manual_seed(6)).to(DEVICE), 1e-2)
    for m in (1, 2, 5, 8, 9, 16, 17, 70):
        x, residual = rows(m, k, m), rows(m, k, m + 100)
        for g, added, plus_one, first in (
            (gain, residual, False, None), (gain, None, True, None), (gain, residual, True, post),
            (None, residual, False, post),
        ):  # fmt: skip
            want = norm_linear_by_parts(x, g, added, weight, bias, plus_one=plus_one, gate=gate, post=first)
            got = cuda.norm_linear(x, g, EPS, weight, added, bias, plus_one=plus_one, gate=gate, post=first)
            assert want[0].isfinite().all()
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])
            if first is None:
                assert torch.equal(want[1], x if added is None else (x.float() + added.float()).bfloat16())


@pytest.mark.parametrize(("kind", "k"), SIZES, ids=str)
@pytest.mark.parametrize("after", [None, "gelu_tanh", "gelu_erf", "relu"])
def test_layer_norm_linear_has_the_bits_of_its_parts(
    kind: tuple[int, int | torch.dtype], k: int, after: After | None
) -> None:
    """With and without a bias of the norm, a residual and what is added to x; also an RMSNorm of such a sum."""
    weight, generator = packed(160, k, kind, pairs=False), torch.Generator().manual_seed(5)
    gain, own = ((torch.rand(k, generator=generator) + 0.5).to(DEVICE) for _ in range(2))
    bias = torch.randn(160, generator=generator).to(DEVICE)
    for m in (1, 2, 5, 8, 9, 16, 17, 70):
        x, residual, addend = (rows(m, k, m + i) + i for i in (0, 100, 200))
        for centred, gain_bias, added, more in (
            (True, own, None, None), (True, None, residual, None), (True, own, residual, addend),
            (False, None, residual, addend),
        ):  # fmt: skip
            how = {"centred": centred, "gain_bias": gain_bias, "addend": more, "after": after}
            want = norm_linear_by_parts(x, gain, added, weight, bias, **how)
            got = cuda.norm_linear(x, gain, EPS, weight, added, bias, **how)
            assert want[0].isfinite().all()
            assert torch.equal(got[0], want[0]), f"{m} rows"
            assert torch.equal(got[1], want[1]), f"{m} rows"


def float64_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(1, keepdim=True) + eps).sqrt() * gain.double()


@pytest.mark.parametrize("m", [1, 5, 33])
def test_a_norm_before_the_sum_is_near_float64(m: int) -> None:
    """h, rounded to bf16 twice, and norm(h), as an identity's product shows it, once: 2^-8 of it at most each time, and
    what two roundings and sums in fp32 add to that."""
    k, rounding = 520, 2.0**-8 + 2.0**-15
    weight = ops.pack_linear([torch.eye(k).bfloat16()], DEVICE)
    generator = torch.Generator().manual_seed(m)
    gain, own = ((torch.rand(k, generator=generator) + 0.5).to(DEVICE) for _ in range(2))
    x, residual = rows(m, k, m), rows(m, k, m + 100)
    y, h = cuda.norm_linear(x, gain, EPS, weight, residual, post=(own, 0.5))
    post = float64_norm(x.double(), own, 0.5)
    total = residual.double() + post
    assert ((h.double() - total).abs() <= rounding * (post.abs() + total.abs())).all()
    want = float64_norm(h.double(), gain, EPS)
    assert ((y.double() - want).abs() <= rounding * want.abs()).all()


def chain_steps(
    kind: tuple[int, int | torch.dtype], hidden: int, inner: int, heads: int, norms: str = "first"
) -> list[LinearStep]:
    """What stands between two attentions: o, gate/up, down, q/k/v; RMSNorms before each block, behind it, or both; or
    LayerNorms and GELU, one block after the other or side by side."""
    gains = [(torch.rand(hidden, generator=torch.Generator().manual_seed(i)) + 0.5).to(DEVICE) for i in range(4)]
    bias = torch.randn(heads + 64, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    o, down = LinearStep(packed(hidden, heads, kind, False, 1)), packed(hidden, inner, kind, False, 3)
    qkv = packed(heads + 64, hidden, kind, False, 4)
    if norms in {"layer", "side by side"}:
        up = LinearStep(
            packed(inner, hidden, kind, False, 2), torch.randn(inner, device=DEVICE), gains[0], EPS, centred=True,
            gain_bias=gains[1], after="gelu_erf", x="y0", residual="residual",
        )  # fmt: skip
        last = LinearStep(qkv, bias, gains[2], EPS, centred=True, gain_bias=gains[3], x="y2", residual="h1")
        if norms == "side by side":
            up = replace(up, x="residual", residual=None, after="gelu_tanh")
            last = replace(last, residual="residual", addend="y0")
        return [o, up, LinearStep(down, x="y1"), last]
    gain = [None if norms == "last" else g for g in gains[:2]]
    post = [None if norms == "first" else (g, 0.1) for g in gains[2:]]
    gate: Gate = "tanh" if norms == "both" else "silu"
    gate_up = packed(2 * inner, hidden, kind, True, 2)
    return [
        o,
        LinearStep(gate_up, None, gain[0], EPS, gate, post=post[0], x="y0", residual="residual"),
        LinearStep(down, x="y1"),
        LinearStep(qkv, bias, gain[1], EPS, post=post[1], x="y2", residual="h1"),
    ]


def chain_kernels(x: Tensor, residual: Tensor, steps: list[LinearStep]) -> int:
    with cuda.capture(DEVICE) as program:
        cuda.linear_chain(x, steps, residual=residual)
    return len(program)


# From fewer strips than multiprocessors to several turns, slices of 1, 2, 4 and 8, rows of several rounds a thread.
CHAINS = [
    pytest.param((64, 192, 64), marks=pytest.mark.sanitize),
    (896, 4864, 896),
    (2048, 8192, 2048),
    (4096, 14336, 4096),
    (520, 5120, 512),
    (5120, 1024, 512),  # the norms' rows take several rounds
]


@pytest.mark.parametrize("sizes", CHAINS, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("norms", ["first", "both", "last", "layer", "side by side"])
def test_chain_has_the_bits_of_its_steps(
    kind: tuple[int, int | torch.dtype], sizes: tuple[int, int, int], norms: str
) -> None:
    if not all(_divides(kind, k) for k in sizes):
        kind = (kind[0], -1)
    steps = chain_steps(kind, *sizes, norms)
    for m in (1, 3, 40):
        x, residual = rows(m, sizes[2], m), rows(m, sizes[0], m + 100)
        want = chain_by_parts(x, residual, steps)
        assert all(t.isfinite().all() for t in want)
        for _ in range(10 if m == 1 else 1):
            got = cuda.linear_chain(x, steps, residual=residual)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), f"{m} rows"
        if m == 1:
            assert chain_kernels(x, residual, steps) == 1


def test_a_chain_of_different_formats_is_cut_where_they_change() -> None:
    steps = chain_steps((4, -1), 512, 1024, 512)
    steps[2:] = chain_steps((8, -1), 512, 1024, 512)[2:]
    x, residual = rows(1, 512, 1), rows(1, 512, 2)
    want = chain_by_parts(x, residual, steps)
    got = cuda.linear_chain(x, steps, residual=residual)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert chain_kernels(x, residual, steps) == 2


def test_chains_on_two_streams_do_not_wait_for_each_other() -> None:
    chains = [chain_steps((4, -1), 2048, 8192, 2048) for _ in range(2)]
    x, residual = rows(1, 2048, 1), rows(1, 2048, 2)
    streams = [torch.cuda.Stream() for _ in chains]
    want = cuda.linear_chain(x, chains[0], residual=residual)[-2]
    torch.cuda.synchronize()
    results = []
    for _ in range(200):
        for stream, steps in zip(streams, chains, strict=True):
            with torch.cuda.stream(stream):
                results.append(cuda.linear_chain(x, steps, residual=residual)[-2])
    torch.cuda.synchronize()
    assert all(torch.equal(got, want) for got in results)


def test_strided_rows_and_fp32_logits() -> None:
    weight = packed(320, 896, (8, -1), pairs=False)
    gain, wide = torch.ones(896, device=DEVICE), rows(4, 1024, 1)
    x, residual = wide[:, 64:960], rows(4, 896, 2)
    got = cuda.norm_linear(x, gain, EPS, weight, residual, dtype=torch.float32)
    want = norm_linear_by_parts(x, gain, residual, weight, dtype=torch.float32)
    assert got[0].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_what_has_no_kernel_is_refused() -> None:
    """fp32 rows, rows of a width that is no multiple of 8, a gate with a bias, a gate and its up apart."""
    weight, gain = packed(64, 172, (8, -1), pairs=True), torch.ones(172, device=DEVICE)
    for x in (rows(2, 172, 1).float(), rows(2, 172, 1), rows(40, 172, 1)):
        with pytest.raises(ValueError, match=r"norm_linear: x \(.*172\).*multiple of 8"):
            cuda.norm_linear(x, gain, EPS, weight, gate="silu")
    gain, x = torch.ones(176, device=DEVICE), rows(2, 176, 1)
    for pairs, bias in ((True, torch.zeros(64, device=DEVICE)), (False, None)):
        with pytest.raises(ValueError, match="gates in pairs, no bias"):
            cuda.norm_linear(x, gain, EPS, packed(64, 176, (8, -1), pairs), None, bias, gate="silu")
    with pytest.raises(ValueError, match="no residual"):
        cuda.norm_linear(x, gain, EPS, packed(64, 176, (8, -1), False), post=(gain, EPS))
    with pytest.raises(ValueError, match="an addend and no residual"):
        cuda.norm_linear(x, gain, EPS, packed(64, 176, (8, -1), False), addend=x)
    with pytest.raises(ValueError, match="gain_bias is of a LayerNorm"):
        cuda.norm_linear(x, gain, EPS, packed(64, 176, (8, -1), False), gain_bias=gain)
    with pytest.raises(ValueError, match=r"relu after a gate or of torch\.float32"):
        cuda.norm_linear(x, gain, EPS, packed(64, 176, (8, -1), False), after="relu", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"gain \(172,\)"):
        cuda.norm_linear(x, gain, EPS, packed(64, 176, (8, -1), False), x, post=(gain[:172], EPS))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_are_the_same_gate_and_up(kind: tuple[int, int | torch.dtype], dtype: torch.dtype) -> None:
    apart, together = (packed(176, 256, kind, pairs) for pairs in (False, True))
    assert together.pairs
    for m in (1, 7, 16, 17, 100):
        x = rows(m, 256, m).to(dtype) * 0.1
        want, got = ops.linear(x, apart), ops.linear(x, together)
        order = torch.arange(176).view(2, 11, 8).transpose(0, 1).flatten().to(DEVICE)
        assert torch.equal(got, want[:, order])
        assert torch.equal(ops.swiglu(got, pairs=True), ops.swiglu(want))
        assert torch.equal(ops.geglu(got, "tanh", pairs=True), ops.geglu(want, "tanh"))
        gate, up = want.double().chunk(2, 1)
        truth = torch.nn.functional.silu(gate) * up
        found = ops.swiglu(got, pairs=True).double()
        tolerance = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
        assert float((found - truth).norm() / truth.norm()) <= tolerance


def test_parts_that_do_not_pair_stay_apart() -> None:
    parts = [random_weight(12, 64, (8, -1), 0), random_weight(12, 64, (8, -1), 1)]
    assert not ops.pack_linear(parts, DEVICE, pairs=True).pairs


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("kind", "bits_of_x"),
    [*[(kind, 16) for kind in KINDS], *[(kind, 8) for kind in KINDS if isinstance(kind[1], int)]],
    ids=str,
)
@pytest.mark.parametrize(("m", "k"), [(1, 128), (3, 128), (7, 128), (16, 128), (40, 128), (1, 8320)])
def test_small_fused_case(kind: tuple[int, int | torch.dtype], bits_of_x: ActivationBits, m: int, k: int) -> None:
    """Also rows of which a thread takes so much that a kernel of its own prepares them."""
    weight, gain = packed(48, k, kind, pairs=True), torch.ones(k, device=DEVICE)
    x, residual = rows(m, k, 1), rows(m, k, 2)
    post = (gain * 0.5, EPS)
    cases: list[tuple[Tensor | None, PostNorm | None, Gate]] = [
        (gain, None, "silu"), (gain, post, "tanh"), (None, post, "silu")
    ]  # fmt: skip
    for own, first, gate in cases:
        want = norm_linear_by_parts(x, own, residual, weight, gate=gate, post=first, activation_bits=bits_of_x)
        got = cuda.norm_linear(x, own, EPS, weight, residual, None, bits_of_x, gate=gate, post=first)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
    apart = packed(48, k, kind, pairs=False)
    for addend in (None, x * 0.5):
        layer = {"centred": True, "gain_bias": gain * 0.1, "addend": addend, "after": "gelu_erf"}
        want = norm_linear_by_parts(x, gain, residual, apart, activation_bits=bits_of_x, **layer)
        got = cuda.norm_linear(x, gain, EPS, apart, residual, None, bits_of_x, **layer)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
