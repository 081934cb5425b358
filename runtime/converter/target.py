"""Which matrices to store in more bits so that a model stays within a KL divergence of its source.

What one group of matrices adds to the divergence is measured with all others as they are in the source, in the smallest
format; what it adds in a larger one is taken to go with the squared error of its weights. The sum of these is a guess,
good for which groups to promote but not for how many. So a whole conversion is measured, the guess is scaled by
what it came to, and so on until nothing smaller is left to try.
"""

import dataclasses
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from nibblelm.arguments import select_device
from nibblelm.checkpoint import Checkpoint, Scheme
from nibblelm.converter.calibration import read_calibration
from nibblelm.converter.plan import Unit
from nibblelm.converter.rotate import Read, rotated
from nibblelm.engine import LLM
from nibblelm.errors import ConvertError
from nibblelm.evaluation import Window, score
from nibblelm.models import family
from nibblelm.ops.types import PackedLinear, QuantizedWeight, Weight
from nibblelm.quant.affine import pack_zero_point
from nibblelm.quant.rows import quantize_rows
from nibblelm.quant.schemes import Options
from nibblelm.runner import Runner
from nibblelm.weights import CheckpointWeights, Kind, PlanWeights, packed_runs, reordered

LEVELS = ((4, -1), (4, 128), (4, 32), (8, -1))
"""(bits, group size), from the smallest up."""

PIECES = 32
"""Pieces of the calibration text that a conversion is measured on, and that calibrated methods do not see."""

_SENSED = 4  # of them, for the single groups: their logits are all kept
_TRIALS = 6


class Report(Protocol):
    """What is read of a conversion's report."""

    @property
    def output_bytes(self) -> int: ...


Trial = Callable[[Options, Path], Report]


@dataclasses.dataclass(frozen=True)
class Group:
    """Matrices that read one input, promoted together so that they go on running as one.

    levels[i], sizes[i], kl[i]  the schemes, smallest first; bytes in it; the guess of what it adds to the divergence
    """

    modules: tuple[str, ...]
    levels: list[tuple[int, int]]
    sizes: list[int]
    kl: list[float]


