"""The format's definition against the compressed-tensors library."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from nibblelm.ops.reference import dequantize
from nibblelm.quant import minmax
from nibblelm.quant.affine import pack, pack_codes, pack_zero_point, round_scale, unpack


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [1, 3, 17, 63, 172, 331])
def test_words_equal_the_library(bits, columns):
    codes = torch.randint(0, 2**bits, (7, columns), generator=torch.Generator().manual_seed(columns))
    signed = (codes - 2 ** (bits - 1)).to(torch.int8)
    assert torch.equal(pack_codes(codes, bits), pack_to_int32(signed, bits))
    assert torch.equal(pack_zero_point(codes, bits), pack_to_int32(signed, bits, packed_dim=0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "group", "columns"), [(4, -1, 172), (4, 32, 96), (8, -1, 63), (8, 64, 128)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_pack_then_unpack(bits, group, columns, symmetric, dtype):
    torch.manual_seed(bits + columns)
    weight = torch.randn(331, columns).to(dtype)
    groups = weight.float().view(331, -1, columns if group == -1 else group)
    scale, zero = minmax.choose(groups, bits, symmetric, dtype)
    scale, zero = scale.squeeze(-1).to(dtype), zero.squeeze(-1)
    packed = pack(weight, scale, None if symmetric else zero, bits, group)
    codes, stored_scale, stored_zero = unpack(packed)

    library = unpack_from_int32(packed.codes, bits, weight.shape).int() + 2 ** (bits - 1)
    assert torch.equal(codes, library)
    assert torch.equal(stored_scale, scale)
    assert torch.equal(stored_zero, zero.int())
    # rounding moves a weight by half a step at most; clipping by the rounding of scale and zero-point
    step = scale.double().repeat_interleave(groups.shape[-1], 1)
    error = (dequantize(packed).double() - weight.double()).abs()
    slack = step * (2 ** (bits - 1)) * torch.finfo(dtype).eps
    assert bool((error <= (0.5 if symmetric else 1.0) * step + slack).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounded_scales_are_usable(dtype):
    scales = round_scale(torch.tensor([0.0, 1e-44, 5e-8, 1.0, 1e5, 3.4e38, 1e300], dtype=torch.float64), dtype)
    assert torch.equal(scales, scales.to(dtype).double())
    assert bool(torch.isfinite(scales).all())
    assert bool(torch.isfinite(1.0 / scales.float()).all())
