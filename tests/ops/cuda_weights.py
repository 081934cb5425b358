"""What the tests of CUDA linear share: random weights with the float64 matrix they stand for, and errors against it."""

from itertools import pairwise

import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.ops import cuda
from nibblelm.ops.types import ActivationBits, QuantizedWeight, Weight

USABLE, REASON = cuda.available()
DEVICE = torch.device("cuda")
FP32_ERROR = 2e-5
DIGIT_ERROR = 1e-4  # two digits: half a step of 1/16256 of a slice's largest value, for Gaussian activations
ONE_DIGIT_ERROR = 1.2e-2  # a step of 1/127 of a slice's largest value, under 5 standard deviations, by sqrt(12)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """(R, C) codes -> int32 (R, ceil(C / (32 / bits))), low code first."""
    per = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per)).view(codes.shape[0], -1, per)
    words = (padded << (torch.arange(per) * bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def quantized(
    n: int, k: int, bits: int, group: int, form: str, scale_dtype: torch.dtype, seed: int = 0
) -> tuple[QuantizedWeight, Tensor]:
    """A random weight and the float64 matrix it stands for."""
    g = torch.Generator().manual_seed(seed + n * 31 + k)
    groups = 1 if group == -1 else -(-k // group)
    codes = torch.randint(0, 1 << bits, (n, k), generator=g)
    scale = ((torch.rand(n, groups, generator=g) + 0.5) * 0.02).to(scale_dtype)
    zero = torch.full((n, groups), 1 << (bits - 1))
    minimum = zero_point = None
    if form == "zero":
        zero = torch.randint(0, 1 << bits, (n, groups), generator=g)
        zero_point = pack_words(zero.T, bits).T.contiguous()
    if form == "minimum":
        minimum = (-(torch.rand(n, groups, generator=g)) * 0.2).to(scale_dtype)
    weight = QuantizedWeight(pack_words(codes, bits), scale, zero_point, bits, group, (n, k), minimum)  # type: ignore[arg-type]
    width = k if group == -1 else group

    def spread(t: Tensor) -> Tensor:
        return t.double().repeat_interleave(width, 1)[:, :k]

    offset = spread(minimum) if minimum is not None else -spread(scale) * spread(zero)
    return weight, spread(scale) * codes.double() + offset


def full(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    weight = (torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05).to(dtype)
    return weight, weight.double()


def activations(m: int, k: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def slices(k: int) -> list[tuple[int, int]]:
    """The parts of K that have scales of their own: up to 8 (short rows 4), of whole steps of 128 columns."""
    steps = -(-k // 128)
    most, count = 8 if steps >= 24 else 4, 1
    while 2 * count <= min(steps, most):
        count *= 2
    edges = [min(128 * (i * steps // count), k) for i in range(count + 1)]
    return list(pairwise(edges))


def uneven(m: int, k: int) -> Tensor:
    """bf16 activations whose slices are up to 4,096 times apart, other ones in every row."""
    x = activations(m, k, torch.bfloat16)
    powers = torch.randint(-6, 7, (m, len(slices(k))), generator=torch.Generator().manual_seed(k))
    for i, (first, last) in enumerate(slices(k)):
        x[:, first:last] *= 2.0 ** powers[:, i : i + 1].to(DEVICE, torch.bfloat16)
    return x


def error(got: Tensor, want: Tensor, size: Tensor | None = None) -> float:
    """Relative to `size`, by default what is wanted: a bias may cancel the product whose error this is."""
    got = got.double().cpu()
    assert got.isfinite().all()
    return float((got - want).norm() / (want if size is None else size).norm())


def run(weight: Weight, x: Tensor, bias: Tensor | None = None, activation_bits: ActivationBits = 24) -> Tensor:
    packed = ops.pack_linear([weight], DEVICE)
    out = torch.full((x.shape[0], packed.shape[0]), float("nan"), device=DEVICE)
    return ops.linear(x, packed, None if bias is None else bias.to(DEVICE), activation_bits, out)
