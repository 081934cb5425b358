"""JSON out of an untrusted file: bounded in size, one object, no key given twice."""

import json
from pathlib import Path
from typing import Any

from nibblelm.errors import NibbleLMError

JSON_LIMIT = 32 << 20  # bytes; parsed into Python objects, JSON takes up to twenty times its size
_SHOWN = 80


def shown(value: object) -> str:
    """An untrusted value for an error message: escaped, on one line, and cut to a readable length."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def listed(names: list[str], limit: int = 8) -> str:
    """The first few names for an error message, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shown(name) for name in names[:limit]) + more


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Which of two equal keys counts differs between readers, so a file that has them means nothing.
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {shown(key)} is given twice")
        result[key] = value
    return result


def parse_object(data: bytes, what: str, error: type[NibbleLMError]) -> dict[str, Any]:
    """The JSON object in `data`; raises `error`, naming `what`, when it is anything else."""
    if len(data) > JSON_LIMIT:
        raise error(f"{what} has {len(data)} bytes of JSON; at most {JSON_LIMIT} are read")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError:
        raise error(f"{what} nests its JSON too deeply") from None
    except ValueError as cause:  # malformed UTF-8 or JSON, a number of thousands of digits, a key given twice
        raise error(f"{what} is not valid JSON: {cause}") from None
    if not isinstance(value, dict):
        raise error(f"{what} holds a JSON {type(value).__name__}; an object was expected")
    return value


def read_object(path: Path, error: type[NibbleLMError]) -> dict[str, Any]:
    """The JSON object in a file; raises `error` when it cannot be read or holds anything else."""
    try:
        if not path.is_file():  # opening a pipe would wait for ever
            raise error(f"{path} is missing or not a plain file")
        with path.open("rb") as file:
            data = file.read(JSON_LIMIT + 1)
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror or cause}") from cause
    return parse_object(data, str(path), error)
