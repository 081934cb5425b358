"""The tensors of a source as a conversion's options want them: as they are, rotated, calibrated."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nibblelm.arguments import select_device
from nibblelm.checkpoint import Checkpoint
from nibblelm.config import DecoderConfig
from nibblelm.converter.calibrated import Awq, Gptq
from nibblelm.converter.calibration import Walk, read_calibration
from nibblelm.converter.plan import Unit
from nibblelm.converter.rotate import rotated
from nibblelm.converter.source import whole
from nibblelm.converter.wiring import folds
from nibblelm.errors import ConvertError
from nibblelm.models import family
from nibblelm.ops.types import QuantizedWeight
from nibblelm.quant.rows import QuantizedRows
from nibblelm.quant.schemes import CALIBRATED, Options

Made = QuantizedRows | Tensor | None
"""Finished rows of a matrix, a tensor to quantize or to store, or None: the source's own, in blocks."""


def _require_walkable(config: DecoderConfig, method: str) -> None:
    """Raise ConvertError for a model whose layers cannot be run one by one over a text."""
    why = ""
    if config.gap is not None:
        why = "its prompts' tokens see each other, which a text has no place for"
    elif config.embedding_size not in (None, config.hidden_size):
        why = "matrices stand before its layers"
    if why:
        raise ConvertError(f"model_type {config.model_type!r}: {method} is not supported, {why}; use mse")


class Prepared:
    """What to write for each unit. Reads the calibration text, if there is one, but no weights yet.

    record       what nibblelm.json says of the calibration; None without
    fingerprint  what decides the output's bytes besides source and options
    read         source tensor and the SHA-256 of what was read of it, every time that it was
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        units: Sequence[Unit],
        options: Options,
        calibration: str | Path | None,
        device: str,
    ) -> None:
        self._checkpoint, self._options = checkpoint, options
        self._units = {unit.spec.name: unit for unit in units}
        self._config = family(checkpoint.config).read_config(checkpoint.config)
        args = (checkpoint.config, self._config, options.seed)
        self._read = rotated(self._stored, *args) if options.rotate else self._stored
        self.read: list[tuple[str, str]] = []
        self.record: dict[str, Any] | None = None
        self.fingerprint: dict[str, Any] = {}
        if options.method in CALIBRATED or device != "auto":  # which would wake a card for nothing
            self._device = select_device(device)
        if options.method in CALIBRATED:
            _require_walkable(self._config, options.method)
            args = (checkpoint.folder, self._config, options.samples, options.seed, options.held_out)
            self._calibration = read_calibration(calibration, *args)
            self.record = self._calibration.record
            self.fingerprint = {"calibration": self.record, "device": self._device.type}
        elif calibration is not None and not options.held_out:
            raise ConvertError(f"method {options.method} looks at no text; calibration is for {', '.join(CALIBRATED)}")

    def _stored(self, name: str) -> Tensor:
        """A tensor as if the source were in the dtype asked for."""
        source, digest = self._units[name].source, hashlib.sha256()
        dtype = self._options.stored_dtype(self._units[name].source_dtype, matrix=False)
        tensor = whole(self._checkpoint, source, digest, dtype)
        self.read.append((source, digest.hexdigest()))
        return tensor.T.contiguous() if self._units[name].spec.transposed else tensor

    def maker(self, stored: Callable[[Unit], QuantizedWeight]) -> Callable[[Unit], Made]:
        """unit -> what to write; `stored` gives the weight that an earlier run wrote for a unit."""

        def plain(unit: Unit) -> Made:
            turned = unit.spec.transposed and unit.scheme is not None
            if not (self._options.rotate or turned):
                return None
            value = self._read(unit.spec.name).float()
            return value.T.contiguous() if unit.spec.transposed and unit.scheme is None else value

        if self.record is None:
            return plain
        model = (self._checkpoint.config, self._config)
        streams = Gptq.streams if self._options.method == "gptq" else Awq.streams
        walk = Walk(self._calibration.ids, *model, self._read, self._device, streams)
        args = (walk, self._units, self._read, stored)
        calibrated = Gptq(*args) if self._options.method == "gptq" else Awq(*args, folds=folds(*model))

        def made(unit: Unit) -> Made:
            result = calibrated.result(unit)
            return plain(unit) if result is None else result

        return made
