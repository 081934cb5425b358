"""CPU linear against float64: error bounds of each activation width, and bit-equality over M, threads and ISAs."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nibblelm import _cpu, ops
from nibblelm.ops import ActivationBits, PackedLinear, QuantizedWeight, reference
from nibblelm.ops.cpu_linear import linear_activation

CPU = torch.device("cpu")
LIMITS: dict[ActivationBits, int] = {8: 127, 16: 127 * 257, 24: 127 * 65793}
SHAPES = [(331, 172, -1), (331, 208, 32), (64, 64, 32), (130, 384, 128), (17, 300, 64), (1, 8, -1), (65, 63, -1)]
FORMS = ["zero_point", "symmetric", "minimum"]


def worst_error(x: Tensor, dense: Tensor, bits: ActivationBits, group: int) -> Tensor:
    """What rounding x to fixed point can do to each output: half a step, times the weights' magnitudes.

    Beside it, an allowance for rounding in fp32: of the step, the reciprocal and the value itself (2^-22 of the
    largest in the group in all), and of the sums over digits and groups (2^-21 of the sum of magnitudes).
    """
    k = x.shape[1]
    width = 128 if group == -1 or group >= k else group
    padded = torch.nn.functional.pad(x.double().abs(), (0, -k % width)).view(len(x), -1, width)
    largest = padded.amax(-1, keepdim=True)
    held = largest  # by the digits of most values
    if bits == 8:  # two blocks of eight may have 16 bits, so that the others set the steps
        blocks = padded.view(*padded.shape[:2], -1, 8).amax(-1).sort(-1, descending=True).values
        rest = blocks[..., 2:3] if blocks.shape[-1] > 2 else torch.zeros_like(largest)
        gain = 1.75 if width >= 128 else 2.0
        held = torch.where(largest > gain * rest, rest.maximum(largest / 257), largest)
    step = (held * 0.5 / LIMITS[bits] + largest * 2.0**-22).expand_as(padded).reshape(len(x), -1)[:, :k]
    return (step + x.double().abs() * 2.0**-21) @ dense.abs().T


def exact(x: Tensor, weight: QuantizedWeight | Tensor) -> tuple[Tensor, Tensor]:
    dense = reference.dequantize(weight).double()
    return x.double() @ dense.T, dense


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_error_is_within_half_a_step_of_the_activations(
    isa: str, make_weight: Callable[..., QuantizedWeight], n: int, k: int, group: int, bits: int
) -> None:
    scales = itertools.cycle([torch.bfloat16, torch.float16, torch.float32])
    for form, scale, m in zip(FORMS, scales, (1, 7, 13), strict=False):
        weight = make_weight(n, k, bits, group, form, scale, seed=n + k)
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)) * torch.logspace(-3, 3, m).unsqueeze(1)
        x[1::2, 5::90] *= 50  # in every second row some values stand out
        bias = torch.randn(n)
        packed = ops.pack_linear([weight], CPU)
        want, dense = exact(x, weight)
        for activation_bits in (8, 16, 24):
            got = ops.linear(x, packed, bias, activation_bits)
            bound = worst_error(x, dense, activation_bits, group) + 2.0**-22 * bias.abs()
            assert ((got - bias.double() - want).abs() <= bound).all(), (form, m, activation_bits)


@pytest.mark.parametrize("group", [-1, 32, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_published_accuracy_on_gaussian_rows(
    make_weight: Callable[..., QuantizedWeight], bits: int, group: int
) -> None:
    """Relative L2: 8 bits 0.7 %, 16 bits 2.7e-5 (the largest of 128 is about 2.7 sigma; a step's rounding error is
    step / sqrt(12)); 24 bits no worse than an fp32 matrix product by more than 1e-7."""
    weight = make_weight(512, 2048, bits, group)
    x = torch.randn(16, 2048, generator=torch.Generator().manual_seed(1))
    packed = ops.pack_linear([weight], CPU)
    want, dense = exact(x, weight)
    errors = {b: relative(ops.linear(x, packed, None, b), want) for b in (8, 16, 24)}
    assert errors[8] < 0.007
    assert errors[16] < 2.7e-5
    assert errors[24] < relative(x @ dense.float().T, want) + 1e-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(331, 172), (64, 64), (1, 3), (200, 1000), (63, 1)])
def test_full_weights(isa: str, dtype: torch.dtype, n: int, k: int) -> None:
    g = torch.Generator().manual_seed(k)
    weight, x, bias = torch.randn(n, k, generator=g).to(dtype), torch.randn(13, k, generator=g), torch.randn(n)
    got = ops.linear(x, ops.pack_linear([weight], CPU), bias)
    want, dense = exact(x, weight)
    # A chain of at most 256 fused steps, each off by 2^-24 of the sum so far, then the blocks.
    bound = (min(k, 256) + 8) * 2.0**-24 * (x.double().abs() @ dense.abs().T + bias.abs())
    assert ((got - bias.double() - want).abs() <= bound).all()
    assert relative(got - bias, want) < 2 * relative(x @ dense.float().T + bias - bias, want) + 1e-7


def packed_weights(make_weight: Callable[..., QuantizedWeight]) -> list[tuple[PackedLinear, ActivationBits]]:
    weights = [make_weight(331, 400, bits, group) for bits in (4, 8) for group in (-1, 32, 128)]
    packed = [ops.pack_linear([w], CPU) for w in weights]
    full = [ops.pack_linear([torch.randn(331, 400).to(d)], CPU) for d in (torch.float32, torch.bfloat16)]
    widths: tuple[ActivationBits, ...] = (8, 16, 24)
    found: list[tuple[PackedLinear, ActivationBits]] = [(w, b) for w in packed for b in widths]
    return found + [(w, 24) for w in full]


def test_a_row_does_not_depend_on_its_batch_or_on_the_threads(
    isa: str, make_weight: Callable[..., QuantizedWeight]
) -> None:
    x = torch.randn(70, 400)
    x[::3, 100:230:50] = 40.0  # groups with second digits, in some rows
    for weight, bits in packed_weights(make_weight):
        together = ops.linear(x, weight, None, bits)
        for m in (1, 2, 3, 7, 64):
            assert torch.equal(ops.linear(x[:m], weight, None, bits), together[:m])
        assert torch.equal(ops.linear(x[69:], weight, None, bits), together[69:])
        _cpu.set_threads(1)
        alone = ops.linear(x, weight, None, bits)
        _cpu.set_threads(3)
        shared = ops.linear(x, weight, None, bits)
        _cpu.set_threads(0)
        assert torch.equal(alone, together)
        assert torch.equal(shared, together)


def test_prefill_of_512_tokens_equals_decode(make_weight: Callable[..., QuantizedWeight]) -> None:
    weight = ops.pack_linear([make_weight(200, 1300, 4, -1)], CPU)
    x = torch.randn(515, 1300)
    together = ops.linear(x, weight, None, 8)
    assert all(torch.equal(ops.linear(x[m : m + 1], weight, None, 8)[0], together[m]) for m in (0, 5, 511, 514))


def test_instruction_sets_agree_bit_for_bit(
    each_isa: Callable[[Callable[[], Tensor]], list[Tensor]], make_weight: Callable[..., QuantizedWeight]
) -> None:
    x = torch.randn(20, 400)
    x[::2, 100:230:50] = 40.0  # groups with second digits, in some rows
    for weight, bits in packed_weights(make_weight):
        results = each_isa(lambda w=weight, b=bits: ops.linear(x, w, None, b))
        assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize(
    ("form", "gated"), [("silu", True), ("tanh", True), ("erf", True), ("tanh", False), ("relu", False)]
)
@pytest.mark.parametrize("bits", [4, 8])
def test_an_activation_behind_a_linear_is_that_of_its_result(
    isa: str, make_weight: Callable[..., QuantizedWeight], bits: int, form: Any, gated: bool
) -> None:
    for group, m, activation_bits in itertools.product((-1, 32), (1, 5, 40), (8, 16)):
        n = 256 if gated else 91
        weight = ops.pack_linear([make_weight(n, 136, bits, group, "zero_point", torch.bfloat16, seed=m)], CPU)
        x, bias = torch.randn(m, 136), torch.randn(n)
        y = ops.linear(x, weight, bias, activation_bits)
        if gated:
            want = ops.swiglu(y) if form == "silu" else ops.geglu(y, form)
        else:
            want = ops.relu(y) if form == "relu" else ops.gelu(y, form)
        got = linear_activation(x, weight, bias, activation_bits, torch.float32, form, gated)
        assert torch.equal(got, want), (group, m, activation_bits)


def test_gates_that_are_no_whole_panels_are_refused(make_weight: Callable[..., QuantizedWeight]) -> None:
    weight = ops.pack_linear([make_weight(192, 64, 4, -1, "zero_point", torch.bfloat16)], CPU)
    with pytest.raises(ValueError, match="192 rows, gated"):
        linear_activation(torch.randn(2, 64), weight, None, 8, torch.float32, "silu", True)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 3, 20])  # each has inner loops of its own
def test_extreme_codes_do_not_saturate(isa: str, bits: int, rows: int) -> None:
    """The largest codes against activations of one sign and the largest digits: sums in 16 bits are at their limit."""
    codes = torch.full((64, 8 * bits), -1, dtype=torch.int32)
    zeros, largest = torch.zeros(2 * bits, 1, dtype=torch.int32), 2**bits - 1
    weight = QuantizedWeight(codes, torch.ones(64, 1), zeros, bits, -1, (64, 256))
    packed = ops.pack_linear([weight], CPU)
    for x in (torch.full((rows, 256), 127.0), torch.full((rows, 256), -127.0)):
        assert torch.equal(ops.linear(x, packed, None, 8), (x.sum(1, keepdim=True) * largest).expand(rows, 64))
    x = torch.full((rows, 256), 127 * 256.0 - 128)  # digits 127 and -128, at the scale that the largest sets
    x[:, ::128] = 127 * 257.0
    want = x.double().sum(1, keepdim=True) * largest
    assert ((ops.linear(x, packed, None, 16) - want).abs() <= want * 2.0**-21).all()


def test_long_rows_do_not_overflow(make_weight: Callable[..., QuantizedWeight]) -> None:
    weight = make_weight(64, 70000, 8, -1)
    x = torch.ones(1, 70000)
    want, dense = exact(x, weight)
    assert ((ops.linear(x, ops.pack_linear([weight], CPU)) - want).abs() <= worst_error(x, dense, 24, -1)).all()


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_parts_are_stacked_at_any_row(make_weight: Callable[..., QuantizedWeight], bits: int) -> None:
    sizes = (3, 70, 64, 17)
    parts: list[ops.Weight] = [
        torch.randn(n, 96).bfloat16() if bits == 16 else make_weight(n, 96, bits, 32, seed=n) for n in sizes
    ]
    x = torch.randn(5, 96)
    together = ops.linear(x, ops.pack_linear(parts, CPU))
    apart = [ops.linear(x, ops.pack_linear([part], CPU)) for part in parts]
    assert torch.equal(together, torch.cat(apart, 1))


def test_strided_input_and_output(make_weight: Callable[..., QuantizedWeight]) -> None:
    packed = ops.pack_linear([make_weight(100, 96, 4, 32)], CPU)
    wide, out = torch.randn(5, 200), torch.full((5, 300), 7.0)
    got = ops.linear(wide[:, 8:104], packed, None, 24, out[:, 50:150])
    assert torch.equal(got, ops.linear(wide[:, 8:104].contiguous(), packed))
    assert (out[:, :50] == 7).all()
    assert (out[:, 150:] == 7).all()


def test_values_that_are_not_finite_reach_the_output(make_weight: Callable[..., QuantizedWeight]) -> None:
    packed = ops.pack_linear([make_weight(70, 96, 4, -1)], CPU)
    x = torch.zeros(3, 96)
    x[0, 5], x[1, 7] = torch.nan, torch.inf
    got = ops.linear(x, packed, None, 8)
    assert got[:2].isnan().all()
    assert (got[2] == 0).all()


def test_no_rows(make_weight: Callable[..., QuantizedWeight]) -> None:
    assert ops.linear(torch.empty(0, 96), ops.pack_linear([make_weight(70, 96, 4, -1)], CPU)).shape == (0, 70)


def test_broken_contracts_are_refused(make_weight: Callable[..., QuantizedWeight]) -> None:
    weight = make_weight(70, 96, 4, 32)
    packed = ops.pack_linear([weight], CPU)
    for x in (torch.randn(2, 95), torch.randn(96), torch.randn(2, 96).bfloat16(), torch.randn(96, 2).T):
        with pytest.raises(ValueError, match="x must be fp32"):
            ops.linear(x, packed)
    with pytest.raises(ValueError, match="bias"):
        ops.linear(torch.randn(2, 96), packed, torch.randn(71))
    with pytest.raises(ValueError, match="out must be"):
        ops.linear(torch.randn(2, 96), packed, None, 24, torch.empty(3, 70))
    with pytest.raises(ValueError, match="one scheme"):
        ops.pack_linear([weight, make_weight(70, 96, 4, -1)], CPU)
    with pytest.raises(ValueError, match="multiple of 8"):
        ops.pack_linear([make_weight(70, 96, 4, 12)], CPU)
    with pytest.raises(ValueError, match="more than 32768 would overflow"):
        ops.pack_linear([make_weight(1, 65544, 8, 32776)], CPU)
    broken = QuantizedWeight(weight.codes[:, 1:].contiguous(), weight.scale, None, 4, 32, (70, 96))
    with pytest.raises(ValueError, match="codes must be"):
        ops.pack_linear([broken], CPU)
