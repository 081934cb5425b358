"""Reading a request's JSON strictly: a field that nobody reads is refused by its name."""

import json
from collections.abc import Callable, Container
from typing import Any, NoReturn

from nibblelm.server.errors import ApiError

_MISSING = object()


def no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


_DECODER = json.JSONDecoder(parse_constant=no_number)  # `json.loads` would make one for each request


def parse(body: bytes) -> Any:
    """The JSON value of a request's body. Raises ApiError 400 for what is none, NaN and Infinity included."""
    try:
        return _DECODER.decode(body.decode(json.detect_encoding(body), "surrogatepass"))
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        if "set_int_max_str_digits" in why:
            why = "an integer has thousands of digits"
        raise ApiError(400, f"the body cannot be read as JSON: {why}") from error


class Fields:
    """One JSON object. Each method takes a field out of it, null being the same as absence; `end` refuses the rest.
    Most fields are absent from most requests: nothing is made for those, what is supported for one.

    All raise ApiError 400 with the field's path (`messages[2].content`) for a value that is not supported.
    """

    def __init__(self, value: Any, path: str = "", size: int = 0) -> None:
        self.path, self.size = path, size  # bytes of the body, where it is one
        if not isinstance(value, dict):
            self.refuse("", value, "an object")
        self._left: dict[str, Any] = dict(value)

    def name(self, field: str) -> str:
        """The path of a field."""
        return f"{self.path}.{field}" if self.path and field else field or self.path

    def refuse(self, field: str, value: Any, supported: str) -> NoReturn:
        """Raise the error for a field that has this value."""
        name = self.name(field)
        shown = "missing" if value is _MISSING else f"{json.dumps(value)[:60]}"
        raise ApiError(400, f"{name or 'the body'} is {shown}; supported: {supported}", param=name or None)

    def take(self, field: str, supported: str, fits: Callable[[Any], bool], required: bool = False) -> Any:
        """The value of a field, None if it is absent."""
        value = self._left.pop(field, None)
        if value is None and required:
            self.refuse(field, _MISSING, supported)
        if value is not None and not fits(value):
            self.refuse(field, value, supported)
        return value

    def among(self, fields: Container[str]) -> list[str]:
        """Which of `fields` it has, in its own order."""
        return [field for field in self._left if field in fields]

    def text(self, field: str, required: bool = False) -> str | None:
        if self.lacks(field) and not required:
            return None
        return self.take(field, "a string", lambda v: isinstance(v, str), required)

    def lacks(self, field: str) -> bool:
        """Whether it is absent."""
        return self._left.get(field) is None

    def flag(self, field: str) -> bool:
        """False if it is absent."""
        return not self.lacks(field) and bool(self.take(field, "true or false", lambda v: isinstance(v, bool)))

    def integer(self, field: str, low: int, high: int) -> int | None:
        if self.lacks(field):
            return None
        return self.take(field, f"an integer, {low} to {high}", lambda v: is_integer(v) and low <= v <= high)

    def number(self, field: str, low: float, high: float) -> float | None:
        def fits(value: Any) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high

        if self.lacks(field):
            return None
        return self.take(field, f"a number, {low:g} to {high:g}", fits)

    def choice(self, field: str, *choices: Any, required: bool = False) -> Any:
        """One of a few strings, numbers or booleans."""
        if self.lacks(field) and not required:
            return None
        shown = ", ".join(json.dumps(choice) for choice in choices)
        return self.take(field, shown, lambda v: any(v == c and type(v) is type(c) for c in choices), required)

    def object(self, field: str) -> "Fields | None":
        if self.lacks(field):
            return None
        value = self.take(field, "an object", lambda v: isinstance(v, dict))
        return Fields(value, self.name(field))

    def objects(self, field: str, most: int, required: bool = False) -> "list[Fields]":
        """A list of at least one object, [] if it is absent."""
        values = self.take(
            field, f"a list of 1 to {most} objects", lambda v: isinstance(v, list) and 1 <= len(v) <= most, required
        )
        return [Fields(value, f"{self.name(field)}[{i}]") for i, value in enumerate(values or [])]

    def strings(self, field: str, most: int, longest: int) -> list[str]:
        """A string, or a list of at most `most`, as a list; none of them empty or of more than `longest` characters."""

        def fits(value: Any) -> bool:
            values = value if isinstance(value, list) else [value]
            return len(values) <= most and all(isinstance(v, str) and 0 < len(v) <= longest for v in values)

        if self.lacks(field):
            return []
        value = self.take(field, f"a string of 1 to {longest} characters, or a list of at most {most}", fits)
        return [value] if isinstance(value, str) else value or []

    def labels(self, *fields: str) -> None:
        """Fields that name the caller or the call, and change nothing of the answer."""
        for field in self.among(fields):
            self.take(field, "a string, or an object of strings", _is_label)

    def left(self) -> str:
        """What is left: whatever differs is written differently, 1, 1.0 and true as well."""
        return repr(self._left)

    def end(self) -> None:
        """Refuse what is left."""
        for field, value in self._left.items():
            if value is not None:
                name = self.name(field)
                raise ApiError(400, f"{name} is not supported here; leave it out", param=name, code="unknown_parameter")


def is_integer(value: Any) -> bool:
    """Whether a JSON value is a whole number, and not true or false."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_label(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and all(isinstance(v, str) for v in value.values()))
