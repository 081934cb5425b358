"""Where a model's wiring gets its weights: a plan that takes notes, a checkpoint, or a random generator."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, Protocol

import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.checkpoint import Checkpoint
from nibblelm.checkpoint.json_object import listed
from nibblelm.errors import CheckpointError
from nibblelm.ops.reference import dequantize, unpack_codes
from nibblelm.ops.types import ActivationBits, PackedLinear, QuantizedWeight, Weight, scheme
from nibblelm.quant.affine import pack_zero_point

Kind = Literal["linear", "head", "embedding", "vector"]
PACKED = frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_shape"})
# Of older files: computed here.
_BUFFERS = (
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    ".attention.bias",
    ".attention.masked_bias",
    ".attn.masked_bias",
    ".attn.causal_mask",
)
_CAUSAL = ".attn.bias"  # a mask, of four dimensions
_RELEASED = 64 << 10  # bytes: the pages of a smaller tensor are not worth the call that gives them back


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a model reads: its full name in the source checkpoint and its shape."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    transposed: bool = False  # of a matrix (N, K) that an unquantized checkpoint has as (K, N)
    head: str | None = None  # of an embedding table: the module of the head that is tied to it

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in an unquantized checkpoint."""
        return self.shape[::-1] if self.transposed else self.shape

    @property
    def module(self) -> str:
        """The module that owns the tensor: the name without `.weight` or `.bias`."""
        return self.name.rpartition(".")[0]


class Weights(Protocol):
    """What layers ask for. Sizes are given, so a mismatch is found here and named."""

    device: torch.device
    dtype: torch.dtype
    activation_bits: ActivationBits

    def matrices(
        self,
        modules: Sequence[tuple[str, int]],
        columns: int,
        kind: Kind = "linear",
        pairs: bool = False,
        order: Tensor | None = None,
        transposed: bool = False,
    ) -> list[PackedLinear]:
        """The (rows, columns) matrices of `modules` (name, rows), neighbours of one scheme stacked into one.

        pairs  they are the gate and the up of one MLP (`ops.pack_linear`)
        order  (rows,) int64, of one module: row i of the result is row order[i] of the checkpoint's matrix
        transposed  an unquantized checkpoint has them as (columns, rows)
        """
        ...

    def vector(self, name: str, *shape: int) -> Tensor:
        """A norm gain, a bias or a table of positions, in fp32; never quantized."""
        ...

    def table(self, module: str, rows: int, columns: int, head: str | None) -> Weight:
        """The (rows, columns) embedding table.

        head  the module of a head that is tied to it: a checkpoint may have either
        """
        ...

    def head(
        self, module: str, table: str, rows: int, columns: int, tied: bool, unit_rows: bool = False
    ) -> list[PackedLinear]:
        """The (rows, columns) output head, which may be the embedding table `table`.

        unit_rows  each row is divided by its length
        """
        ...


class PlanWeights:
    """Takes notes of every tensor that the wiring asks for and hands out nothing."""

    device = torch.device("cpu")
    dtype = torch.float32
    activation_bits: ActivationBits = 24

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []
        self.groups: list[list[str]] = []  # modules that read the same input and can run as one

    def matrices(
        self,
        modules: Sequence[tuple[str, int]],
        columns: int,
        kind: Kind = "linear",
        pairs: bool = False,
        order: Tensor | None = None,
        transposed: bool = False,
    ) -> list[PackedLinear]:
        self.specs += [TensorSpec(f"{name}.weight", kind, (rows, columns), transposed) for name, rows in modules]
        self.groups.append([name for name, _ in modules])
        return []

    def vector(self, name: str, *shape: int) -> Tensor:
        self.specs.append(TensorSpec(name, "vector", shape))
        return torch.empty(0)

    def table(self, module: str, rows: int, columns: int, head: str | None) -> Weight:
        self.specs.append(TensorSpec(f"{module}.weight", "embedding", (rows, columns), head=head))
        return torch.empty(0)

    def head(
        self, module: str, table: str, rows: int, columns: int, tied: bool, unit_rows: bool = False
    ) -> list[PackedLinear]:
        return [] if tied else self.matrices([(module, rows)], columns, "head")


