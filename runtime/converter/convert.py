"""Convert a Hugging Face checkpoint to int4 / int8, tensor by tensor, into a folder that transformers opens too."""

import dataclasses
import hashlib
import json
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from nibblelm import __version__
from nibblelm.arguments import torch_threads, usable_threads
from nibblelm.checkpoint import Checkpoint, file_in
from nibblelm.checkpoint.journal import Journal
from nibblelm.checkpoint.work_folder import WorkFolder
from nibblelm.checkpoint.writer import FolderWriter, OutputFile, plan_files, typed_write_errors, write_json
from nibblelm.converter.plan import Unit, fallbacks, output_config, plan_units
from nibblelm.converter.prepared import Prepared
from nibblelm.converter.report import ConvertReport, build_record, build_report
from nibblelm.converter.source import SourceHashes, blocks, check_finite
from nibblelm.converter.target import search
from nibblelm.errors import ConvertError
from nibblelm.models import open_model, tensor_plan, unopened
from nibblelm.ops.types import QuantizedWeight
from nibblelm.quant.affine import pack_zero_point
from nibblelm.quant.rows import QuantizedRows, quantize_rows
from nibblelm.quant.schemes import CALIBRATED, Options
from nibblelm.sizes import parse_size
from nibblelm.tokenizer.files import TEMPLATES
from nibblelm.weights import check_tensors

RECORD = "nibblelm.json"
_COPIED = (".json", ".model", ".txt", ".jinja", ".tiktoken", ".md")
_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")

Progress = Callable[[int, int, str], None]
"""Called as (source bytes done, source bytes in all, tensor) after every block."""


def convert(
    src: str | Path,
    dst: str | Path,
    *,
    bits: Literal[4, 8] = 4,
    group_size: int | None = None,
    symmetric: bool = False,
    method: str = "mse",
    keep: Sequence[str] = (),
    keep_tied: bool = False,
    embeddings: Literal[4, 8] | None = None,
    dtype: str = "auto",
    rotate: bool = False,
    calibration: str | Path | None = None,
    samples: int | None = None,
    seed: int | None = None,
    device: str = "auto",
    max_shard_size: int | str = "4GB",
    resume: bool = False,
    overwrite: bool = False,
    strict: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    target_kl: float | None = None,
    max_size: int | str | None = None,
) -> ConvertReport:
    """Quantize the Linear layers of a model folder or hub id into `dst` (compressed-tensors `pack-quantized`).

    bits, group_size  4 or 8; -1 (one scale per row), 32, 64 or 128. Default groups: 128 at 4 bits, -1 at 8.
                      A matrix whose K the group does not divide takes the largest of 128, 64, 32 that does, else -1
    symmetric         zero-point fixed in the middle instead of one per row or group
    method            "mse" searches the clip of least squared error, "minmax" takes the whole range. Calibrated on a
                      text: "gptq" makes up for each rounding in the codes that follow, "awq" scales columns that see
                      large inputs
    keep              "regex=bits" rules on module names, bits 4, 8 or 16, or "regex=bits:group"; the last that matches
                      wins
    keep_tied         keep one 16-bit table for embedding and head. Otherwise the head becomes int8 per row, and a
                      tied model gets a head of its own
    embeddings        4 or 8 also quantizes the embedding table, which transformers cannot open
    dtype             "fp32", "bf16" or "fp16": convert as if the source were in it. "auto" leaves it as it is, except
                      that embedding tables and kept matrices of an fp32 source are stored in bf16
    rotate            fold random rotations of the residual stream and of the heads' values into the matrices
    calibration       text file for gptq and awq, documents separated by <|endoftext|>; None is the bundled one
    samples, seed     pieces of 512 tokens of it (128); the seed (0) draws them, and the rotation
    device            where calibrated methods compute: "cpu", "cuda", or "auto" (CUDA when it works)
    max_shard_size    bytes, or text such as "4GB" or "500MiB"
    resume            go on with what an interrupted conversion of the same source and options finished
    overwrite         replace a model folder at `dst`, once the new one is complete; start an unfinished one afresh
    strict            refuse unknown keys in config.json
    threads           default: the cores this process may use. The result of minmax and mse does not depend on it
    target_kl         start from int4 per row and promote the matrices that hurt most (q/k/v and gate/up together) to
                      groups of 128, of 32, or to int8, until the KL divergence from the source's next-token
                      distributions is at most that many nats per token, measured on pieces of the calibration text
                      that nothing else sees; `ConvertReport.target` says what it came to. bits, group_size and keep
                      are then chosen here
    max_size          bytes, or text such as "4GB", that the tensors may then take; the best within is written

    `dst` appears in one step when everything is done. Raises ConvertError, ConfigError or CheckpointError; what is
    finished by then is kept for `resume`.
    """
    started = time.monotonic()
    if not str(dst).strip():
        raise ConvertError("the destination is an empty path; name a folder")
    rules = (keep,) if isinstance(keep, str) else tuple(keep)
    drawn = (128 if samples is None else samples, 0 if seed is None else seed)
    options = Options(bits, group_size, symmetric, method, rules, keep_tied, embeddings, dtype, rotate, *drawn)
    if samples is not None and method not in CALIBRATED:
        raise ConvertError(f"samples are for {', '.join(CALIBRATED)}; method {method} takes none")
    if seed is not None and method not in CALIBRATED and not rotate and target_kl is None:
        raise ConvertError(
            f"method {method} draws nothing; a seed is for {', '.join(CALIBRATED)}, rotate and target_kl"
        )
    arguments = (calibration, device, parse_size(max_shard_size), strict, usable_threads(threads))
    checkpoint = open_model(src)
    if max_size is not None and target_kl is None:
        raise ConvertError("max_size limits what target_kl promotes; give a target_kl too")

    def trial(options: Options, folder: Path) -> ConvertReport:
        return _convert(checkpoint, folder, options, *arguments, resume=False, overwrite=True, progress=progress)

    target = None
    with torch_threads(arguments[-1]):
        if target_kl is not None:
            limit = None if max_size is None else parse_size(max_size, "max_size")
            with WorkFolder(Path(dst), checkpoint.folder, resume, overwrite, 0):
                pass  # refuses what it would refuse after the search
            units = _plan(checkpoint, options, strict)
            given = (units, options, target_kl, limit, calibration, device, arguments[-1])
            options, target = search(checkpoint, *given, trial)
        report = _convert(checkpoint, Path(dst), options, *arguments, resume, overwrite, progress, target)
    return dataclasses.replace(report, seconds=time.monotonic() - started)


