"""The messages and tools of a chat request, as chat templates take them."""

import json
import re
from typing import Any

from nibblelm.server.fields import Fields

MOST_MESSAGES = 4096
MOST_TOOLS = 128
MOST_PARTS = 256


def read_messages(f: Fields) -> list[dict[str, Any]]:
    """Take `messages`: role and content as text, tool calls with their arguments as objects. ApiError 400."""
    return [_message(m) for m in f.objects("messages", MOST_MESSAGES, required=True)]


def _message(m: Fields) -> dict[str, Any]:
    role = m.choice("role", "system", "developer", "user", "assistant", "tool", required=True)
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}  # no template knows developers
    calls = _tool_calls(m) if role == "assistant" else []
    content = _content(m, required=not calls)
    message["content"] = "" if content is None else content
    if calls:
        message["tool_calls"] = calls
    if role == "assistant":
        if (reasoning := m.text("reasoning_content")) is not None:
            message["reasoning_content"] = reasoning
        m.choice("refusal", "")  # what answers carry as null
        m.take("annotations", "an empty list", lambda v: v == [])
    if role == "tool":
        message["tool_call_id"] = m.text("tool_call_id", required=True)
    if (name := m.text("name")) is not None:
        message["name"] = name
    m.end()
    return message


def _content(m: Fields, required: bool) -> str | None:
    """Text, or parts of text in one."""
    supported = f"a string, or a list of 1 to {MOST_PARTS} parts of type text"
    value = m.take(
        "content",
        supported,
        lambda v: isinstance(v, str) or (isinstance(v, list) and 1 <= len(v) <= MOST_PARTS),
        required,
    )
    if not isinstance(value, list):
        return value
    texts: list[str] = []
    for i, item in enumerate(value):
        part = Fields(item, f"{m.name('content')}[{i}]")
        part.choice("type", "text", required=True)
        texts.append(part.text("text", required=True) or "")
        part.end()
    return "".join(texts)


def _tool_calls(m: Fields) -> list[dict[str, Any]]:
    calls = []
    for call in m.objects("tool_calls", MOST_TOOLS):
        call.choice("type", "function")
        call.integer("index", 0, MOST_TOOLS)
        identity, function = call.text("id"), call.object("function")
        if function is None:
            call.refuse("function", None, "an object with name and arguments")
        name, text = function.text("name", required=True), function.text("arguments") or "{}"
        try:
            arguments: Any = json.loads(text)
        except (ValueError, RecursionError):
            arguments = text  # a model may have written it, and sees it as it was
        function.end()
        call.end()
        calls.append({"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def read_tools(f: Fields) -> list[dict[str, Any]]:
    """Take `tools`: functions with a name, a description and a JSON schema of their parameters."""
    tools: list[dict[str, Any]] = []
    for tool in f.objects("tools", MOST_TOOLS):
        tool.choice("type", "function", required=True)
        function = tool.object("function")
        if function is None:
            tool.refuse("function", None, "an object with name, description and parameters")
        name = function.take("name", "1 to 64 of the characters a-z, A-Z, 0-9, _ and -", _is_name, required=True)
        shown: dict[str, Any] = {"name": name}
        if (description := function.text("description")) is not None:
            shown["description"] = description
        parameters = function.take("parameters", "a JSON schema of type object", _is_of_objects)
        nothing: dict[str, Any] = {"type": "object", "properties": {}}
        closed = nothing | {"additionalProperties": False}  # who leaves them out has none
        shown["parameters"] = closed if parameters is None else parameters or nothing
        function.flag("strict")
        function.end()
        tool.end()
        tools.append({"type": "function", "function": shown})
    return tools


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[a-zA-Z0-9_-]{1,64}", value) is not None


def _is_of_objects(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type", "object") == "object"


def read_tool_choice(f: Fields, tools: list[dict[str, Any]]) -> str | None:
    """Take `tool_choice`: "none", "auto", "required", or the name of one function behind "function:"; None: auto."""
    names = [tool["function"]["name"] for tool in tools]
    supported = 'none, auto, required or {"type": "function", "function": {"name": ...}} with a name that tools has'

    def fits(value: Any) -> bool:
        if isinstance(value, dict):
            function = value.get("function")
            named = isinstance(function, dict) and set(function) == {"name"} and function["name"] in names
            return named and value == {"type": "function", "function": function}
        return value in ("none", "auto") or (value == "required" and bool(names))

    value = f.take("tool_choice", supported, fits)
    return f"function:{value['function']['name']}" if isinstance(value, dict) else value
