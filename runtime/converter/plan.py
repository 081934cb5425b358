"""What a conversion writes: one unit per matrix or vector, each from one tensor of the source."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nibblelm.checkpoint import Checkpoint, Scheme, quantization_config
from nibblelm.checkpoint.folder import FLOATS
from nibblelm.checkpoint.writer import OutputTensor
from nibblelm.errors import ConvertError
from nibblelm.quant.schemes import DTYPES, KeepRules, Options
from nibblelm.weights import TensorSpec

_HEAD = "lm_head"  # of every family in memory, and in most files


@dataclass(frozen=True)
class Unit:
    """One tensor of the source and what becomes of it.

    `scheme` None keeps every value, in `dtype`; scales are in `dtype` too.
    """

    spec: TensorSpec
    source: str
    source_dtype: torch.dtype
    dtype: torch.dtype
    scheme: Scheme | None

    @property
    def parameters(self) -> int:
        count = 1
        for size in self.spec.shape:
            count *= size
        return count

    @property
    def groups(self) -> int:
        """Scales per row."""
        scheme = self.scheme
        return 1 if scheme is None or scheme.group_size == -1 else self.spec.shape[1] // scheme.group_size

    @property
    def outputs(self) -> list[OutputTensor]:
        """The tensors written for this unit."""
        if self.scheme is None:
            return [OutputTensor(self.spec.name, self.dtype, self.spec.stored_shape)]
        rows, cols = self.spec.shape
        per_word = 32 // self.scheme.bits
        parts = [
            OutputTensor(f"{self.spec.name}_packed", torch.int32, (rows, -(-cols // per_word))),
            OutputTensor(f"{self.spec.name}_scale", self.dtype, (rows, self.groups)),
            OutputTensor(f"{self.spec.name}_shape", torch.int64, (2,)),
        ]
        if not self.scheme.symmetric:
            parts.append(OutputTensor(f"{self.spec.name}_zero_point", torch.int32, (-(-rows // per_word), self.groups)))
        return parts


def plan_units(checkpoint: Checkpoint, specs: Sequence[TensorSpec], options: Options) -> list[Unit]:
    """Every unit of the output, in the order of the model.

    specs  the model's `tensor_plan`
    Raises ConvertError for a tensor of a dtype that cannot be converted, and for idle keep rules.
    """
    rules = KeepRules(options.keep)
    partner: dict[str, str] = {}  # of a tied pair, either stands for both
    for table, module in [(spec, spec.head) for spec in specs if spec.head]:
        head = f"{module}.weight"
        if not _stays_tied(checkpoint, options, rules, table.name, module):
            specs = [*specs, TensorSpec(head, "head", table.shape)]
        partner |= {head: table.name, table.name: head}
    units = [_unit(checkpoint, spec, partner, options, rules) for spec in specs]
    rules.check_used()
    return units


def _stays_tied(checkpoint: Checkpoint, options: Options, rules: KeepRules, table: str, module: str) -> bool:
    """Whether one 16-bit table goes on serving both ends."""
    head = f"{module}.weight"
    differs = head in checkpoint and table in checkpoint and not _same(checkpoint, head, table)
    if options.keep_tied and differs:
        raise ConvertError(
            f"{head} and {table} are tied by config.json, but the source ships both and they differ; "
            "convert without keep_tied"
        )
    if options.keep_tied:
        return True
    kept = rules.match(module, _HEAD)
    return kept == (16, None) and options.embeddings is None and not options.rotate and not differs


def _same(checkpoint: Checkpoint, first: str, second: str) -> bool:
    same = checkpoint.info(first).dtype == checkpoint.info(second).dtype
    for begin in range(0, checkpoint.info(first).shape[0] if same else 0, 4096):
        end = min(begin + 4096, checkpoint.info(first).shape[0])
        same = same and torch.equal(checkpoint.rows(first, begin, end), checkpoint.rows(second, begin, end))
        checkpoint.release(first)
        checkpoint.release(second)
    return same


def _unit(
    checkpoint: Checkpoint, spec: TensorSpec, partner: Mapping[str, str], options: Options, rules: KeepRules
) -> Unit:
    source = spec.name if spec.name in checkpoint else partner.get(spec.name, spec.name)
    info = checkpoint.info(source)
    if spec.kind != "vector" and info.dtype not in FLOATS:
        raise ConvertError(f"{source} is {info.dtype}; fp32, bf16 and fp16 weights can be converted")
    scheme = _scheme(spec, options, rules)
    renamed = spec.kind == "head" and spec.module != _HEAD  # which transformers does not convert to the model's dtype
    dtype = options.stored_dtype(info.dtype, matrix=scheme is None and spec.kind != "vector" and not renamed)
    return Unit(spec, source, info.dtype, dtype, scheme)


def _scheme(spec: TensorSpec, options: Options, rules: KeepRules) -> Scheme | None:
    if spec.kind == "vector":
        return None
    columns = spec.shape[1]
    if spec.kind == "embedding":
        return None if options.embeddings is None else options.scheme(options.embeddings, columns)
    kept = rules.match(spec.module, *[_HEAD] * (spec.kind == "head"))
    if kept is not None:
        return options.scheme(kept[0], columns, kept[1])
    if spec.kind == "head":
        return Scheme(8, -1, options.symmetric)
    return options.scheme(options.bits, columns)


def fallbacks(units: Sequence[Unit], options: Options) -> list[str]:
    """One line per kind of matrix whose K the asked group size does not divide."""
    found: dict[tuple[int, int, int], list[str]] = {}
    rules = KeepRules(options.keep)
    for unit in units:
        if unit.scheme is None or unit.spec.kind == "head":
            continue
        kept, columns = rules.match(unit.spec.module), unit.spec.shape[1]
        asked = options.asked_group(unit.scheme.bits) if kept is None or kept[1] is None else kept[1]
        if unit.scheme.group_size != asked:
            found.setdefault((asked, columns, unit.scheme.group_size), []).append(unit.spec.module)
    lines = []
    for (asked, columns, group), modules in found.items():
        instead = "one scale per row" if group == -1 else f"groups of {group}"
        kinds = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in modules))
        lines.append(
            f"groups of {asked} do not divide the {columns} columns of {len(modules)} matrices ({kinds}): {instead}"
        )
    return lines


def output_config(config: dict[str, Any], units: Sequence[Unit], options: Options) -> dict[str, Any]:
    """The source's config.json with quantization_config, the dtype asked for, and untied where a head is written."""
    # transformers has every head as lm_head in memory, also where the file calls it otherwise: both names are listed.
    named = [(name, u) for u in units for name in dict.fromkeys([u.spec.module, *[_HEAD] * (u.spec.kind == "head")])]
    schemes = {name: unit.scheme for name, unit in named if unit.scheme is not None}
    ignore = [name for name, unit in named if unit.scheme is None and unit.spec.kind in ("linear", "head")]
    result = {key: value for key, value in config.items() if key != "quantization_config"}
    if options.dtype != "auto":
        name = str(DTYPES[options.dtype]).removeprefix("torch.")
        result |= {key: name for key in ("dtype", "torch_dtype") if key in result} or {"dtype": name}
    if any(unit.spec.kind == "head" for unit in units):
        result["tie_word_embeddings"] = False
    elif _HEAD not in ignore:
        ignore.append(_HEAD)  # it is a Linear module in memory, with the table as its weight
    if schemes:
        result["quantization_config"] = quantization_config(schemes, ignore)
    return result
