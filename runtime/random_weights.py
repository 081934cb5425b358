"""Gaussian weights through the real quantizer: a model of a given shape without a checkpoint, for benchmarks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.ops.types import ActivationBits, PackedLinear, QuantizedWeight, Weight
from nibblelm.quant.affine import pack_zero_point
from nibblelm.quant.rows import quantize_rows, reference_rows
from nibblelm.weights import Kind

_BLOCK = 1 << 24
"""Weights that are rounded at a time, of 40 bytes each."""


class RandomWeights:
    """Every matrix has its own storage; heads are int8 per row under a quantized body, as the converter makes them."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        activation_bits: ActivationBits,
        bits: int,
        group_size: int,
        seed: int = 0,
    ) -> None:
        self.device, self.dtype, self.activation_bits = device, dtype, activation_bits
        self.bits, self.group_size = bits, group_size
        self.streamed_bytes = 0
        self._generator = torch.Generator(device).manual_seed(seed)

    def _gaussian(self, rows: int, columns: int) -> Tensor:
        """(rows, columns) in bf16, scaled so that activations keep their size through the layers."""
        values = torch.randn(rows, columns, generator=self._generator, device=self.device)
        return values.mul_(columns**-0.5).bfloat16()

    def _weight(self, rows: int, columns: int, bits: int, group_size: int) -> Weight:
        full = self._gaussian(rows, columns)
        if bits == 16:
            return full
        if full.is_cuda:  # the same numbers, without a copy to the host
            parts = full.split(max(_BLOCK // columns, 1))
            blocks = [reference_rows(part, bits, group_size, False, "minmax") for part in parts]
            codes, scale, zero = (torch.cat([getattr(q, name) for q in blocks]) for name in ("codes", "scale", "zero"))
        else:
            q = quantize_rows(full, bits, group_size, False, "minmax", torch.get_num_threads())
            codes, scale, zero = q.codes, q.scale, q.zero
        packed = pack_zero_point(zero, bits)
        return QuantizedWeight(codes, scale, packed, 4 if bits == 4 else 8, group_size, (rows, columns))

    def _pack(self, parts: Sequence[Weight], pairs: bool = False) -> list[PackedLinear]:
        packed = [ops.pack_linear(parts, self.device, pairs)]
        self.streamed_bytes += packed[0].nbytes
        return packed

    def matrices(
        self,
        modules: Sequence[tuple[str, int]],
        columns: int,
        kind: Kind = "linear",
        pairs: bool = False,
        order: Tensor | None = None,
        transposed: bool = False,
    ) -> list[PackedLinear]:
        return self._pack([self._weight(rows, columns, self.bits, self.group_size) for _, rows in modules], pairs)

    def vector(self, name: str, *shape: int) -> Tensor:
        if "norm" in name or ".ln_" in name:
            return torch.ones(shape, device=self.device)
        return torch.randn(shape, generator=self._generator, device=self.device) * 0.1

    def table(self, module: str, rows: int, columns: int, head: str | None) -> Weight:
        return self._gaussian(rows, columns) * columns**0.5

    def head(
        self, module: str, table: str, rows: int, columns: int, tied: bool, unit_rows: bool = False
    ) -> list[PackedLinear]:
        return self._pack([self._weight(rows, columns, 16 if self.bits == 16 else 8, -1)])
