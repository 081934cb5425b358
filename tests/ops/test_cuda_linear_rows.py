"""A row of CUDA linear has the same bits whatever rows are beside it, and the accuracy its digits promise."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.ops import cuda
from nibblelm.ops.types import ActivationBits, PackedLinear

sys.path.insert(0, str(Path(__file__).parent))
from cuda_weights import DEVICE, FP32_ERROR, REASON, USABLE, activations, error, full, quantized, slices, uneven

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")]
INTEGER = [(bits, group, form) for bits in (4, 8) for group in (-1, 32, 64, 128) for form in ("zero", "minimum")]
INTEGER += [(bits, group, "symmetric") for bits in (4, 8) for group in (-1, 128)]
DIGITS: list[tuple[torch.dtype, ActivationBits]] = [(torch.bfloat16, 8), (torch.bfloat16, 16), (torch.float32, 24)]
WIDE = (17, 31, 33, 64, 65, 130, 300)


def digit_bound(
    x: Tensor, truth: Tensor, largest: float, bits: ActivationBits, joint: bool = False, bounded: bool = False
) -> Tensor:
    """The most that rounding to digits can change, (M, N): half a step of each slice's largest value by |w|; and that
    of fp32 sums over slices, whose terms are codes of weights up to `largest` apart. joint: where slices' sums stay
    integers, steps are that of the row's largest value by a power of two, and a sum loses up to a step of the scale
    between them. bounded: where 128 products by 15 at most have an exact sum in fp32, eight neighbours together are at
    most 2^24 / 15 / 16 steps, less what roundings may add."""
    steps = {8: 127, 16: 127 * 256 / 2, 24: 127 * 65536 / 2}[bits]  # a power of two may leave the top bit unused
    x, size = x.double().cpu(), truth.abs()
    bound = torch.zeros(x.shape[0], truth.shape[0], dtype=torch.float64)
    of_row = x.abs().amax(1)
    least = of_row / 2.0 ** (31 - (127 * 15 * 128 * -(-x.shape[1] // 128)).bit_length())  # or int32 might not do
    for first, last in slices(x.shape[1]):
        of_slice = x[:, first:last].abs().amax(1)
        if bounded:
            eights = torch.nn.functional.pad(x[:, first:last].abs(), (0, -(last - first) % 8)).unflatten(1, (-1, 8))
            of_slice = torch.maximum(of_slice * 1.0003, eights.sum(2).amax(1) * (127 * 256 / 69872))
        step = torch.maximum(least, torch.minimum(2 * of_slice, of_row)) if joint else of_slice
        bound += (step / steps / 2)[:, None] * size[:, first:last].sum(1)
        if joint:
            bound += (step / steps)[:, None] * largest / 16
    return bound + 2.0**-21 * largest * x.abs().sum(1, keepdim=True)


def by_sixteens(x: Tensor, packed: PackedLinear, bits: ActivationBits, bias: Tensor | None = None) -> Tensor:
    """By the kernel for few rows; its rows equal those of M = 1 (test_cuda_linear)."""
    return torch.cat([ops.linear(part, packed, bias, bits) for part in x.split(16)])


def check(
    packed: PackedLinear, x: Tensor, bits: ActivationBits, rows: tuple[int, ...], bias: Tensor | None = None
) -> None:
    want = by_sixteens(x, packed, bits, bias)
    for i in (0, x.shape[0] // 2, x.shape[0] - 1):
        assert torch.equal(ops.linear(x[i : i + 1], packed, bias, bits), want[i : i + 1]), i
    for m in rows:
        for wide in (True, False):
            with cuda.wgmma(wide):
                for part, there in ((x[:m], want[:m]), (x[-m:], want[-m:])):
                    out = torch.full_like(there, float("nan"))
                    ops.linear(part, packed, bias, bits, out)
                    assert torch.equal(out, there), (m, wide)


@pytest.mark.parametrize(("x_dtype", "activation_bits"), DIGITS)
@pytest.mark.parametrize(("bits", "group", "form"), INTEGER)
def test_integer_weights(
    bits: int, group: int, form: str, x_dtype: torch.dtype, activation_bits: ActivationBits
) -> None:
    for n, k in ((331, 172), (63, 4099), (300, 2048), (1, 64)):
        weight, truth = quantized(n, k, bits, group, form, torch.bfloat16)
        packed = ops.pack_linear([weight], DEVICE)
        x = activations(300, k, x_dtype)
        x[3, k // 2] *= 1000
        x[5] = 0
        x[7] *= 1e-20
        bias = torch.randn(n, device=DEVICE)
        check(packed, x, activation_bits, WIDE, bias if n == 331 else None)
        got = ops.linear(x, packed, None, activation_bits, torch.empty(300, n, device=DEVICE)).double().cpu()
        largest = float(weight.scale.max()) * (1 << bits)
        joint = (bits, group, activation_bits) == (4, -1, 8)
        bound = digit_bound(x, truth, largest, activation_bits, joint, (bits, activation_bits) == (4, 16) and group > 0)
        assert ((got - x.double().cpu() @ truth.T).abs() <= bound).all(), (n, k)


@pytest.mark.parametrize("form", ["zero", "symmetric"])
@pytest.mark.parametrize("group", [-1, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_thousands_of_rows(bits: int, group: int, form: str) -> None:
    packed = ops.pack_linear([quantized(520, 1024, bits, group, form, torch.bfloat16)[0]], DEVICE)
    x = activations(8192, 1024, torch.bfloat16)
    for activation_bits in (8, 16):
        check(packed, x, activation_bits, (2048, 2049, 8192))


@pytest.mark.parametrize(
    ("bits", "group", "form"), [(4, -1, "zero"), (4, 128, "zero"), (4, 128, "symmetric"), (8, -1, "zero")]
)
def test_tiles_shared_out_evenly(bits: int, group: int, form: str) -> None:
    """More tiles than multiprocessors and not a multiple, so that blocks hand on what they have begun."""
    packed = ops.pack_linear([quantized(1100, 4096, bits, group, form, torch.bfloat16)[0]], DEVICE)
    for activation_bits in (8, 16):
        check(packed, activations(2048, 4096, torch.bfloat16), activation_bits, (2048,))


@pytest.mark.parametrize("form", ["zero", "minimum"])
@pytest.mark.parametrize(
    ("n", "k", "rows"),
    [
        (331, 2048, (17, 64, 65, 200)),  # tiles of eight strips, where there are more than 64 rows
        (528, 14336, (20, 64, 200)),  # several blocks take a tile's K
        (1100, 4096, (2048,)),  # tiles handed on from block to block
        (3000, 4096, (2048,)),  # the same of sixteen strips
        (9000, 4096, (257, 1023)),  # sixteen strips in whole rounds; and shared out behind one
    ],
)
def test_sums_that_stay_integers(n: int, k: int, rows: tuple[int, ...], form: str) -> None:
    """int4 with one scale a row by 8 bits: slices whose scales are far apart, finer and coarser in turn."""
    weight, truth = quantized(n, k, 4, -1, form, torch.bfloat16)
    packed = ops.pack_linear([weight], DEVICE)
    x = uneven(max(rows), k)
    check(packed, x, 8, rows)
    some = x[:64]
    got = ops.linear(some, packed, None, 8, torch.empty(64, n, device=DEVICE)).double().cpu()
    bound = digit_bound(some, truth, float(weight.scale.max()) * 16, 8, joint=True)
    assert ((got - some.double().cpu() @ truth.T).abs() <= bound).all()
    for m in range(1, 17):
        assert torch.equal(ops.linear(x[:m], packed, None, 8), ops.linear(some, packed, None, 8)[:m]), m


@pytest.mark.parametrize(("group", "form"), [(-1, "zero"), (-1, "minimum"), (128, "zero"), (128, "symmetric")])
@pytest.mark.parametrize("strips", [12, pytest.param(13, marks=pytest.mark.sanitize), 16])
def test_a_round_of_tiles(group: int, form: str, strips: int) -> None:
    """Few rows where every multiprocessor has a tile of so many strips, which takes fewer than a block has warps for;
    the last tile has fewer, and the last strip may be cut."""
    blocks = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    # Rows of x that are aligned and not, results that are stored as words and not.
    n, k = 16 * (strips * blocks - 3) - (0 if strips == 16 else 5), 700 if strips == 12 else 704
    weight, truth = quantized(n, k, 4, group, form, torch.bfloat16)
    packed = ops.pack_linear([weight], DEVICE)
    x = activations(16, k, torch.bfloat16)
    x[1, k // 2] *= 1000
    x[2] = 0
    bias = torch.randn(n, device=DEVICE)
    want = torch.cat([ops.linear(row, packed, bias, 16) for row in x.split(1)])
    for m in range(2, 17):
        for wide in (True, False):
            with cuda.wgmma(wide):
                for part, there in ((x[:m], want[:m]), (x[-m:], want[-m:])):
                    out = torch.full_like(there, float("nan"))
                    ops.linear(part, packed, bias, 16, out)
                    assert torch.equal(out, there), (m, wide)
    got = ops.linear(x[:4], packed, None, 16, torch.empty(4, n, device=DEVICE)).double().cpu()
    bound = digit_bound(x[:4], truth, float(weight.scale.max()) * 16, 16, bounded=group > 0)
    assert ((got - x[:4].double().cpu() @ truth.T).abs() <= bound).all()


@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16])
def test_the_smallest_scales(scale_dtype: torch.dtype) -> None:
    """Subnormal ones, too."""
    weight, _ = quantized(64, 1024, 4, 128, "symmetric", scale_dtype)
    info = torch.finfo(scale_dtype)
    weight.scale[::2] = info.smallest_normal * info.eps  # subnormal
    weight.scale[1::2] = info.smallest_normal
    packed = ops.pack_linear([weight], DEVICE)
    x = activations(200, 1024, torch.bfloat16)
    want = torch.cat([ops.linear(part, packed, None, 16, torch.empty(1, 64, device=DEVICE)) for part in x.split(1)])
    assert want.any(0).all()
    for m in (17, 64, 200):
        for wide in (True, False):
            with cuda.wgmma(wide):
                assert torch.equal(ops.linear(x[:m], packed, None, 16, torch.empty(m, 64, device=DEVICE)), want[:m])


@pytest.mark.parametrize("k", [4096, 14336])
@pytest.mark.parametrize(
    ("bits", "group", "form"), [(4, -1, "zero"), (4, 128, "zero"), (4, 128, "symmetric"), (8, -1, "zero")]
)
def test_slices_shared_out_over_blocks(bits: int, group: int, form: str, k: int) -> None:
    """A matrix of few rows, so that several blocks take a tile's K."""
    packed = ops.pack_linear([quantized(528, k, bits, group, form, torch.float16)[0]], DEVICE)
    for dtype, activation_bits in DIGITS:
        check(packed, activations(200, k, dtype), activation_bits, (20, 64, 200))