def _convert(
    checkpoint: Checkpoint,
    dst: Path,
    options: Options,
    calibration: str | Path | None,
    device: str,
    shard_bytes: int,
    strict: bool,
    threads: int,
    resume: bool,
    overwrite: bool,
    progress: Progress | None,
    target: dict[str, Any] | None = None,
) -> ConvertReport:
    """One conversion with schemes that are known; `target` is what the search for them says."""
    companions = _companions(checkpoint)
    units = _plan(checkpoint, options, strict)
    files = plan_files([unit.outputs for unit in units], shard_bytes)
    notes = fallbacks(units, options)
    if options.embeddings is not None:
        warnings.warn("transformers cannot open a folder with a quantized embedding table", stacklevel=2)
    if any(unit.scheme is not None for unit in units) and (why := unopened(checkpoint.config)):
        warnings.warn(f"transformers cannot open the folder: {why}", stacklevel=2)
    source = Prepared(checkpoint, units, options, calibration, device)
    fingerprint = _fingerprint(checkpoint, options, files) | source.fingerprint
    work = WorkFolder(dst, checkpoint.folder, resume, overwrite, sum(file.nbytes for file in files))
    with work, Journal(work.path, fingerprint) as journal, FolderWriter(work.path, files) as writer:
        with SourceHashes(checkpoint) as hashes:
            conversion = _Conversion(checkpoint, writer, journal, options, source, threads, progress)
            errors = conversion.run(units)
            source_files = hashes.files([*conversion.read, *source.read])
        report = build_report(checkpoint, dst, options, units, files, errors, notes)
        report = dataclasses.replace(report, target=target)
        writer.finish()
        for path in companions:
            to = work.path / path.relative_to(checkpoint.folder)
            with typed_write_errors(to):
                to.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, to)
        write_json(work.path / RECORD, build_record(report, options, source.record, source_files))
        write_json(work.path / "config.json", output_config(checkpoint.config, units, options))
        work.commit()
    return dataclasses.replace(report, reused_tensors=conversion.reused)


def _plan(checkpoint: Checkpoint, options: Options, strict: bool) -> list[Unit]:
    if checkpoint.quantization is not None:
        raise ConvertError(
            f"{checkpoint.folder} is quantized already; convert from the model's full-precision checkpoint"
        )
    specs = tensor_plan(checkpoint.config, strict)
    check_tensors(checkpoint, specs)
    return plan_units(checkpoint, specs, options)


def _fingerprint(checkpoint: Checkpoint, options: Options, files: Sequence[OutputFile]) -> dict[str, Any]:
    """Everything that decides the output's bytes.

    The weights stand here by size and time of change, which refuses most changes at once; `SourceHashes` finds all.
    """
    paths = {checkpoint.info(name).file for name in checkpoint.names()}
    stats = {path.name: path.stat() for path in sorted(paths)}
    return {
        "version": __version__,
        "options": dataclasses.asdict(options),
        "source": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
        "config": hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode()).hexdigest(),
        "layout": hashlib.sha256(b"".join(file.header for file in files)).hexdigest(),
    }


