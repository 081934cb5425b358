"""Helpers of the op tests: quantized weights in the on-disk layout, and the instruction sets to test."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from nibblelm import _cpu
from nibblelm.ops import QuantizedWeight

MakeWeight = Callable[..., QuantizedWeight]


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes (R, C) -> int32 words (R, ceil(C / (32 / bits))), low code first."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % per_word))
    words = (padded.view(len(codes), -1, per_word) << (torch.arange(per_word) * bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def quantize(
    n: int, k: int, bits: int, group: int, form: str = "zero_point", scale: torch.dtype = torch.bfloat16, seed: int = 0
) -> QuantizedWeight:
    """A Gaussian (n, k) matrix rounded to the scheme; form is "zero_point", "symmetric" or "minimum"."""
    g = torch.Generator().manual_seed(seed)
    width, top = k if group == -1 else group, 2**bits - 1
    dense = torch.nn.functional.pad(torch.randn(n, k, generator=g) + 0.3, (0, -k % width)).view(n, -1, width)
    low, high = dense.amin(-1).clamp(max=0), dense.amax(-1).clamp(min=0)
    if form == "symmetric":
        low, high = -torch.maximum(-low, high), torch.maximum(-low, high)
    scales = ((high - low) / top).clamp(min=1e-4).to(scale)
    minimum = low.to(scale)
    zero = torch.full_like(low, 2 ** (bits - 1)) if form == "symmetric" else (-low / scales.float()).round()
    offset = -minimum.float() / scales.float() if form == "minimum" else zero.clamp(0, top)
    codes = (dense / scales.float().unsqueeze(-1) + offset.unsqueeze(-1)).round().clamp(0, top).reshape(n, -1)[:, :k]
    packed_zero = pack_rows(zero.clamp(0, top).T.contiguous(), bits).T.contiguous() if form == "zero_point" else None
    return QuantizedWeight(
        pack_rows(codes, bits),
        scales,
        packed_zero,
        4 if bits == 4 else 8,
        group,
        (n, k),
        minimum if form == "minimum" else None,
    )


@pytest.fixture(scope="session")
def make_weight() -> MakeWeight:
    return quantize


@pytest.fixture(params=_cpu.available_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every instruction set that this machine has, in turn."""
    before = _cpu.isa()
    _cpu.set_isa(request.param)
    yield request.param
    _cpu.set_isa(before)


@pytest.fixture
def each_isa() -> Iterator[Callable[[Callable[[], Tensor]], list[Tensor]]]:
    """Runs a computation on every instruction set; the results come back in the order of `available_isas`."""
    before = _cpu.isa()

    def run(compute: Callable[[], Tensor]) -> list[Tensor]:
        results = []
        for name in _cpu.available_isas():
            _cpu.set_isa(name)
            results.append(compute())
        return results

    yield run
    _cpu.set_isa(before)
