"""CUDA softmax, argmax, activations, embedding and the mask kernels against float64, over odd sizes."""

import pytest
import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.ops import cuda, cuda_ops, reference
from nibblelm.ops.types import QuantizedWeight

USABLE, REASON = cuda.available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")]
DEVICE = torch.device("cuda")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-20}  # of a result; of an exponential and a long sum in fp32
COLUMNS = [1, 2, 3, 17, 63, 172, 255, 256, 331, 1024, 1025, 4099, 8192, 8200, 16385, 32000, 70001, 131072, 262144]

FORMS = [("warp", columns) for columns in (37, 64, 173, 176, 331, 336, 999, 1000)]
FORMS += [("block", columns) for columns in (331, 512, 999, 1000, 4096, 9001, 32768)]
FORMS += [("cluster", columns) for columns in (4099, 16384, 40000, 131072)]
FORMS += [("online", columns) for columns in (1, 4099, 8192)]


def normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def check_softmax(x: Tensor, form: str = "automatic") -> None:
    """Against float64. The difference to the maximum is rounded in fp32: a relative error of 2^-24 of its size."""
    tiny = torch.finfo(x.dtype).smallest_normal if x.dtype == FP16 else 1e-30
    want = torch.softmax(x.double(), -1).nan_to_num(0.0)
    distance = (x.max(-1, keepdim=True).values.double() - x.double()).nan_to_num(0.0, 0.0)
    got = cuda_ops.softmax(x, form)
    assert got.dtype == x.dtype
    assert ((got.double() - want).abs() <= (2 * ROUNDING[x.dtype] + 2.0**-23 * distance) * want + tiny).all()
    want = torch.log_softmax(x.double(), -1)
    want = torch.where((x == -torch.inf).all(-1, keepdim=True), -torch.inf, want)
    got = cuda_ops.softmax(x, form, logarithm=True)
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    finite = want != -torch.inf
    assert ((got.double() - want).abs()[finite] <= 2 * ROUNDING[x.dtype] * (want.abs()[finite] + 1)).all()


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("columns", COLUMNS)
def test_softmax(columns: int, dtype: torch.dtype) -> None:
    check_softmax(normal(5 if columns < 50000 else 2, columns, dtype=dtype) * 4)


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize(("form", "columns"), FORMS)
def test_softmax_forms(form: str, columns: int, dtype: torch.dtype) -> None:
    check_softmax(normal(3, columns, dtype=dtype) * 4, form)