@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_full_weights(weight_dtype: torch.dtype, x_dtype: torch.dtype) -> None:
    for n, k in ((331, 172), (63, 4099), (300, 2048), (528, 14336), (1, 96)):
        weight, truth = full(n, k, weight_dtype)
        packed = ops.pack_linear([weight], DEVICE)
        x = activations(200, k, x_dtype)
        x[5] = 0
        check(packed, x, 24, (17, 64, 65, 200), torch.randn(n, device=DEVICE) if n == 331 else None)
        got = ops.linear(x, packed, None, 24, torch.empty(200, n, device=DEVICE))
        assert error(got, x.double().cpu() @ truth.T) <= FP32_ERROR
    packed = ops.pack_linear([full(520, 1024, weight_dtype)[0]], DEVICE)
    check(packed, activations(2300, 1024, x_dtype), 24, (2300,))


@pytest.mark.parametrize("bits", [4, 8])
def test_sums_at_the_edge_of_int32(bits: int) -> None:
    """Largest codes by largest digits over the longest K, all of one sign."""
    k = 65536
    weight, truth = quantized(16, k, bits, -1, "zero", torch.float32)
    weight.codes.fill_(-1)
    assert weight.zero_point is not None
    weight.zero_point.fill_(0)
    truth = weight.scale.double() * ((1 << bits) - 1) * torch.ones(1, k, dtype=torch.float64)
    packed = ops.pack_linear([weight], DEVICE)
    for value in (1.0, -255 / 128):
        for dtype, activation_bits in DIGITS:
            x = torch.full((20, k), value, dtype=dtype, device=DEVICE)
            got = ops.linear(x, packed, None, activation_bits, torch.empty(20, 16, device=DEVICE))
            assert error(got, x.double().cpu() @ truth.T) <= 1e-6, (value, activation_bits)
            assert torch.equal(ops.linear(x[:1], packed, None, activation_bits), got[:1].to(dtype))
    with pytest.raises(ValueError, match="at most 65536"):
        ops.pack_linear([quantized(1, k + 128, bits, -1, "zero", torch.float32)[0]], DEVICE)