class _OpenWeights(CheckpointWeights):
    """The source, with its matrices where they can be exchanged.

    read  gives its tensors by the model's names as they are after rotation; None leaves them as they are
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, read: Read | None) -> None:
        super().__init__(checkpoint, device, torch.float32, 24)
        self._read = read
        self._places: dict[tuple[str, ...], tuple[list[PackedLinear], bool, Tensor | None]] = {}

    def _weight(self, module: str, shape: tuple[int, int], transposed: bool = False) -> Weight:
        if self._read is None:
            return super()._weight(module, shape, transposed)
        return self._read(f"{module}.weight").float()

    def vector(self, name: str, *shape: int) -> Tensor:
        return super().vector(name, *shape) if self._read is None else self._read(name).float().to(self.device)

    def table(self, module: str, rows: int, columns: int, head: str | None) -> Weight:
        return super().table(module, rows, columns, head if self._read is None else None)

    def head(
        self, module: str, table: str, rows: int, columns: int, tied: bool, unit_rows: bool = False
    ) -> list[PackedLinear]:
        return super().head(module, table, rows, columns, tied and self._read is None, unit_rows)

    def matrices(
        self,
        modules: Sequence[tuple[str, int]],
        columns: int,
        kind: Kind = "linear",
        pairs: bool = False,
        order: Tensor | None = None,
        transposed: bool = False,
    ) -> list[PackedLinear]:
        packed = super().matrices(modules, columns, kind, pairs, order, transposed)
        self._places[tuple(name for name, _ in modules)] = packed, pairs, order
        return packed

    @contextmanager
    def exchanged(self, modules: Sequence[str], parts: Sequence[Weight]) -> Iterator[None]:
        """`parts` in place of `modules`, for steps that are recorded inside the block."""
        packed, pairs, order = self._places[tuple(modules)]
        kept = list(packed)
        rows = [part if order is None else reordered(part, order) for part in parts]
        packed[:] = packed_runs(rows, self.device, pairs)
        try:
            yield
        finally:
            packed[:] = kept


def search(
    checkpoint: Checkpoint,
    units: Sequence[Unit],
    options: Options,
    target_kl: float,
    max_bytes: int | None,
    calibration: str | Path | None,
    device: str,
    threads: int,
    trial: Trial,
) -> tuple[Options, dict[str, Any]]:
    """The options of the smallest conversion found within `target_kl` (nats per token), and what is recorded of it.

    units      of the source with any options: their tensors are what counts
    max_bytes  of all tensors; where the target takes more, or cannot be reached, the best that was tried is returned
               and the record says so
    trial      converts into a folder, which may be there
    Raises ConvertError for options that leave nothing to choose.
    """
    if not (math.isfinite(target_kl) and target_kl > 0):
        raise ConvertError(f"target_kl must be a positive number of nats per token, got {target_kl!r}")
    if options.keep or options.group_size is not None or options.bits != 4:
        raise ConvertError("target_kl chooses bits and groups itself; leave out bits, group_size and keep")
    config = family(checkpoint.config).read_config(checkpoint.config)
    ids = read_calibration(calibration, checkpoint.folder, config, PIECES, options.seed).ids.tolist()
    pieces = [Window(piece, 1) for piece in ids]
    base = dataclasses.replace(options, group_size=-1, held_out=len(ids))
    groups = _groups(checkpoint, units, base, pieces[:_SENSED], device, threads)
    source = LLM(checkpoint.folder, device, "fp32", threads, len(ids[0]))
    tried: dict[tuple[int, ...], tuple[int, float]] = {}  # levels -> bytes, measured divergence
    scale, fixed = 1.0, 0
    with tempfile.TemporaryDirectory() as work:
        for _ in range(_TRIALS):
            room = None if max_bytes is None else max_bytes - fixed
            chosen = choose(groups, target_kl / scale, room if tried else None)
            if chosen in tried and tried[chosen][1] > target_kl:  # the guess is too good by less than one promotion
                scale *= 1.1
                continue
            if chosen in tried:
                break
            report = trial(dataclasses.replace(base, keep=rules(groups, chosen)), Path(work) / "model")
            size = report.output_bytes
            fixed = size - sum(g.sizes[i] for g, i in zip(groups, chosen, strict=True))
            ours = LLM(Path(work) / "model", device, "fp32", threads, len(ids[0]))
            kl = score(pieces, ours.logits, source.logits)["kl_mean"]
            tried[chosen] = size, kl
            scale = kl / sum(g.kl[i] for g, i in zip(groups, chosen, strict=True))
    fits = {levels: found for levels, found in tried.items() if max_bytes is None or found[0] <= max_bytes}
    if not fits:
        smallest = min(size for size, _ in tried.values())
        raise ConvertError(f"max_size is {max_bytes} bytes; the smallest conversion found takes {smallest}")
    good = [levels for levels in fits if fits[levels][1] <= target_kl]
    best = min(good, key=lambda levels: fits[levels]) if good else min(fits, key=lambda levels: fits[levels][::-1])
    matrices = [sum(g.sizes[i] for g, i in zip(groups, levels, strict=True)) for levels in (best, (0,) * len(groups))]
    promoted: dict[str, list[str]] = {}
    for group, level in zip(groups, best, strict=True):
        if level:
            bits, size = group.levels[level]
            promoted.setdefault(f"int{bits} {'per row' if size == -1 else f'g{size}'}", []).extend(group.modules)
    record = {
        "target_kl": target_kl,
        "max_size": max_bytes,
        "kl": fits[best][1],
        "reached": bool(good),
        "tokens": sum(len(piece.ids) - 1 for piece in pieces),
        "bytes_ratio": matrices[0] / matrices[1],
        "promoted": promoted,
    }
    return dataclasses.replace(base, keep=rules(groups, best)), record


def choose(groups: Sequence[Group], most: float, room: int | None) -> tuple[int, ...]:
    """The level of each group: up from the smallest by what lowers the guess most for its bytes, until it is at most
    `most` or the next step would take more than `room` bytes in all."""
    levels = [0] * len(groups)
    size = sum(group.sizes[0] for group in groups)
    while sum(group.kl[i] for group, i in zip(groups, levels, strict=True)) > most:
        steps = [
            ((group.kl[now] - group.kl[then]) / (group.sizes[then] - group.sizes[now]), at, then)
            for at, (group, now) in enumerate(zip(groups, levels, strict=True))
            for then in range(now + 1, len(group.levels))
            if group.sizes[then] > group.sizes[now]
            and (room is None or size + group.sizes[then] - group.sizes[now] <= room)
        ]
        gain, at, then = max(steps, default=(0.0, 0, 0))
        if gain <= 0:
            break
        size += groups[at].sizes[then] - groups[at].sizes[levels[at]]
        levels[at] = then
    return tuple(levels)


def rules(groups: Sequence[Group], levels: Sequence[int]) -> tuple[str, ...]:
    """The keep rules that give each group its level."""
    return tuple(
        f"^{re.escape(module)}$={group.levels[level][0]}:{group.levels[level][1]}"
        for group, level in zip(groups, levels, strict=True)
        for module in group.modules
        if level
    )


def _groups(
    checkpoint: Checkpoint,
    units: Sequence[Unit],
    options: Options,
    pieces: Sequence[Window],
    device: str,
    threads: int,
) -> list[Group]:
    """Every group of matrices of the layers that is to be quantized, with its guesses."""
    card, module = select_device(device), family(checkpoint.config)
    config = module.read_config(checkpoint.config)
    plan = PlanWeights()
    module.Model(plan, config, positions=1)
    of = {unit.spec.module: unit for unit in units if unit.spec.kind == "linear" and unit.scheme is not None}
    specs = {unit.spec.name: unit for unit in units}

    def stored(name: str) -> Tensor:
        tensor = checkpoint.tensor(specs[name].source)
        return tensor.T.contiguous() if specs[name].spec.transposed else tensor

    read = rotated(stored, checkpoint.config, config, options.seed) if options.rotate else None
    weights, length = _OpenWeights(checkpoint, card, read), len(pieces[0].ids)
    runner = Runner(module.Model(weights, config, length), card, torch.float32, length, graph=False)

    def logits(ids: Sequence[int]) -> Tensor:
        return runner.prefill(ids, every_row=True)

    runner.reserve(1)
    exact = {tuple(piece.ids): logits(piece.ids) for piece in pieces}
    found: list[Group] = []
    for names in plan.groups:
        members = [of[name] for name in names if name in of]
        if not members:
            continue
        levels, sizes, errors = [], [], []
        for level in LEVELS:
            schemes = [options.scheme(level[0], unit.spec.shape[1], level[1]) for unit in members]
            size = sum(
                sum(output.nbytes for output in dataclasses.replace(unit, scheme=form).outputs)
                for unit, form in zip(members, schemes, strict=True)
            )
            if size in sizes:  # no group divides K: this level is the one before
                continue
            parts, error = _quantized(read or stored, members, schemes, options, threads)
            if not levels:
                with weights.exchanged(names, parts):
                    runner.release()  # what it recorded has the matrices from before
                    runner.reserve(1)
                    smallest = score(pieces, logits, lambda ids: exact[tuple(ids)])["kl_mean"]
            levels.append(level)
            sizes.append(size)
            errors.append(error)
        kl = [smallest * error / errors[0] if errors[0] else 0.0 for error in errors]
        found.append(Group(tuple(unit.spec.module for unit in members), levels, sizes, kl))
    return found


def _quantized(
    read: Read, members: Sequence[Unit], schemes: Sequence[Scheme | None], options: Options, threads: int
) -> tuple[list[Weight], float]:
    """The matrices of a group in their schemes, and the sum of their squared errors."""
    parts: list[Weight] = []
    error = 0.0
    for unit, form in zip(members, schemes, strict=True):
        assert form is not None
        weight = read(unit.spec.name)
        weight = weight.float() if options.rotate else weight.to(unit.dtype)
        rows = quantize_rows(weight, form.bits, form.group_size, form.symmetric, options.plain_method, threads)
        zero = None if form.symmetric else pack_zero_point(rows.zero, form.bits)
        shape = (weight.shape[0], weight.shape[1])
        parts.append(QuantizedWeight(rows.codes, rows.scale, zero, form.bits, form.group_size, shape))
        error += float(rows.squared_error.numpy().sum())
    return parts, error