class _Conversion:
    """Writes the units one by one, each in blocks of rows, and notes finished ones in the journal."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        writer: FolderWriter,
        journal: Journal,
        options: Options,
        source: Prepared,
        threads: int,
        progress: Progress | None,
    ) -> None:
        self._checkpoint, self._writer, self._journal = checkpoint, writer, journal
        self._method, self._threads, self._progress = options.plain_method, threads, progress
        self._source, self._made = source, source.maker(self._stored_weight)
        self._done = self._total = 0
        self.reused = 0
        self.read: list[tuple[str, str]] = []  # source tensor and the SHA-256 of what was read of it, also before

    def run(self, units: Sequence[Unit]) -> dict[str, float]:
        """Convert what the journal does not have yet; returns the relative error per quantized module."""
        self._total = sum(unit.parameters * unit.source_dtype.itemsize for unit in units)
        errors: dict[str, float] = {}
        for unit in units:
            record = self._journal.records.get(unit.spec.name)
            if record is not None and record["sha256"] == self._stored_digest(unit):
                self.reused += 1
                self._advance(unit, unit.parameters)
            else:
                record = self._convert(unit)
                self._journal.add(unit.spec.name, record)
            self.read.append((unit.source, record["source"]))
            if unit.scheme is not None:
                errors[unit.spec.module] = record["relative_error"]
        return errors

    def _advance(self, unit: Unit, elements: int) -> None:
        self._done += elements * unit.source_dtype.itemsize
        if self._progress is not None:
            self._progress(self._done, self._total, unit.spec.name)

    def _stored_digest(self, unit: Unit) -> str:
        digests = {output.name: hashlib.sha256() for output in unit.outputs}
        for output in unit.outputs:
            for piece in self._writer.read(output):
                digests[output.name].update(piece)
        return _combined(digests)

    def _stored_weight(self, unit: Unit) -> QuantizedWeight:
        """What an earlier run wrote for a finished matrix."""
        parts = {
            output.name.rpartition("_")[2]: torch.frombuffer(
                bytearray(b"".join(self._writer.read(output))), dtype=output.dtype
            ).view(output.shape)
            for output in unit.outputs
        }
        scheme, (n, k) = unit.scheme, unit.spec.shape
        assert scheme is not None
        codes, scale, zero = parts["packed"], parts["scale"], parts.get("point")
        return QuantizedWeight(codes, scale, zero, scheme.bits, scheme.group_size, (n, k))

    def _convert(self, unit: Unit) -> dict[str, Any]:
        digests = {output.name: hashlib.sha256() for output in unit.outputs}
        positions = dict.fromkeys(digests, 0)

        def write(name: str, data: torch.Tensor) -> None:
            written = self._writer.write(name, positions[name], data)
            digests[name].update(written)
            positions[name] += len(written)

        error = norm = 0.0
        made = self._made(unit)
        digest = hashlib.sha256()
        for block in blocks(self._checkpoint, unit.source, digest, unit.dtype) if made is None else [made]:
            if unit.scheme is not None:
                squared = self._quantize(unit, block, write)
                error, norm = error + squared[0], norm + squared[1]
            elif isinstance(block, torch.Tensor):
                stored = block.to(unit.dtype)
                if made is not None:
                    check_finite(f"{unit.spec.name} in {unit.dtype}", 0, stored)
                write(unit.spec.name, stored)
            self._advance(unit, block.numel() if isinstance(block, torch.Tensor) else unit.parameters)
        if unit.scheme is not None:
            write(f"{unit.spec.name}_shape", torch.tensor(unit.spec.shape))
        source = digest.hexdigest() if made is None else dict(self._source.read)[unit.source]
        record = {"sha256": _combined(digests), "source": source}
        return record if unit.scheme is None else {**record, "relative_error": (error / norm) ** 0.5 if norm else 0.0}

    def _quantize(
        self, unit: Unit, block: torch.Tensor | QuantizedRows, write: Callable[[str, torch.Tensor], None]
    ) -> tuple[float, float]:
        scheme, name = unit.scheme, unit.spec.name
        assert scheme is not None
        args = (scheme.bits, scheme.group_size, scheme.symmetric, self._method, self._threads, unit.dtype)
        part = quantize_rows(block, *args) if isinstance(block, torch.Tensor) else block
        write(f"{name}_packed", part.codes)
        write(f"{name}_scale", part.scale)
        if not scheme.symmetric:
            write(f"{name}_zero_point", pack_zero_point(part.zero, scheme.bits))
        # numpy sums in one thread: the last digit must not depend on how many there are
        return float(part.squared_error.numpy().sum()), float(part.squared_norm.numpy().sum())


def _combined(digests: dict[str, Any]) -> str:
    return hashlib.sha256(b"".join(digest.digest() for digest in digests.values())).hexdigest()


def _companions(checkpoint: Checkpoint) -> list[Path]:
    """Tokenizer, generation and licence files; never code, and nothing that describes the source's weights."""
    names = sorted(path.name for path in checkpoint.folder.iterdir())
    wanted = [name for name in names if Path(name).suffix in _COPIED or name.upper().startswith(_LICENCES)]
    written = {"config.json", RECORD}
    found = [checkpoint.file(name) for name in wanted if name not in written and not name.endswith(".index.json")]
    templates = sorted((checkpoint.folder / TEMPLATES).glob("*.jinja"))
    found += [file_in(path.parent, path.name, checkpoint.folder) for path in templates]
    return [path for path in found if path is not None and path.is_file()]