@pytest.mark.parametrize("form", ["zero", "symmetric"])
def test_sums_at_the_edge_of_fp32(form: str) -> None:
    """Largest codes by activations that are all as large as the largest, in groups whose sums many rows add up in fp32
    and few in int32; among them small odd ones, which the last bit of a sum near 2^24 has to hold; others of two signs,
    and each with one that is much larger."""
    weight, _ = quantized(300, 1024, 4, 128, form, torch.bfloat16)
    weight.codes[: 300 // 2].fill_(-1)
    weight.codes[300 // 2 : 200].fill_(0)
    if weight.zero_point is not None:
        weight.zero_point.fill_(0)
    dense = torch.where(
        torch.arange(300)[:, None] < 150, 15.0 if form == "zero" else 7.0, 0.0 if form == "zero" else -8.0
    )
    truth = (weight.scale.double().repeat_interleave(128, 1) * dense)[:200]
    packed = ops.pack_linear([weight], DEVICE)
    x = activations(200, 1024, torch.bfloat16)
    x[::5] = 255 / 128
    x[1::5] = -1
    x[2::5] = x[2::5].sign() * 251 / 128
    x[3::5] = x[3::5].abs() + 1
    x[4::5, 77::256] *= 1000
    # 255 / 128 comes to 8,160 and odd / 4,096 to itself: first in a group, last, and in the midst of others.
    odd = (2 * torch.arange(40, device=DEVICE)[:, None] + torch.arange(1, 2048, 2, device=DEVICE)) % 256 / 4096
    column, row = torch.arange(1024, device=DEVICE) % 128, torch.arange(40, device=DEVICE)[:, None]
    few = row % 4 + 1
    small = torch.where(row % 3 == 0, column < few, torch.where(row % 3 == 1, column >= 128 - few, column % 41 == few))
    signs = torch.where(column % 2 == 0, 1.0, -1.0)
    x[::5] = torch.where(small, odd * signs, torch.tensor(255 / 128, device=DEVICE)).bfloat16()
    want = torch.cat([ops.linear(row, packed, None, 16, torch.empty(1, 300, device=DEVICE)) for row in x.split(1)])
    bound = digit_bound(x, truth, float(weight.scale.max()) * 16, 16, bounded=True)
    assert ((want[:, :200].double().cpu() - x.double().cpu() @ truth.T).abs() <= bound).all()
    for m in (16, 17, 64, 128, 200):
        for wide in (True, False):
            with cuda.wgmma(wide):
                got = ops.linear(x[:m], packed, None, 16, torch.empty(m, 300, device=DEVICE))
                assert torch.equal(got, want[:m]), (m, wide)


def test_infinite_and_nan_rows_stay_alone() -> None:
    packed = ops.pack_linear([quantized(48, 512, 4, 128, "zero", torch.float16)[0]], DEVICE)
    x = activations(70, 512, torch.bfloat16)
    want = ops.linear(x, packed)
    x[11, 5], x[40, 9] = float("inf"), float("nan")
    y = ops.linear(x, packed)
    assert y[11].isnan().all()
    assert y[40].isnan().all()
    others = [i for i in range(70) if i not in (11, 40)]
    assert torch.equal(y[others], want[others])


@pytest.mark.parametrize("k", [512, 4096])
def test_rows_that_are_not_finite_in_8_bits(k: int) -> None:
    """Where the scales of all slices come from the largest of the row."""
    packed = ops.pack_linear([quantized(48, k, 4, -1, "zero", torch.float16)[0]], DEVICE)
    x = uneven(70, k)
    want = ops.linear(x, packed, None, 8)
    x[11, 5], x[40, k - 1], x[69, k // 2] = float("inf"), float("nan"), -float("inf")
    y = ops.linear(x, packed, None, 8)
    others = [i for i in range(70) if i not in (11, 40, 69)]
    assert y[[11, 40, 69]].isnan().all()
    assert torch.equal(y[others], want[others])
    for i in (11, 40, 69, 12):
        assert torch.equal(ops.linear(x[i : i + 1], packed, None, 8).isnan(), y[i : i + 1].isnan())
    assert torch.equal(ops.linear(x[:16], packed, None, 8).isnan(), y[:16].isnan())


def test_integers_at_the_edge_of_int32() -> None:
    """Largest codes by largest digits over the longest K, shifted as far as they can be; and slices of zeros."""
    k = 65536
    weight, _ = quantized(16, k, 4, -1, "zero", torch.float32)
    weight.codes.fill_(-1)
    assert weight.zero_point is not None
    weight.zero_point.fill_(0)
    truth = weight.scale.double() * 15 * torch.ones(1, k, dtype=torch.float64)
    packed = ops.pack_linear([weight], DEVICE)
    for sign in (1.0, -1.0):
        x = torch.full((20, k), sign, dtype=torch.bfloat16, device=DEVICE)
        x[1, -8192:] = sign / 16
        x[2, 8192:16384] = sign / 4096
        x[3, -8192:] = 0
        x[4, :-8192] = 0
        x[5] = 0
        got = ops.linear(x, packed, None, 8, torch.empty(20, 16, device=DEVICE))
        bound = digit_bound(x, truth, float(weight.scale.max()) * 16, 8, joint=True)
        assert ((got.double().cpu() - x.double().cpu() @ truth.T).abs() <= bound).all()
        for i in range(6):
            assert torch.equal(ops.linear(x[i : i + 1], packed, None, 8), got[i : i + 1].bfloat16()), i


def test_8_bits_need_bf16_rows() -> None:
    packed = ops.pack_linear([quantized(16, 64, 4, -1, "zero", torch.float16)[0]], DEVICE)
    with pytest.raises(ValueError, match="8-bit activations"):
        ops.linear(activations(2, 64, torch.float32), packed, None, 8)


def test_blocks_that_wait_for_each_other_on_two_streams() -> None:
    """K shared out over blocks, beside another stream's, and in turns with few rows, whose kernels count in the same
    words."""
    packed = [
        ops.pack_linear([quantized(4096, 4096, 4, -1, "zero", torch.float16, seed)[0]], DEVICE) for seed in (0, 1)
    ]
    x = activations(64, 4096, torch.bfloat16)
    want = [by_sixteens(x, weight, 16) for weight in packed]
    streams = [torch.cuda.Stream() for _ in packed]
    torch.cuda.synchronize()
    results: list[list[Tensor]] = [[], []]
    for i in range(100):
        for stream, weight, got in zip(streams, packed, results, strict=True):
            with torch.cuda.stream(stream):
                m = (64, 33, 1)[i % 3]
                got.append(ops.linear(x[:m], weight, None, 16))
    torch.cuda.synchronize()
    for right, got in zip(want, results, strict=True):
        assert all(torch.equal(part, right[: len(part)]) for part in got)
