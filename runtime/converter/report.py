"""What a conversion tells: the report it returns, and nibblelm.json beside the weights."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nibblelm import __version__
from nibblelm.checkpoint import Checkpoint
from nibblelm.checkpoint.writer import OutputFile
from nibblelm.converter.plan import Unit
from nibblelm.quant.schemes import Options

_LAYER = re.compile(r".*?\.\d+(?=\.)")


@dataclass(frozen=True)
class TensorReport:
    """How one matrix was stored. `relative_error` is the root of sum (w - w')^2 / sum w^2; group_size -1 is per row."""

    module: str
    bits: int
    group_size: int
    symmetric: bool
    parameters: int
    relative_error: float


@dataclass(frozen=True)
class ConvertReport:
    """What a conversion did. Sizes are bytes of tensors; `tensors` are the quantized matrices in model order."""

    src: str
    dst: str
    method: str
    parameters: int
    source_bytes: int
    output_bytes: int
    bits_per_weight: float
    quantized_bits_per_weight: float
    files: list[str]
    tensors: list[TensorReport]
    notes: list[str]
    seconds: float
    reused_tensors: int
    target: dict[str, Any] | None = None  # with target_kl: what was asked for, reached and promoted

    def worst_per_layer(self) -> list[TensorReport]:
        """The matrix with the largest relative error of each layer, largest first."""
        worst: dict[str, TensorReport] = {}
        for tensor in sorted(self.tensors, key=lambda tensor: -tensor.relative_error):
            layer = _LAYER.match(tensor.module)
            worst.setdefault(layer.group() if layer else tensor.module, tensor)
        return list(worst.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def build_report(
    checkpoint: Checkpoint,
    dst: Path,
    options: Options,
    units: Sequence[Unit],
    files: Sequence[OutputFile],
    errors: dict[str, float],
    notes: list[str],
) -> ConvertReport:
    parameters = sum(unit.parameters for unit in units)
    sizes = {unit.spec.name: sum(output.nbytes for output in unit.outputs) for unit in units}
    quantized = [unit for unit in units if unit.scheme is not None]
    quantized_bits = 8 * sum(sizes[unit.spec.name] for unit in quantized)
    tensors = [
        TensorReport(
            unit.spec.module,
            unit.scheme.bits,
            unit.scheme.group_size,
            unit.scheme.symmetric,
            unit.parameters,
            errors[unit.spec.module],
        )
        for unit in quantized
        if unit.scheme is not None
    ]
    return ConvertReport(
        src=str(checkpoint.folder),
        dst=str(dst),
        method=options.method,
        parameters=parameters,
        source_bytes=sum(checkpoint.info(name).nbytes for name in checkpoint.names()),
        output_bytes=sum(sizes.values()),
        bits_per_weight=8 * sum(sizes.values()) / parameters,
        quantized_bits_per_weight=quantized_bits / max(sum(unit.parameters for unit in quantized), 1),
        files=[file.name for file in files],
        tensors=tensors,
        notes=notes,
        seconds=0.0,
        reused_tensors=0,
    )


def build_record(
    report: ConvertReport,
    options: Options,
    calibration: dict[str, Any] | None,
    source_files: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """The contents of nibblelm.json: what the standard has no place for. Nothing that differs from run to run."""
    return {
        "nibblelm_version": __version__,
        "method": report.method,
        "options": dataclasses.asdict(options),
        "calibration": calibration,
        "parameters": report.parameters,
        "bits_per_weight": report.bits_per_weight,
        "quantized_bits_per_weight": report.quantized_bits_per_weight,
        "notes": report.notes,
        **({} if report.target is None else {"target": report.target}),
        "tensors": {
            tensor.module: {
                key: value for key, value in dataclasses.asdict(tensor).items() if key not in ("module", "parameters")
            }
            for tensor in report.tensors
        },
        "source": source_files,
    }
