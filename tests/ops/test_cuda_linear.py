"""CUDA linear against float64 over formats, forms, groups, odd sizes and row counts."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.errors import DeviceError
from nibblelm.ops import cuda
from nibblelm.ops.types import ActivationBits

sys.path.insert(0, str(Path(__file__).parent))
from cuda_weights import (
    DEVICE,
    DIGIT_ERROR,
    FP32_ERROR,
    ONE_DIGIT_ERROR,
    REASON,
    USABLE,
    activations,
    error,
    full,
    quantized,
    run,
    uneven,
)

gpu = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")]
ROWS = (1, 2, 3, 7, 8, 9, 16, 17, 64, 333)

SCHEMES = [
    *[(bits, group, "zero", torch.bfloat16) for bits in (4, 8) for group in (-1, 32, 64, 128)],
    *[(bits, group, "minimum", torch.bfloat16) for bits in (4, 8) for group in (-1, 32, 64, 128)],
    *[(bits, group, "symmetric", torch.float16) for bits in (4, 8) for group in (-1, 128)],
    *[(bits, group, "zero", torch.float32) for bits in (4, 8) for group in (-1, 32)],
    (4, 32, "minimum", torch.float32),
]  # fmt: skip
SIZES = [(331, 172), (17, 208), (63, 4099), (208, 896), (1, 64)]


class TestQuantized:
    pytestmark = gpu

    @pytest.mark.parametrize(("bits", "group", "form", "scale_dtype"), SCHEMES)
    def test_against_float64(self, bits: int, group: int, form: str, scale_dtype: torch.dtype) -> None:
        for n, k in SIZES:
            weight, truth = quantized(n, k, bits, group, form, scale_dtype)
            packed = ops.pack_linear([weight], DEVICE)
            bias = torch.randn(n, generator=torch.Generator().manual_seed(n))
            for m in ROWS if (n, k) == (63, 4099) else (1, 5, 16, 17):
                for dtype in (torch.float32, torch.bfloat16):
                    x = activations(m, k, dtype)
                    product = x.double().cpu() @ truth.T
                    want = product + bias.double()
                    got = ops.linear(x, packed, bias.to(DEVICE), 24, torch.empty(m, n, device=DEVICE))
                    bound = FP32_ERROR if dtype == torch.float32 else DIGIT_ERROR
                    assert error(got, want, product) <= bound, (n, k, m, dtype)

    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize("group", [-1, 128])
    @pytest.mark.parametrize(("n", "k"), [(528, 4096), (100, 14336), (64, 2048), (5000, 8192)])
    def test_rows_are_bit_equal_for_every_m(self, bits: int, group: int, n: int, k: int) -> None:
        weight, truth = quantized(n, k, bits, group, "zero", torch.bfloat16)
        packed = ops.pack_linear([weight], DEVICE)
        for dtype in (torch.bfloat16, torch.float32):
            x = activations(16, k, dtype)
            x[3] *= 100  # scales are per row
            whole = ops.linear(x, packed)
            wide = ops.linear(x, packed, None, 24, torch.empty(16, n, device=DEVICE))
            bound = FP32_ERROR if dtype == torch.float32 else DIGIT_ERROR
            assert error(wide, x.double().cpu() @ truth.T) <= bound
            for m in range(1, 16):
                assert torch.equal(ops.linear(x[:m], packed), whole[:m]), m
                assert torch.equal(ops.linear(x[m : m + 1], packed), whole[m : m + 1]), m

    def test_more_rows_than_shared_memory_holds(self) -> None:
        weight, truth = quantized(16, 65536, 8, -1, "zero", torch.float32)
        packed = ops.pack_linear([weight], DEVICE)
        x = activations(16, 65536, torch.float32)
        whole = ops.linear(x, packed)
        assert error(whole, x.double().cpu() @ truth.T) <= FP32_ERROR
        assert torch.equal(ops.linear(x[:3], packed), whole[:3])

    def test_two_digits_keep_the_accuracy_of_bf16(self) -> None:
        """Rounding fp32 activations to bf16 must cost more than the digits of these bf16 activations do."""
        weight, truth = quantized(256, 4096, 8, -1, "zero", torch.float32)
        exact = torch.randn(4, 4096, generator=torch.Generator().manual_seed(5))
        exact[:, 77::256] *= 300  # a massive activation in every slice
        exact[1] = exact[1].pow(3)
        x = exact.bfloat16()
        want = x.double() @ truth.T
        got = run(weight, x.to(DEVICE)).double().cpu()
        for row in range(4):
            rounding = error(x[row].double() @ truth.T, exact[row].double() @ truth.T)
            assert error(got[row], want[row]) <= rounding, row

    def test_stacked_parts(self) -> None:
        parts = [quantized(n, 172, 4, 32, "zero", torch.float16, n) for n in (7, 33, 1)]
        packed = ops.pack_linear([weight for weight, _ in parts], DEVICE)
        x = activations(3, 172, torch.float32)
        assert error(ops.linear(x, packed), x.double().cpu() @ torch.cat([t for _, t in parts]).T) <= FP32_ERROR

    def test_infinite_and_nan_activations_show(self) -> None:
        packed = ops.pack_linear([quantized(16, 256, 4, -1, "zero", torch.float16)[0]], DEVICE)
        x = activations(3, 256, torch.bfloat16)
        x[0, 5], x[2, 9] = float("inf"), float("nan")
        y = ops.linear(x, packed)
        assert y[0].isnan().all()
        assert y[1].isfinite().all()
        assert y[2].isnan().all()

    def test_zero_and_tiny_activations(self) -> None:
        weight, truth = quantized(16, 256, 8, -1, "zero", torch.float32)
        x = torch.zeros(3, 256, device=DEVICE)
        x[1] = activations(1, 256, torch.float32)[0] * 1e-25
        y = run(weight, x).double().cpu()
        assert (y[0] == 0).all()
        assert error(y[1], x[1].double().cpu() @ truth.T) <= FP32_ERROR


class TestFull:
    pytestmark = gpu

    @pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
    def test_against_float64(self, weight_dtype: torch.dtype, x_dtype: torch.dtype) -> None:
        for n, k in [*SIZES, (48, 14336)]:
            weight, truth = full(n, k, weight_dtype)
            packed = ops.pack_linear([weight], DEVICE)
            for m in ROWS if (n, k) == (63, 4099) else (1, 5, 16, 17):
                x = activations(m, k, x_dtype)
                want = x.double().cpu() @ truth.T
                got = ops.linear(x, packed, None, 24, torch.empty(m, n, device=DEVICE))
                assert error(got, want) <= FP32_ERROR, (n, k, m)

    @pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16, torch.float32])
    @pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("k", [4096, 14336])
    def test_rows_are_bit_equal_for_every_m(self, weight_dtype: torch.dtype, x_dtype: torch.dtype, k: int) -> None:
        packed = ops.pack_linear([full(100, k, weight_dtype)[0]], DEVICE)
        x = activations(16, k, x_dtype)
        whole = ops.linear(x, packed)
        for m in range(1, 16):
            assert torch.equal(ops.linear(x[:m], packed), whole[:m]), m
            assert torch.equal(ops.linear(x[m : m + 1], packed), whole[m : m + 1]), m

    def test_a_16_bit_table_is_not_copied(self) -> None:
        table = full(64, 96, torch.bfloat16)[0].to(DEVICE)
        assert ops.pack_linear([table], DEVICE).data.values.data_ptr() == table.data_ptr()

    @pytest.mark.parametrize("form", ["zero", "symmetric", "minimum"])
    @pytest.mark.parametrize(("bits", "group"), [(4, -1), (8, -1), (4, 32), (8, 128)])
    def test_weights_of_host_and_device_pack_alike(self, bits: int, group: int, form: str) -> None:
        """The records of small host weights are made on the CPU, all others on the device."""
        parts = [quantized(n, 384, bits, group, form, torch.bfloat16, n)[0] for n in (17, 3, 64)]
        there = [
            replace(part, **{f: t.to(DEVICE) for f, t in vars(part).items() if isinstance(t, Tensor)}) for part in parts
        ]
        host, device = (ops.pack_linear(p, DEVICE).data for p in (parts, there))
        assert torch.equal(host.records, device.records)
        assert torch.equal(host.values, device.values)


class TestCalls:
    pytestmark = gpu

    @pytest.mark.parametrize("m", [3, 40])
    @pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
    def test_strided_rows_and_column_slices(self, m: int, x_dtype: torch.dtype) -> None:
        weight, truth = quantized(33, 172, 4, -1, "zero", torch.bfloat16)
        packed = ops.pack_linear([weight], DEVICE)
        x = activations(m, 400, x_dtype)[:, 5:177]
        buffer = torch.full((m, 100), 7.0, dtype=x_dtype, device=DEVICE)
        bias = torch.randn(33, device=DEVICE)
        ops.linear(x, packed, bias, 24, buffer[:, 40:73])
        want = x.double().cpu() @ truth.T + bias.double().cpu()
        rounding = error(want.to(x_dtype), want)
        assert error(buffer[:, 40:73], want) <= FP32_ERROR + DIGIT_ERROR + 1.2 * rounding
        assert (buffer[:, :40] == 7).all()
        assert (buffer[:, 73:] == 7).all()

    def test_contract_errors(self) -> None:
        packed = ops.pack_linear([full(8, 64, torch.bfloat16)[0]], DEVICE)
        x = activations(2, 64, torch.bfloat16)
        for broken in (x[:, :63], x.half(), x.T):
            with pytest.raises(ValueError, match="linear: x"):
                ops.linear(broken, packed)
        with pytest.raises(ValueError, match="out"):
            ops.linear(x, packed, None, 24, torch.empty(2, 9, device=DEVICE))
        with pytest.raises(ValueError, match="bias"):
            ops.linear(x, packed, torch.zeros(8, dtype=torch.bfloat16, device=DEVICE))
        with pytest.raises(ValueError, match="scheme"):
            ops.pack_linear([full(8, 64, torch.bfloat16)[0], full(8, 64, torch.float32)[0]], DEVICE)

    @pytest.mark.parametrize("programmatic", [False, True])
    def test_replay_equals_eager(self, programmatic: bool) -> None:
        """A chain of linears, each reading what the one before wrote, at M = 1 and where K is split over blocks."""
        layers = [
            ops.pack_linear([quantized(2048, 2048, bits, group, "zero", torch.bfloat16, i)[0]], DEVICE)
            for i, (bits, group) in enumerate([(4, -1), (8, -1), (4, 128), (8, 64)] * 3)
        ]
        layers.append(ops.pack_linear([full(2048, 2048, torch.bfloat16)[0]], DEVICE))

        def step(x: Tensor) -> Tensor:
            for layer in layers:
                x = ops.linear(x, layer)
            return x

        programs = []  # a program that dies while the next is recorded would break the recording
        for m in (1, 16):
            x = activations(m, 2048, torch.bfloat16)
            expected = step(x)
            fresh = activations(m, 2048, torch.bfloat16, 9)
            other = step(fresh)
            with cuda.programmatic_launch(programmatic):
                with ops.capture(DEVICE) as program:
                    y = step(x)
                programs.append(program)
                program.replay()
                assert torch.equal(y, expected)
                x.copy_(fresh)
                for _ in range(50):
                    y.fill_(float("nan"))
                    program.replay()
                    assert torch.equal(y, other)


def check(kind: tuple[int, int], x: Tensor, bits_of_x: ActivationBits, n: int, *wide: bool) -> None:
    """x (M, K) by (n, K) weights of a kind (bits, group; 16, 17 and 32 bits: bf16, fp16, fp32) against float64, with
    `wgmma` or without."""
    (bits, group), k = kind, x.shape[1]
    dtypes = {16: torch.bfloat16, 17: torch.float16, 32: torch.float32}
    weight, truth = full(n, k, dtypes[bits]) if bits in dtypes else quantized(n, k, bits, group, "zero", torch.float16)
    bound = FP32_ERROR if bits in dtypes else {8: ONE_DIGIT_ERROR, 16: DIGIT_ERROR, 24: FP32_ERROR}[bits_of_x]
    want = x.double().cpu() @ truth.T
    for own in wide:
        with cuda.wgmma(own):
            assert error(run(weight, x, activation_bits=bits_of_x), want) <= bound, own


def _sanitize_cases() -> list[Any]:
    """One small case per format, digits and kind of rows of every kernel of csrc/cuda/linear*.cu."""
    weights = [(bits, group) for bits in (4, 8) for group in (-1, 32, 128)]
    weights += [(16, 0), (17, 0), (32, 0)]  # bf16, fp16, fp32
    digits = [(torch.bfloat16, 16), (torch.float32, 24)]
    cases = [(w, *d, m, True) for w in weights for d in digits for m in (1, 3, 16, 20, 70)]
    cases += [(w, *d, m, False) for w in weights[:-1] for d in digits for m in (20, 70)]  # mma.sync
    cases += [(w, torch.bfloat16, 8, m, wide) for w in weights[:6] for m, wide in ((1, True), (5, True), (16, True))]
    cases += [(w, torch.bfloat16, 8, m, wide) for w in weights[:6] for m in (20, 70) for wide in (True, False)]
    return cases + [(w, torch.bfloat16, 16, 7, True) for w in weights[:6]]  # in two digits 3 rows have their own


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")
@pytest.mark.parametrize(("kind", "x_dtype", "bits_of_x", "m", "wide"), _sanitize_cases())
def test_small_case_of_each_kernel(
    kind: tuple[int, int], x_dtype: torch.dtype, bits_of_x: ActivationBits, m: int, wide: bool
) -> None:
    check(kind, activations(m, 331, x_dtype), bits_of_x, 35, wide)


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(("n", "k", "m"), [(35, 331, 20), (35, 331, 70), (17, 4096, 40)])
def test_small_case_of_symmetric_groups(n: int, k: int, m: int, wide: bool) -> None:
    weight, truth = quantized(n, k, 4, 128, "symmetric", torch.float16)
    x = activations(m, k, torch.bfloat16)
    with cuda.wgmma(wide):
        assert error(run(weight, x, activation_bits=16), x.double().cpu() @ truth.T) <= DIGIT_ERROR


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(("n", "k", "m"), [(35, 1331, 5), (35, 1331, 40), (150, 331, 140), (17, 4096, 40)])
def test_small_case_of_sums_that_stay_integers(n: int, k: int, m: int, wide: bool) -> None:
    weight, truth = quantized(n, k, 4, -1, "zero", torch.float16)
    x = uneven(m, k)
    with cuda.wgmma(wide):
        assert error(run(weight, x, activation_bits=8), x.double().cpu() @ truth.T) <= 2 * ONE_DIGIT_ERROR


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")
def test_small_case_of_a_split_over_blocks() -> None:
    weight, truth = quantized(17, 4096, 4, 128, "zero", torch.float16)
    for m in (16, 40):
        x = activations(m, 4096, torch.float32)
        assert error(run(weight, x), x.double().cpu() @ truth.T) <= FP32_ERROR


# Rows of x and columns of W for which K is shared out: decode over two blocks that give each other their sums (of at
# most four, eight, sixteen rows); tiles of 16, 32, 64 and 128 rows, with more stages than a ring holds. From the plans
# of tiles.h, on 132 multiprocessors; 8: one digit, 16: two, 24: three.
LONG = 12288
SHARED: dict[tuple[int, int], dict[ActivationBits, list[tuple[int, int]]]] = {
    (4, -1): {
        8: [(8, 16384), (12, LONG), (17, LONG), (65, LONG)],
        16: [(3, 28672), (8, 8192), (16, 5000), (16, LONG), (20, LONG), (33, LONG), (65, LONG)],
        24: [(8, 5000), (16, 3000), (20, LONG)],
    },
    (4, 32): {
        8: [(8, LONG), (16, 8192), (17, LONG)],
        16: [(3, 28672), (8, 7168), (16, 4096), (16, LONG), (20, LONG), (33, LONG)],
        24: [(8, 4096), (16, 3000), (20, LONG)],
    },
    (4, 128): {8: [(17, LONG)], 16: [(16, LONG), (20, LONG), (33, LONG), (65, LONG)], 24: [(20, LONG)]},
    (8, -1): {
        8: [(8, LONG), (12, LONG), (17, LONG), (65, LONG)],
        16: [(3, 16384), (8, 6000), (16, 5000), (16, LONG), (20, LONG), (33, LONG), (65, LONG)],
        24: [(8, 4096), (16, 3000), (20, LONG)],
    },
    (8, 32): {
        8: [(7, LONG), (16, 8192), (17, LONG)],
        16: [(3, 14336), (8, 5000), (16, 5000), (12, LONG), (20, LONG), (33, LONG)],
        24: [(8, 3000), (16, 3000), (20, LONG)],
    },
    (8, 128): {8: [(17, LONG)], 16: [(16, LONG), (20, LONG), (33, LONG)], 24: [(20, LONG)]},
    (16, 0): {16: [(8, 6000), (16, 5000), (33, LONG), (65, LONG)], 24: [(8, 2048), (16, 2048)]},
    (17, 0): {16: [(8, 6000), (16, 5000), (33, LONG), (65, LONG)], 24: [(8, 3000), (12, 3000)]},
    (32, 0): {16: [(8, 6000), (16, 5000)], 24: [(8, 2048), (16, 2048)]},
}
# Tiles with all of K that go around a ring: a round of 12 strips each, some handed on from block to block, and the
# fewest of 128 rows in one digit that are not halved.
WHOLE: list[tuple[tuple[int, int], ActivationBits, int, int, int]] = [
    ((4, -1), 16, 40, 25344, 1536), ((4, 128), 16, 40, 25344, 1536), ((8, 32), 16, 40, 25344, 1536),
    ((4, 128), 16, 100, 25344, 1536), ((4, -1), 8, 1024, 5000, 4096),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.sanitize
@pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")
@pytest.mark.parametrize(
    ("kind", "bits_of_x", "m", "n", "k"),
    [(kind, bits, m, 17, k) for kind, own in SHARED.items() for bits, sizes in own.items() for m, k in sizes] + WHOLE,
)
def test_each_way_to_share_out(kind: tuple[int, int], bits_of_x: ActivationBits, m: int, n: int, k: int) -> None:
    x = activations(m, k, torch.float32 if bits_of_x == 24 else torch.bfloat16)
    check(kind, x, bits_of_x, n, True, False)


@pytest.mark.skipif(USABLE, reason="CUDA works here")
def test_the_reason_is_said_where_cuda_cannot_run() -> None:
    assert REASON
    with pytest.raises(DeviceError, match="device 'cuda' cannot be used"):
        ops.pack_linear([torch.zeros(4, 32)], DEVICE)
