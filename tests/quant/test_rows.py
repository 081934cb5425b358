"""The quantization kernel: equal to its definition in PyTorch, as accurate as asked, safe on odd rows."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

from nibblelm import _cpu
from nibblelm.errors import ConvertError
from nibblelm.quant.rows import quantize_rows, reference_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# subnormal fp16, and near the smallest normal bf16 / fp32: scales must not become 0
TINY = {torch.float16: 6e-8, torch.bfloat16: 1e-38, torch.float32: 1e-38}


def odd_rows(columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of zeros, constants, one sign, two values, an outlier, tiny and large values, and ordinary ones."""
    torch.manual_seed(columns)
    rows = torch.randn(12, columns) * 0.02
    rows[0], rows[1], rows[2] = 0.0, 0.3, -rows[2].abs()
    rows[3] = torch.where(torch.rand(columns) < 0.5, -0.25, 0.25)
    rows[4, 0] = 7.0
    rows[5] = torch.rand(columns) * TINY[dtype]
    rows[6] *= 3e5
    rows[7] = -rows[6] * 0.5
    rows[8] = rows[8].abs() + 5.0
    rows[9, -1] = torch.finfo(torch.float16).max
    return rows.to(dtype)


@pytest.mark.parametrize("columns", [1, 3, 17, 63, 172, 331, 4099])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_equals_the_definition(columns, dtype):
    weight = odd_rows(columns, dtype)
    schemes = itertools.product((4, 8), (-1, 32), (False, True), ("minmax", "mse"))
    for bits, group, symmetric, method in schemes:
        got = quantize_rows(weight, bits, group, symmetric, method, threads=2)
        expected = reference_rows(weight, bits, group, symmetric, method)
        where = f"{bits} bits, group {group}, symmetric {symmetric}, {method}"
        assert torch.equal(got.scale, expected.scale), where
        assert torch.equal(got.zero, expected.zero), where
        assert torch.equal(got.codes, expected.codes), where
        torch.testing.assert_close(got.squared_error, expected.squared_error, rtol=1e-12, atol=0.0)
        torch.testing.assert_close(got.squared_norm, expected.squared_norm, rtol=1e-12, atol=0.0)


def dequantized(rows, bits: int, columns: int) -> torch.Tensor:
    """fp64 weights of per-row results, with the codes unpacked by the library."""
    codes = unpack_from_int32(rows.codes, bits, torch.Size((rows.codes.shape[0], columns))).double()
    return (codes + 2 ** (bits - 1) - rows.zero.double()) * rows.scale.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
def test_search_never_loses(bits, symmetric, dtype):
    torch.manual_seed(1)
    heavy = torch.distributions.StudentT(2.5).sample((64, 331)) * 0.02
    weight = torch.cat((heavy.to(dtype), odd_rows(331, dtype)))
    errors = {}
    for method in ("minmax", "mse"):
        rows = quantize_rows(weight, bits, -1, symmetric, method, threads=2)
        errors[method] = (weight.double() - dequantized(rows, bits, 331)).square().sum(1)
        # differences are taken in fp32: off by an ulp of the weight, which the row's norm bounds
        slack = 2.0**-23 * rows.squared_norm
        assert bool(((rows.squared_error - errors[method]).abs() <= slack).all())
        assert bool(torch.isfinite(rows.scale.float()).all())
        assert bool((rows.scale > 0).all())
    assert bool((errors["mse"] <= errors["minmax"]).all())


