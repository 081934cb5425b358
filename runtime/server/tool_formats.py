"""How families of models write tool calls into their answers, and reading them back."""

import json
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from nibblelm.schema_limits import NAMED
from nibblelm.server.fields import no_number

Call = dict[str, Any]
"""{"name": ..., "arguments": JSON text}"""


@dataclass(frozen=True)
class ToolFormat:
    """One way to write calls.

    start      what begins a call in the middle of a text; None: a call is the whole answer, from its first character
    end        what ends it; None: the end of the answer
    read       the calls in the text from `start` to `end`, without both; None if it is none
    shown      tokens of calls that may be special ones, which the text has to show
    forced     fields of SamplingParams that make an answer a call of one of these tools; None: not supported
    """

    start: str | None
    end: str | None
    read: Callable[[str, Collection[str]], list[Call] | None]
    shown: tuple[str, ...] = ()
    forced: Callable[[list[dict[str, Any]]], dict[str, Any]] | None = None


def _finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"{digits} is beyond all numbers that JSON's readers know")
    return value


_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=no_number)


def _call(value: Any, key: str, names: Collection[str]) -> Call | None:
    """A call of a function that was offered, from {"name": ..., key: {...}}. Models that know the forms of others put
    the arguments under the other key, too; where there are none at all, the name is to stand alone."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    there = [k for k in (key, *_KEYS) if k in value]
    arguments = value[there[0]] if there else {} if value.keys() <= {"name", "id", "type"} else None
    if not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):  # as half of a pair may be written
        text = json.dumps(arguments)
    return {"name": value["name"], "arguments": text}


_KEYS = ("arguments", "parameters")


def _all(calls: list[Call | None]) -> list[Call] | None:
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _qwen(text: str, names: Collection[str]) -> list[Call] | None:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>"""
    try:
        return _all([_call(_DECODER.decode(text), "arguments", names)])
    except (ValueError, RecursionError):
        return None


def _llama3(text: str, names: Collection[str]) -> list[Call] | None:
    """{"name": ..., "parameters": {...}}, several with ; between them, perhaps after <|python_tag|>"""
    calls: list[Call | None] = []
    text = text.strip().removeprefix("<|python_tag|>").strip()
    try:
        while text:
            value, end = _DECODER.raw_decode(text)
            calls.append(_call(value, "parameters", names))
            rest = text[end:].strip()
            if rest and not rest.startswith(";"):
                return None
            text = rest.removeprefix(";").strip()
    except (ValueError, RecursionError):
        return None
    return _all(calls)


def _mistral(text: str, names: Collection[str]) -> list[Call] | None:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} for each"""
    try:
        if text.lstrip().startswith("["):
            values = _DECODER.decode(text)
        else:
            parts = [part.partition("[ARGS]") for part in text.split("[TOOL_CALLS]")]
            named = [(name.partition("[CALL_ID]")[0].strip(), _DECODER.decode(text)) for name, _, text in parts]
            values = [{"name": name, "arguments": arguments} for name, arguments in named]
        return _all([_call(value, "arguments", names) for value in values])
    except (ValueError, RecursionError):
        return None


def _forced_qwen(tools: list[dict[str, Any]]) -> dict[str, Any]:
    compact = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
    call = json.dumps(_schema(tools, "arguments") | compact)
    return {"grammar": f'start: "<tool_call>\\n" call "\\n</tool_call>"\ncall: %json {call}'}


def _forced_llama3(tools: list[dict[str, Any]]) -> dict[str, Any]:
    return {"schema": _schema(tools, "parameters")}


def _schema(tools: list[dict[str, Any]], key: str) -> dict[str, Any]:
    """Of a call of one of the tools. Their parameters stand side by side, each with its definitions inside."""
    calls, parameters = [], {}
    for place, function in enumerate(tool["function"] for tool in tools):
        where = f"#/$defs/{place}"
        parameters[str(place)] = {"type": "object"} | _moved(function["parameters"], where)
        properties = {"name": {"const": function["name"]}, key: {"$ref": where}}
        call = {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}
        calls.append(call)
    return {"anyOf": calls, "$defs": parameters}


def _moved(schema: Any, where: str) -> Any:
    """A schema as it is to be written at the pointer `where` of another, so that it refers to its own parts as before.
    What has an $id is resolved by that, wherever it stands."""
    if isinstance(schema, list):
        return [_moved(part, where) for part in schema]
    if not isinstance(schema, dict) or "$id" in schema:
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, dict):
            moved[key] = {name: _moved(part, where) for name, part in value.items()}
        elif key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = where + value[1:]
        else:
            moved[key] = value if key in ("const", "enum") else _moved(value, where)
    return moved


QWEN = ToolFormat("<tool_call>", "</tool_call>", _qwen, ("<tool_call>", "</tool_call>"), _forced_qwen)
MISTRAL = ToolFormat("[TOOL_CALLS]", None, _mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"))
LLAMA3 = ToolFormat(None, None, _llama3, ("<|python_tag|>",), _forced_llama3)


def tool_format(template: str | None) -> ToolFormat | None:
    """The format that a chat template teaches its model; None if it renders no tools, or in a way not known here."""
    if template is None or "tools" not in template:
        return None
    known = (("<tool_call>", QWEN), ("[TOOL_CALLS]", MISTRAL), ("parameters", LLAMA3))
    return next((each for mark, each in known if mark in template), None)