@pytest.mark.parametrize(
    ("form", "columns"), [("warp", 331), ("block", 4099), ("cluster", 16385), ("cluster", 128256), ("online", 4099)]
)
def test_softmax_hard_rows(form: str, columns: int) -> None:
    x = normal(8, columns)
    x[0] = -torch.inf
    x[1] = -torch.inf
    x[1, columns // 2] = -5.0
    x[2] = -1e30 - torch.arange(columns, device=DEVICE) * 1e27  # all negative: a maximum from 0 up would be wrong
    x[3] = 1e30
    x[4] = -3e38
    x[5, ::2] = -torch.inf
    x[6] = x[6] - 1e4
    x[7] = x[7] + 1e4
    check_softmax(x, form)
    assert cuda_ops.softmax(x, form)[0].eq(0).all()
    x[7, 1] = torch.nan
    assert cuda_ops.softmax(x, form)[7].isnan().all()


def test_softmax_beyond_clusters_and_empty() -> None:
    check_softmax(normal(2, 300001))
    assert ops.softmax(torch.empty(0, 5, device=DEVICE)).shape == (0, 5)
    check_softmax(normal(70001, 3))
    with pytest.raises(ValueError, match="at most 1024"):
        cuda_ops.softmax(normal(1, 1025), "warp")


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("columns", [1, 3, 63, 4096, 4099, 128256])
def test_argmax(columns: int, dtype: torch.dtype) -> None:
    x = normal(3, columns + 8, dtype=dtype)[:, :columns]
    x[1] = x[1].round()  # many ties
    x[2] = -torch.inf
    assert torch.equal(ops.argmax(x).cpu(), reference.argmax(x.cpu().float()))


def test_argmax_many_rows_ties_and_replays() -> None:
    x = normal(5000, 331).round()
    with ops.capture(DEVICE) as program:
        got = ops.argmax(x)
    for _ in range(20):
        program.replay()
    assert torch.equal(got.cpu(), reference.argmax(x.cpu()))
    zeros = torch.tensor([[-1.0, -0.0, 0.0], [-3e38, -torch.inf, -torch.inf]], device=DEVICE)
    assert ops.argmax(zeros).tolist() == [1, 0]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("columns", [1, 3, 63, 172, 4096, 14336])
def test_activations(columns: int, dtype: torch.dtype) -> None:
    for m in (1, 17):
        x = normal(m, 2 * columns + 8, dtype=dtype)[:, : 2 * columns] * 4
        gate, up = x.double().chunk(2, -1)
        functional, whole = torch.nn.functional, x.double()
        for got, want, size in (
            (ops.swiglu(x), functional.silu(gate) * up, gate * up),
            (ops.geglu(x, "tanh"), functional.gelu(gate, approximate="tanh") * up, gate * up),
            (ops.geglu(x, "erf"), functional.gelu(gate) * up, gate * up),
            (ops.silu(x), functional.silu(whole), whole),
            (ops.gelu(x, "tanh"), functional.gelu(whole, approximate="tanh"), whole),
            (ops.gelu(x, "erf"), functional.gelu(whole), whole),
            (ops.softcap(x, 3.0), 3 * torch.tanh(whole / 3), whole),
        ):  # 1 + tanh and 1 + erf cancel for negative x: the error is relative to x, not to the result
            bound = ROUNDING[dtype] * want.abs() + ROUNDING[FP32] * (size.abs() + 1)
            assert ((got.double() - want).abs() <= bound).all()
    extreme = torch.tensor([[-1e4, 1e4, -100.0, 0.0]], device=DEVICE)
    assert ops.silu(extreme).isfinite().all()
    assert ops.gelu(extreme).isfinite().all()
    assert ops.softcap(extreme, 30.0).tolist()[0][:2] == [-30.0, 30.0]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("at", [0, 3])
def test_gates_in_pairs(at: int, dtype: torch.dtype) -> None:
    """The same as of gates and ups apart, of rows that are aligned and that are not."""
    columns = 176
    for m in (1, 17):
        x = normal(m, 2 * columns + at, dtype=dtype)[:, at:]
        gate, up = x.unflatten(1, (-1, 2, 8)).unbind(2)
        apart = torch.cat([gate.flatten(1), up.flatten(1)], 1)
        assert torch.equal(ops.swiglu(x, pairs=True), ops.swiglu(apart))
        assert torch.equal(ops.geglu(x, "tanh", pairs=True), ops.geglu(apart, "tanh"))
        assert torch.equal(ops.geglu(x, "erf", pairs=True), ops.geglu(apart, "erf"))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("columns", [1, 17, 172, 176, 4099])
def test_relu_and_scale(columns: int, dtype: torch.dtype) -> None:
    """Rounded once, as torch rounds them; rows that are not aligned too."""
    for m, first in ((1, 3), (17, 3), (17, 0)):
        x = normal(m, columns + first, dtype=dtype)[:, first:]
        assert torch.equal(ops.relu(x), x.clamp_min(0))
        assert torch.equal(ops.scale(x, 0.22), x * 0.22)
    assert ops.relu(torch.tensor([[torch.nan, -1.0]], dtype=dtype, device=DEVICE)).isnan().tolist() == [[True, False]]


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("columns", [1, 3, 172, 4096])
def test_add(columns: int, dtype: torch.dtype) -> None:
    """Rounded once, as torch rounds it; rows that are not aligned too."""
    for m in (1, 17):
        x, y = normal(m, columns, dtype=dtype), normal(m, columns + 3, dtype=dtype)[:, 3:]
        assert torch.equal(ops.add(x, y), x + y)
        assert torch.equal(ops.add(x, x), x + x)


@pytest.mark.sanitize
@pytest.mark.parametrize("out", [FP32, BF16])
@pytest.mark.parametrize("table_dtype", [FP32, BF16, FP16])
def test_embedding(table_dtype: torch.dtype, out: torch.dtype) -> None:
    v, h = 331, 172
    ids = torch.tensor([0, 330, 5, 5], dtype=torch.int32, device=DEVICE)
    full = normal(v, h, dtype=table_dtype)
    assert torch.equal(ops.embedding(ids, full, out), full[ids.long()].to(out))
    assert torch.equal(ops.embedding(ids, full, out, 59.86652), (full[ids.long()].float() * 59.86652).to(out))
    g = torch.Generator().manual_seed(0)
    for bits in (4, 8):
        for group, form in ((-1, "zero"), (4, "zero"), (-1, "symmetric"), (43, "minimum")):
            per, groups = 32 // bits, 1 if group == -1 else h // group

            def words(*shape: int) -> Tensor:
                return torch.randint(-(2**31), 2**31, shape, generator=g).int()

            zero = words(-(-v // per), groups) if form == "zero" else None
            minimum = torch.randn(v, groups, generator=g).to(table_dtype) if form == "minimum" else None
            scale = torch.rand(v, groups, generator=g).to(table_dtype)
            table = QuantizedWeight(words(v, -(-h // per)), scale, zero, bits, group, (v, h), minimum)  # type: ignore[arg-type]
            want = reference.embedding(ids.cpu(), table)
            parts = [None if t is None else t.to(DEVICE) for t in (table.codes, scale, zero, minimum)]
            moved = QuantizedWeight(parts[0], parts[1], parts[2], bits, group, (v, h), parts[3])  # type: ignore[arg-type]
            got = ops.embedding(ids, moved, out).cpu().double()
            assert ((got - want).abs() <= ROUNDING[out] * (want.abs() + 1)).all()
    outside = torch.tensor([-1, v], dtype=torch.int32, device=DEVICE)
    assert ops.embedding(outside, full, out).isnan().all()


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (3, 17), (63, 331), (5, 4099), (64, 128)])
def test_mask_kernels(queries: int, keys: int, dtype: torch.dtype) -> None:
    scores = normal(2, 3, queries, keys, dtype=dtype)
    mask = torch.rand(2, queries, keys, device=DEVICE).to(dtype)
    mask[:, :, ::2] = 1.0
    want = reference.attention_mask(scores.clone(), mask, -1e4)
    assert torch.equal(ops.attention_mask(scores.clone(), mask, -1e4), want)
    slopes = torch.tensor([0.5, 0.25, 2.0**-8], device=DEVICE)
    want = reference.alibi_mask(scores.clone(), slopes, -1e4)
    assert torch.equal(ops.alibi_mask(scores.clone(), slopes, -1e4), want)
