"""Regular expressions out of a checkpoint's configuration, matched in bounded time.

`re` backtracks: a short hostile pattern such as `(a+)+$` keeps it busy for years. Here a pattern maps the set of
positions where a match may stand to the set where it may stand afterwards, so no position is tried twice
(Thompson 1968). A set is the bits of an integer. Only whether a name matches is wanted, so greedy or not is the same.
"""

import re
from importlib import import_module
from typing import Any

from nibblelm.checkpoint.json_object import shown
from nibblelm.errors import ConfigError

_MAX_PATTERN, _MAX_NAME, _MAX_NESTING = 512, 512, 2
_REPEATS, _LOOKS = ("MAX_REPEAT", "MIN_REPEAT"), ("ASSERT", "ASSERT_NOT")
_SINGLE = ("LITERAL", "NOT_LITERAL", "ANY", "IN")
_CATEGORIES = {"DIGIT": r"\d", "NOT_DIGIT": r"\D", "SPACE": r"\s", "NOT_SPACE": r"\S", "WORD": r"\w", "NOT_WORD": r"\W"}


def _accepts(kind: str, value: Any, char: str) -> bool:
    """Whether a node that stands for one character takes `char`."""
    if kind == "LITERAL":
        return ord(char) == value
    if kind == "NOT_LITERAL":
        return ord(char) != value
    if kind == "ANY":
        return char != "\n"
    if kind == "RANGE":
        return value[0] <= ord(char) <= value[1]
    if kind == "CATEGORY":
        return re.match(_CATEGORIES[str(value).removeprefix("CATEGORY_")], char) is not None
    parts = [(str(part), argument) for part, argument in value]  # IN, whose first part may be NEGATE
    negated = parts[0][0] == "NEGATE"
    return any(_accepts(part, argument, char) for part, argument in parts[negated:]) != negated


class _Subject:
    """One name, and where each of its characters and anchors stands as sets of positions."""

    def __init__(self, name: str) -> None:
        self.chars: dict[str, int] = {}
        for position, char in enumerate(name):
            self.chars[char] = self.chars.get(char, 0) | 1 << position
        self.accepted: dict[tuple[str, int], int] = {}
        end = 1 << len(name)
        last_newline = 1 << (len(name) - 1) if name.endswith("\n") else 0
        self.anchors = {"AT_BEGINNING": 1, "AT_BEGINNING_STRING": 1, "AT_END": end | last_newline, "AT_END_STRING": end}

    def after(self, nodes: Any, positions: int) -> int:
        """The set of positions where `nodes` can end when they begin at any of `positions`."""
        for op, value in nodes:
            if not positions:
                break
            positions = self._step(str(op), value, positions)
        return positions

    def _step(self, kind: str, value: Any, positions: int) -> int:
        if kind in _SINGLE:
            key = kind, id(value)  # of an object that the parsed pattern keeps alive
            if key not in self.accepted:
                self.accepted[key] = sum(mask for char, mask in self.chars.items() if _accepts(kind, value, char))
            return (positions & self.accepted[key]) << 1
        if kind == "AT":
            return positions & self.anchors[str(value)]
        if kind == "SUBPATTERN":
            return self.after(value[3], positions)
        if kind == "BRANCH":
            result = 0
            for branch in value[1]:
                result |= self.after(branch, positions)
            return result
        if kind in _REPEATS:
            return self._repeat(value[0], value[1], value[2], positions)
        # ASSERT or ASSERT_NOT: looking ahead needs each position by itself
        single = [bit for index in range(positions.bit_length()) if (bit := 1 << index) & positions]
        return sum(bit for bit in single if (self.after(value[1], bit) != 0) == (kind == "ASSERT"))

    def _repeat(self, low: int, high: int, nodes: Any, positions: int) -> int:
        for _ in range(low):
            before, positions = positions, self.after(nodes, positions)
            if positions == before:
                break
        reached = new = positions
        for _ in range(int(high) - low):
            new = self.after(nodes, new) & ~reached
            if not new:
                break
            reached |= new
        return reached


def _check(nodes: Any, nesting: int = 0) -> None:
    """Raise ValueError at a construct that positions alone cannot decide, or that would take long."""
    for op, value in nodes:
        kind = str(op)
        if kind in _REPEATS + _LOOKS and nesting == _MAX_NESTING:
            raise ValueError(f"repeats or looks ahead more than {_MAX_NESTING} deep")
        if kind in _REPEATS:
            _check(value[2], nesting + 1)
        elif kind == "SUBPATTERN" and not value[1] and not value[2]:
            _check(value[3], nesting)
        elif kind == "BRANCH":
            for branch in value[1]:
                _check(branch, nesting)
        elif kind in _LOOKS and value[0] == 1:
            _check(value[1], nesting + 1)
        elif kind not in _SINGLE and (kind != "AT" or "BOUNDARY" in str(value)):
            raise ValueError(f"{kind.lower()} is not supported")


class NamePattern:
    """A regular expression that matches from the beginning of a module's name, as `re.match` does.

    Lookbehind, word boundaries, back-references, atomic groups and inline flags are refused with ConfigError.
    """

    def __init__(self, pattern: str) -> None:
        try:
            if len(pattern) > _MAX_PATTERN:
                raise ValueError(f"longer than {_MAX_PATTERN} characters")
            if re.compile(pattern).flags != re.UNICODE:
                raise ValueError("flags are not supported")
            # The parse tree is not public Python, but it is the same from 3.11 to 3.14, and writing a second parser
            # of the syntax would be the larger risk.
            self._nodes = import_module("re._parser").parse(pattern)
            _check(self._nodes)
        except (ValueError, re.error, OverflowError, RecursionError) as cause:
            raise ConfigError(f"quantization_config: cannot use the pattern {shown(pattern)}: {cause}") from None

    def matches(self, name: str) -> bool:
        if len(name) > _MAX_NAME:
            raise ConfigError(
                f"the module name {shown(name)} has {len(name)} characters; at most {_MAX_NAME} are matched"
            )
        return _Subject(name).after(self._nodes, 1) != 0