class CheckpointWeights:
    """Reads a checkpoint, module by module, into the tiling of a device, dropping file pages behind it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        dtype: torch.dtype,
        activation_bits: ActivationBits,
    ) -> None:
        self.checkpoint, self.device, self.dtype, self.activation_bits = (
            checkpoint,
            device,
            dtype,
            activation_bits,
        )
        self.streamed_bytes = 0

    def _weight(self, module: str, shape: tuple[int, int], transposed: bool = False) -> Weight:
        weight = self.checkpoint.weight(module)
        if transposed and isinstance(weight, Tensor):
            weight = weight.T.contiguous()
        if tuple(weight.shape) != shape:
            raise CheckpointError(f"{module}.weight has shape {list(weight.shape)}; config.json says {list(shape)}")
        return weight

    def _pack(
        self, modules: Sequence[tuple[str, int]], columns: int, pairs: bool, order: Tensor | None, transposed: bool
    ) -> list[PackedLinear]:
        weights = [self._weight(name, (rows, columns), transposed) for name, rows in modules]
        if order is not None:
            (weight,) = weights
            weights = [reordered(weight, order)]
        packed = packed_runs(weights, self.device, pairs)
        self.streamed_bytes += sum(p.nbytes for p in packed)
        return packed

    def _release(self, module: str) -> None:
        for end in ("weight", *sorted(PACKED)):
            name = f"{module}.{end}"
            if name in self.checkpoint and self.checkpoint.info(name).nbytes >= _RELEASED:
                self.checkpoint.release(name)

    def matrices(
        self,
        modules: Sequence[tuple[str, int]],
        columns: int,
        kind: Kind = "linear",
        pairs: bool = False,
        order: Tensor | None = None,
        transposed: bool = False,
    ) -> list[PackedLinear]:
        packed = self._pack(modules, columns, pairs, order, transposed)
        for name, _ in modules:
            self._release(name)
        return packed

    def vector(self, name: str, *shape: int) -> Tensor:
        value = self.checkpoint.tensor(name)
        if tuple(value.shape) != shape:
            raise CheckpointError(f"{name} has shape {list(value.shape)}; config.json says {list(shape)}")
        return ops.to_device(value, self.device).to(torch.float32, copy=True)

    def _holds(self, module: str) -> bool:
        return any(f"{module}.{end}" in self.checkpoint for end in ("weight", "weight_packed"))

    def table(self, module: str, rows: int, columns: int, head: str | None) -> Weight:
        if head is not None and not self._holds(module):
            module = head
        return _to_device(self._weight(module, (rows, columns)), self.device)

    def head(
        self, module: str, table: str, rows: int, columns: int, tied: bool, unit_rows: bool = False
    ) -> list[PackedLinear]:
        shipped = not tied or self._holds(module)
        if not unit_rows:
            return self.matrices([(module if shipped else table, rows)], columns, "head")
        packed = [ops.pack_linear([_unit_rows(self._weight(module, (rows, columns)))], self.device)]
        self.streamed_bytes += packed[0].nbytes
        self._release(module)
        return packed


def _unit_rows(weight: Weight) -> Weight:
    """The rows of a weight divided by their length, in blocks: their values are needed for that."""
    lengths = torch.cat([
        torch.linalg.vector_norm(dequantize(_rows(weight, first, first + 4096)), dim=1)
        for first in range(0, weight.shape[0], 4096)
    ])  # fmt: skip
    if isinstance(weight, Tensor):
        return weight.float() / lengths[:, None]
    return replace(weight, scale=weight.scale.float() / lengths[:, None])


def _rows(weight: Weight, first: int, last: int) -> Weight:
    """Rows of a weight; `first` is a multiple of 8, of which one word has the zero-points."""
    if isinstance(weight, Tensor):
        return weight[first:last]
    count, per = min(last, weight.shape[0]) - first, 32 // weight.bits
    zero = None if weight.zero_point is None else weight.zero_point[first // per : -(-(first + count) // per)]
    codes, scale = weight.codes[first:last], weight.scale[first:last]
    return replace(weight, codes=codes, scale=scale, zero_point=zero, shape=(count, weight.shape[1]))


def packed_runs(weights: Sequence[Weight], device: torch.device, pairs: bool) -> list[PackedLinear]:
    """Neighbours of one scheme packed together; a gate or an up alone, of a scheme of its own, has no pairs."""
    runs = [list(parts) for _, parts in groupby(weights, scheme)]
    return [ops.pack_linear(parts, device, pairs and len(runs) == 1) for parts in runs]


def reordered(weight: Weight, order: Tensor) -> Weight:
    """The rows of a weight in another order, (N,) int64."""
    if isinstance(weight, Tensor):
        return weight[order]
    zero, minimum = weight.zero_point, weight.minimum
    if zero is not None:
        zero = pack_zero_point(unpack_codes(zero.T.contiguous(), weight.bits, weight.shape[0]).T[order], weight.bits)
    minimum = None if minimum is None else minimum[order]
    return replace(weight, codes=weight.codes[order], scale=weight.scale[order], zero_point=zero, minimum=minimum)


def _to_device(weight: Weight, device: torch.device) -> Weight:
    """The table as it is in the file: on the CPU it stays in the map, and only the rows in use become resident."""
    if isinstance(weight, Tensor):
        return ops.to_device(weight, device)
    zero = None if weight.zero_point is None else ops.to_device(weight.zero_point, device)
    scale, codes = ops.to_device(weight.scale, device), ops.to_device(weight.codes, device)
    return QuantizedWeight(codes, scale, zero, weight.bits, weight.group_size, weight.shape)


def _is_mask(checkpoint: Checkpoint, name: str) -> bool:
    return name.endswith(_CAUSAL) and len(checkpoint.info(name).shape) == 4


def check_tensors(checkpoint: Checkpoint, specs: Sequence[TensorSpec]) -> None:
    """Raise CheckpointError that lists every missing and unexpected tensor by name, or those as they are in the source
    that have other sizes, before any weight is read.

    Either of the head and the embedding may stand for both when they are tied.
    """
    present = set(checkpoint.names())
    expected: set[str] = set()
    missing: list[str] = []

    def packed(module: str) -> set[str]:  # what a matrix of which there is a part must have
        found = {f"{module}.{end}" for end in PACKED} & present
        return found and found | {f"{module}.weight_packed", f"{module}.weight_scale"}

    for spec in specs:
        names = (spec.kind != "vector" and packed(spec.module)) or {spec.name}
        alternatives = packed(spec.head) or {f"{spec.head}.weight"} & present if spec.head else set()
        if alternatives and not names <= present:
            names = alternatives
        expected |= names | alternatives
        missing += sorted((names | alternatives) - present)
    unexpected = sorted(n for n in present - expected if not n.endswith(_BUFFERS) and not _is_mask(checkpoint, n))
    problems = [
        f"{word}: {listed(names, 20)}" for word, names in (("missing", missing), ("unexpected", unexpected)) if names
    ]
    if not problems:
        plain = {spec.name: spec.stored_shape for spec in specs}
        plain |= {f"{spec.head}.weight": spec.shape for spec in specs if spec.head}
        found = {name: checkpoint.info(name).shape for name in plain.keys() & present}
        problems = [
            f"{name} has shape {list(found[name])}; config.json says {list(shape)}"
            for name, shape in plain.items()
            if name in found and found[name] != shape
        ][:5]
    if problems:
        raise CheckpointError(f"{checkpoint.folder}: tensors do not match config.json; " + "; ".join(problems))
