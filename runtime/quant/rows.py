"""Quantize blocks of rows: the native kernel, and the same in plain PyTorch as its oracle."""

from dataclasses import dataclass, fields
from types import MappingProxyType

import torch
from torch import Tensor

from nibblelm.errors import ConvertError
from nibblelm.quant import minmax, mse
from nibblelm.quant.affine import pack_codes, round_codes, squared_error

METHODS = MappingProxyType({"minmax": minmax.choose, "mse": mse.choose})
"""How scales and zero-points are chosen from the weights alone; the kernel implements each of these."""


@dataclass(frozen=True)
class QuantizedRows:
    """One block of R rows. G groups per row, W = ceil(K / (32 / bits)) words per row.

    codes int32 (R, W); scale (R, G) in the dtype to store; zero uint8 (R, G), not packed yet
    squared_error, squared_norm  fp64 (R,): sums of (w - dequantized)^2 and of w^2
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    squared_error: Tensor
    squared_norm: Tensor


def quantize_rows(
    weight: Tensor,
    bits: int,
    group_size: int,
    symmetric: bool,
    method: str,
    threads: int,
    scale_dtype: torch.dtype | None = None,
) -> QuantizedRows:
    """Quantize (R, K) contiguous fp32 / bf16 / fp16 weights on the CPU.

    scale_dtype  of the stored scales, which decide the codes; None is the weights' own
    group_size  -1 for one scale per row, else a multiple of 8; a last group may be shorter
    Raises ConvertError naming the row that holds a NaN or an infinity.
    """
    from nibblelm import _cpu

    rows, cols = weight.shape
    if cols < 1:
        raise ConvertError(f"a weight of shape {tuple(weight.shape)} has no columns to quantize")
    groups = 1 if group_size == -1 else -(-cols // group_size)
    out = QuantizedRows(
        torch.empty(rows, -(-cols // (32 // bits)), dtype=torch.int32),
        torch.empty(rows, groups, dtype=scale_dtype or weight.dtype),
        torch.empty(rows, groups, dtype=torch.uint8),
        torch.empty(rows, dtype=torch.float64),
        torch.empty(rows, dtype=torch.float64),
    )
    weight = weight.contiguous()
    bad = _cpu.quantize_rows(
        weight.data_ptr(),
        str(weight.dtype).removeprefix("torch."),
        str(out.scale.dtype).removeprefix("torch."),
        rows,
        cols,
        bits,
        cols if group_size == -1 else group_size,
        symmetric,
        method == "mse",
        out.codes.data_ptr(),
        out.scale.data_ptr(),
        out.zero.data_ptr(),
        out.squared_error.data_ptr(),
        out.squared_norm.data_ptr(),
        threads,
    )
    if bad >= 0:
        raise ConvertError(f"row {bad} holds a NaN or an infinity; only finite weights can be quantized")
    return out


def reference_rows(
    weight: Tensor,
    bits: int,
    group_size: int,
    symmetric: bool,
    method: str,
    scale_dtype: torch.dtype | None = None,
) -> QuantizedRows:
    """The same as `quantize_rows`, slow and obvious."""
    dtype = scale_dtype or weight.dtype
    blocks = _blocks(weight, group_size)
    return _stored(weight, blocks, METHODS[method](blocks, bits, symmetric, dtype), bits, dtype)


def weighted_rows(
    weight: Tensor, bits: int, group_size: int, symmetric: bool, scale_dtype: torch.dtype, importance: Tensor
) -> QuantizedRows:
    """Quantize (R, K) fp32 weights by method mse with squared errors times `importance` (K,) fp64, on their device."""
    blocks, factors = _blocks(weight, group_size), _blocks(importance.unsqueeze(0), group_size)
    choice = mse.choose(blocks, bits, symmetric, scale_dtype, factors)
    rows = _stored(weight, blocks, choice, bits, scale_dtype)
    return QuantizedRows(*(getattr(rows, field.name).cpu() for field in fields(rows)))


def _blocks(weight: Tensor, group_size: int) -> Tensor:
    """(R, K) -> (R, G, width), fp32 or wider; a last group is filled up with zeros."""
    rows, cols = weight.shape
    width = cols if group_size == -1 else group_size
    wide = weight if weight.dtype == torch.float64 else weight.float()
    return torch.nn.functional.pad(wide, (0, -cols % width)).view(rows, -1, width)


def _stored(
    weight: Tensor, blocks: Tensor, choice: tuple[Tensor, Tensor], bits: int, dtype: torch.dtype
) -> QuantizedRows:
    scale, zero = choice
    rows, cols = weight.shape
    codes = (round_codes(blocks, scale, zero, bits) + zero).int().view(rows, -1)[:, :cols]
    return QuantizedRows(
        pack_codes(codes, bits),
        scale.squeeze(-1).to(dtype),
        zero.squeeze(-1).to(torch.uint8),
        squared_error(blocks, scale, zero, bits).sum((1, 2)),
        weight.double().square().sum(1),
    )
