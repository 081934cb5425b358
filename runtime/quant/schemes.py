"""Which scheme each matrix of a model is stored in."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from nibblelm.checkpoint import Scheme
from nibblelm.errors import ConvertError
from nibblelm.quant.rows import METHODS

CALIBRATED = ("gptq", "awq")
"""Methods that look at the activations of a text."""

GROUP_SIZES = (-1, 32, 64, 128)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_GROUP = {8: -1, 4: 128}
"""8 bits are accurate enough with one scale per row; 4 bits without calibration need groups."""


@dataclass(frozen=True)
class Options:
    """What the user asked for; see `convert`."""

    bits: Literal[4, 8] = 4
    group_size: int | None = None
    symmetric: bool = False
    method: str = "mse"
    keep: tuple[str, ...] = ()
    keep_tied: bool = False
    embeddings: Literal[4, 8] | None = None
    dtype: str = "auto"
    rotate: bool = False
    samples: int = 128
    seed: int = 0
    held_out: int = 0  # pieces of the calibration text that are kept for measuring

    def __post_init__(self) -> None:
        _one_of("bits", self.bits, (4, 8))
        _one_of("group_size", self.group_size, (None, *GROUP_SIZES))
        _one_of("method", self.method, (*METHODS, *CALIBRATED))
        _one_of("dtype", self.dtype, ("auto", *DTYPES))
        _one_of("embeddings", self.embeddings, (None, 4, 8))
        for name in ("symmetric", "keep_tied", "rotate"):
            if not isinstance(value := getattr(self, name), bool):
                raise ConvertError(f"{name} is {value!r}; supported: True or False")
        for name in ("samples", "seed"):
            if type(value := getattr(self, name)) is not int:
                raise ConvertError(f"{name} is {value!r}; supported: a whole number")
        if self.keep_tied and self.embeddings is not None:
            raise ConvertError("keep_tied keeps one 16-bit table for both ends, so embeddings cannot be quantized")
        if self.keep_tied and self.rotate:
            raise ConvertError("rotate folds the last norm into the head, so embedding and head cannot stay tied")
        if self.samples < 1 or not 0 <= self.seed < 2**62:
            raise ConvertError(f"samples must be at least 1 and seed from 0, got {self.samples} and {self.seed}")

    @property
    def plain_method(self) -> str:
        """How matrices that are not calibrated (the head, an embedding table) get their scales."""
        return "mse" if self.method in CALIBRATED else self.method

    def stored_dtype(self, source: torch.dtype, matrix: bool) -> torch.dtype:
        """What a tensor is written in when it is not quantized (`matrix`: and not a vector), and the scales of it."""
        if not source.is_floating_point or (self.dtype == "auto" and (source != torch.float32 or not matrix)):
            return source
        return torch.bfloat16 if self.dtype == "auto" else DTYPES[self.dtype]

    def scheme(self, bits: int, columns: int, group: int | None = None) -> Scheme | None:
        """The scheme of a matrix with K = `columns` at `bits`; None for 16. `group_size` is for the main width."""
        if bits == 16:
            return None
        asked = self.asked_group(bits) if group is None else group
        return Scheme(8 if bits == 8 else 4, dividing_group(columns, asked), self.symmetric)

    def asked_group(self, bits: int) -> int:
        """The group size for matrices of that width, before it is made to divide K, where no rule names one."""
        return DEFAULT_GROUP[bits] if bits != self.bits or self.group_size is None else self.group_size


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed or type(value) not in map(type, allowed):  # 4.0 and True are in some, too
        raise ConvertError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}")


def dividing_group(columns: int, group: int) -> int:
    """`group`, or the largest of 128, 64, 32 below it that divides `columns`, or -1 (per row).

    Readers of the format refuse a group that does not divide K.
    """
    if group == -1 or columns % group == 0:
        return group
    return next((g for g in (128, 64, 32) if g < group and columns % g == 0), -1)


class KeepRules:
    """`regex=bits` and `regex=bits:group` rules on module names; the last that matches wins."""

    def __init__(self, rules: Sequence[str]) -> None:
        self._rules: list[tuple[str, re.Pattern[str], tuple[int, int | None]]] = []
        self._used: set[str] = set()
        for rule in rules:
            pattern, separator, kept = rule.rpartition("=")
            bits, colon, group = kept.partition(":")
            known = bits in ("4", "8") and group in map(str, GROUP_SIZES) if colon else bits in ("4", "8", "16")
            if not separator or not known:
                raise ConvertError(
                    f"keep rule {rule!r} must be 'regex=bits' with 4, 8 or 16 bits, or 'regex=bits:group' with 4 or 8 "
                    f"bits and groups of {', '.join(map(str, GROUP_SIZES))} (-1 per row)"
                )
            try:
                self._rules.append((rule, re.compile(pattern), (int(bits), int(group) if colon else None)))
            except re.error as cause:
                raise ConvertError(f"keep rule {rule!r}: {cause}") from cause

    def match(self, *names: str) -> tuple[int, int | None] | None:
        """(bits, group or None) for a module, by any of its names; None where no rule matches. Patterns may match
        anywhere in a name."""
        matching = [(rule, kept) for rule, pattern, kept in self._rules if any(map(pattern.search, names))]
        self._used.update(rule for rule, _ in matching)
        return matching[-1][1] if matching else None

    def check_used(self) -> None:
        """Raise ConvertError naming rules that matched no module: most likely a typing error."""
        idle = [rule for rule, _, _ in self._rules if rule not in self._used]
        if idle:
            raise ConvertError(
                f"keep rules that match no Linear module or lm_head: {', '.join(idle)} "
                "(embedding tables are chosen with embeddings)"
            )
