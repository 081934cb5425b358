"""What llguidance would misread in a schema or an expression, mended or refused before it is read.

It computes with doubles and 64-bit integers: beyond 2^53 it follows another number than the one given, and at -2^63 its
process ends. An escape that an expression ends with is dropped.
"""

import json
import re
from typing import Any

from nibblelm.errors import SchemaError

MOST = 1 << 53
"""Up to here every integer is a double."""

_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords of JSON schema that hold schemas by names, which are no keywords."""

FORMATS = frozenset(
    "date-time time date duration email idn-email hostname idn-hostname ipv4 ipv6 uuid uri uri-reference uri-template "
    "iri iri-reference json-pointer relative-json-pointer regex".split()
)
"""Those of strings that JSON schema defines. Others, as Pydantic's path and password, say nothing of an answer."""


def exact_schema(schema: Any, what: str = "schema") -> Any:
    """A schema whose answers follow `schema`, in numbers that are followed exactly: bounds beyond 2^53 are drawn in.
    Formats that JSON schema does not define are left out.

    Raises SchemaError for a constant, or bounds, that no such number satisfies, and for a number of names that an
    answer may reach by one name given twice.
    """
    if isinstance(schema, list):
        return [exact_schema(part, what) for part in schema]
    if not isinstance(schema, dict):
        return schema
    _check_names(schema, what)
    exact: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            exact[key] = {name: exact_schema(part, what) for name, part in value.items()}
        elif key in ("const", "enum"):
            _check(value, what)
            exact[key] = value
        elif key in ("default", "examples"):  # which say nothing of an answer
            exact[key] = value
        elif key == "pattern" and isinstance(value, str):
            require_whole(value, "pattern")
            exact[key] = value
        elif key in (*_LOWER, *_UPPER) and _is_number(value):
            if (key in _LOWER and value > MOST) or (key in _UPPER and value < -MOST):
                raise _refused(value, what)
            exact[key] = max(-MOST, min(MOST, value))
        elif key == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        else:
            exact[key] = exact_schema(value, what)
    return exact


def exact_grammar(grammar: str) -> str:
    """The same for the schemas within a grammar, each behind %json."""
    parts: list[str] = []
    at = 0
    while found := _EMBEDDED.search(grammar, at):
        parts.append(grammar[at : found.end()])
        at = found.end()
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, at)
        except ValueError:  # none, or one that llguidance says what is wrong with
            continue
        parts.append(json.dumps(exact_schema(schema, "grammar")))
        at = end
    return "".join([*parts, grammar[at:]])


def require_whole(expression: str, what: str) -> None:
    """SchemaError for a regular expression that ends within an escape."""
    if (len(expression) - len(expression.rstrip("\\"))) % 2:
        raise SchemaError(f"the {what} ends with a backslash that escapes nothing; write two of them for one")


def _check_names(schema: dict[str, Any], what: str) -> None:
    """SchemaError where names that are left open, of which one may come twice, would have to make up a number."""
    least, required, kind = schema.get("minProperties", 0), schema.get("required"), schema.get("type", "object")
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if closed or not _is_number(least) or "object" not in (kind if isinstance(kind, list) else [kind]):
        return
    certain = max(1, len(set(map(str, required))) if isinstance(required, list) else 0)
    if least > certain:
        raise SchemaError(
            f"the {what} has minProperties {least} and no additionalProperties: false beside it; supported: at most "
            f"{certain} then, which is 1 or as many as `required` names"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check(value: Any, what: str) -> None:
    """SchemaError for a number, at any depth, that would come out as another."""
    if isinstance(value, list):
        for part in value:
            _check(part, what)
    elif isinstance(value, dict):
        for part in value.values():
            _check(part, what)
    elif _is_number(value):
        whole = isinstance(value, int) or value.is_integer()
        if abs(value) > MOST if whole else float(f"{value:.15g}") != value:
            raise _refused(value, what)


def _refused(value: float, what: str) -> SchemaError:
    text = str(value)
    return SchemaError(
        f"the {what} has the number {text if len(text) <= 40 else text[:40] + '...'}; supported: integers up to 2^53 "
        "and other constants of at most 15 digits, which are followed exactly; ask for it as a string"
    )