@pytest.mark.parametrize(
    ("sample", "minmax", "mse"),
    [(torch.distributions.Normal(0.0, 1.0), 0.140, 0.109), (torch.distributions.StudentT(5.0), 0.290, 0.188)],
    ids=["gaussian", "student-t5"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_relative_error_per_row_int4(sample, minmax, mse, dtype):
    torch.manual_seed(0)
    weight = sample.sample((256, 4096)).to(dtype)
    found = {}
    for method in ("minmax", "mse"):
        rows = quantize_rows(weight, 4, -1, False, method, threads=2)
        found[method] = float((rows.squared_error.sum() / rows.squared_norm.sum()).sqrt())
    assert found["minmax"] == pytest.approx(minmax, rel=0.03)
    assert found["mse"] <= mse * 1.005


@pytest.mark.parametrize("group", [-1, 32])
def test_search_is_near_the_best_of_all_scales_and_zero_points(group):
    """Every zero-point with 160 scales, brute force in fp64; the search may lose a thousandth."""
    torch.manual_seed(2)
    weight = torch.cat((torch.randn(8, 512), torch.distributions.Gamma(2.0, 1.0).sample((8, 512)) - 1))
    groups = weight.double().view(16, -1, 512 if group == -1 else group)
    span = groups.amax(-1, keepdim=True).clamp(min=0) - groups.amin(-1, keepdim=True).clamp(max=0)
    best = torch.full_like(span, torch.inf)
    for zero, step in itertools.product(range(16), range(160)):
        scale = (span / 15 * 1.2 * 2 ** (-step / 50)).float().double()
        codes = (groups / scale).round().clamp(-zero, 15 - zero)
        best = torch.minimum(best, (groups - codes * scale).square().sum(-1, keepdim=True))
    rows = quantize_rows(weight, 4, group, False, "mse", threads=2)
    assert float(rows.squared_error.sum()) <= 1.001 * float(best.sum())


@pytest.mark.parametrize("dtype", DTYPES)
def test_constant_and_ternary_rows_are_exact(dtype):
    torch.manual_seed(3)
    ternary = torch.randint(-1, 2, (5, 172)) * 0.37
    weight = torch.cat((torch.zeros(1, 172), torch.full((1, 172), 0.37), torch.full((1, 172), -0.37), ternary)).to(
        dtype
    )
    for symmetric in (False, True):
        rows = quantize_rows(weight, 4, -1, symmetric, "mse", threads=1)
        assert torch.equal(dequantized(rows, 4, 172).float(), weight.float())
        assert not bool(rows.squared_error.any())


def test_result_does_not_depend_on_threads():
    torch.manual_seed(4)
    weight = torch.randn(999, 331).bfloat16()
    one = quantize_rows(weight, 4, 32, False, "mse", threads=1)
    for threads in (2, 3, 16):
        many = quantize_rows(weight, 4, 32, False, "mse", threads)
        assert all(torch.equal(getattr(one, field), getattr(many, field)) for field in vars(one))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_not_finite_is_an_error_naming_the_first_row(value, dtype):
    weight = torch.randn(4000, 63).to(dtype)
    weight[2345, 62] = weight[3999, 0] = value
    with pytest.raises(ConvertError, match="row 2345 holds a NaN or an infinity"):
        quantize_rows(weight, 4, -1, False, "mse", threads=2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_result_does_not_depend_on_the_instruction_set(dtype):
    weight = odd_rows(331, dtype)
    chosen = _cpu.isa()
    try:
        for bits, group, symmetric in itertools.product((4, 8), (-1, 32), (False, True)):
            results = []
            for name in _cpu.available_isas():
                _cpu.set_isa(name)
                results.append(quantize_rows(weight, bits, group, symmetric, "mse", threads=1))
            for other in results[1:]:
                assert all(torch.equal(getattr(results[0], field), getattr(other, field)) for field in vars(other))
    finally:
        _cpu.set_isa(chosen)


WITHOUT_THREADS = """
import resource, torch
from nibblelm.quant.rows import quantize_rows
weight = torch.randn(4000, 1024)
want = quantize_rows(weight, 4, 32, True, "minmax", 1)
taken = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (120 << 20),) * 2)
got = quantize_rows(weight, 4, 32, True, "minmax", 200)
print(torch.equal(got.codes, want.codes))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_threads_that_cannot_be_had_are_done_without() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT_THREADS], capture_output=True, text=True, check=False)
    assert result.stdout == "True\n", result
