"""Tool calls that are forced: schemas of every shape hold where a call's schema takes them in, and names are names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from nibblelm import LLM
from nibblelm.server.tool_formats import LLAMA3, QWEN, ToolFormat

USER: list[Any] = [{"role": "user", "content": "a dog who lost his ball"}]
SHOWN = "{{ (tools or []) | length }}{% for m in messages %}{{ m.content }}{{ m.tool_calls | length }}{% endfor %}"
FORMATS = {"qwen": (QWEN, SHOWN + "<tool_call>"), "llama3": (LLAMA3, SHOWN + "parameters")}


class Point(BaseModel):
    x: bool
    y: bool


class Line(BaseModel):
    """Of which the schema refers to another."""

    a: Point
    b: Point


class Tree(BaseModel):
    """Of which the schema refers to itself."""

    leaf: bool
    below: "Tree | None"


def tool(name: str, parameters: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.fixture(scope="module", params=list(FORMATS))
def speaking(request: Any, serving: Any, with_template: Callable[[str], Path]) -> Any:
    return serving(with_template(FORMATS[request.param][1]), "--served-model-name", "demo")


def test_models_within_models(speaking: Any) -> None:
    client = openai.OpenAI(base_url=f"{speaking.url}/v1", api_key="none", max_retries=0)
    models = {"Line": Line, "Tree": Tree}
    tools = [openai.pydantic_function_tool(model) for model in models.values()]
    made: set[str] = set()
    for seed in range(8):
        answer = client.chat.completions.create(
            model="demo", messages=USER, tools=tools, tool_choice="required", temperature=1, seed=seed
        )
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        if answer.choices[0].finish_reason == "tool_calls":  # a tree may be higher than the context
            models[call.function.name].model_validate_json(call.function.arguments)
            made.add(call.function.name)
    assert made == set(models)


@pytest.mark.parametrize("name", ["qwen", "llama3"])
def test_parts_are_found_where_a_schema_is_taken_in(name: str, llm: LLM) -> None:
    """Two tools whose definitions have the same name, and what looks like a reference and is none; jsonschema judges
    the calls by the schemas as they were given."""
    one = {"properties": {"p": {"$ref": "#/definitions/P"}}, "required": ["p"], "definitions": {"P": {"type": "null"}}}
    two = {
        "properties": {"$ref": {"$ref": "#/$defs/P"}, "const": {"const": {"$ref": "#/$defs/P"}}},
        "required": ["$ref", "const"],
        "$defs": {"P": {"enum": [1, 2]}},
    }
    three = {"$id": "urn:three", "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"], "$defs": two["$defs"]}
    four = {"properties": {"rest": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}}
    given = {"one": one, "two": two, "three": three, "four": four}
    schemas = {name: schema | {"additionalProperties": False} for name, schema in given.items()}
    how: ToolFormat = FORMATS[name][0]
    assert how.forced is not None
    forced = how.forced([tool(*each) for each in schemas.items()])
    seen: set[str] = set()
    for seed in range(16):
        output = llm.generate("A", **forced, max_tokens=400, temperature=2, seed=seed)
        text = output.text.removeprefix(how.start or "").removesuffix(how.end or "")
        (call,) = how.read(text, list(schemas)) or []
        jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
        seen.add(call["name"])
    assert seen == set(schemas)


def test_what_is_no_tool_is_named(speaking: Any) -> None:
    deep: Any = {}
    for _ in range(400):
        deep = {"allOf": [deep]}
    for given, status, param, message in (
        (tool("</tool_call>", {}), 400, "tools[0].function.name", "a-z, A-Z, 0-9"),
        (tool("a\n", {}), 400, "tools[0].function.name", "a-z, A-Z, 0-9"),
        (tool("a" * 65, {}), 400, "tools[0].function.name", "1 to 64"),
        (tool("a", {"type": "string"}), 400, "tools[0].function.parameters", "of type object"),
        (tool("a", {"type": ["object", "null"]}), 400, "tools[0].function.parameters", "of type object"),
        (tool("a", deep), 422, "tools", "nested too deeply"),
        (tool("a", {"properties": {"x": {"not": {}}}}), 422, "tools", "cannot be followed"),
    ):
        body = {"messages": USER, "tools": [given], "tool_choice": "required"}
        got, answer, _ = speaking.request("POST", "/v1/chat/completions", body)
        assert (got, answer["error"]["param"]) == (status, param)
        assert message in answer["error"]["message"]
    body = {"messages": USER, "tools": [tool("a", {})], "tool_choice": "required", "min_tokens": 5}
    assert speaking.request("POST", "/v1/chat/completions", body)[1]["error"]["param"] == "tool_choice"


def test_a_text_beside_tools_shows_no_special_token(speaking: Any) -> None:
    """But those that a call is made of; and all of them where they are asked for."""
    body = {"messages": USER, "max_tokens": 3, "temperature": 0, "logit_bias": {"0": 100}, "repetition_penalty": 1}
    for tools in ({}, {"tools": [tool("a", {})]}):
        for shows, content in (({}, ""), ({"skip_special_tokens": False}, "<s><s><s>")):
            answer = speaking.request("POST", "/v1/chat/completions", body | tools | shows)[1]
            assert answer["choices"][0]["message"]["content"] == content


def test_parameters_without_a_type_are_an_object(speaking: Any) -> None:
    parameters = {"properties": {"town": {"enum": ["Rome", "Köln"]}}, "additionalProperties": False}
    body = {"messages": USER, "tools": [tool("weather", parameters)], "tool_choice": "required", "temperature": 1}
    for seed in range(4):
        status, answer, _ = speaking.request("POST", "/v1/chat/completions", body | {"seed": seed})
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "tool_calls")


def test_what_a_conversation_says_of_calls_and_variables(speaking: Any) -> None:
    """Arguments that no parser takes go to the template as they are; a variable of any name fails nothing."""
    call = {"type": "function", "function": {"name": "weather", "arguments": "[" * 1000 + "]" * 1000}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}, *USER]
    status, answer, _ = speaking.request(
        "POST", "/v1/chat/completions", {"messages": messages, "max_tokens": 1, "tools": [tool("weather", {})]}
    )
    assert (status, answer["usage"]["completion_tokens"]) == (200, 1)
    for name in ("self", "template", "variables"):
        body = {"messages": USER, "chat_template_kwargs": {name: 1}, "max_tokens": 1}
        got, answer, _ = speaking.request("POST", "/v1/chat/completions", body)
        assert got == (400 if name == "self" else 200), answer


def test_who_asks_for_one_call_at_a_time_gets_it_where_there_is_but_one(speaking: Any) -> None:
    given = tool("weather", {"properties": {"town": {"enum": ["Rome", "Bonn"]}}, "additionalProperties": False})
    body = {"messages": USER, "parallel_tool_calls": False, "max_tokens": 60}
    path = "/v1/chat/completions"
    for more in ({}, {"tools": [given], "tool_choice": "none"}):
        assert speaking.request("POST", path, body | more)[0] == 200
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        status, answer, _ = speaking.request("POST", path, body | {"tools": [given], "tool_choice": choice})
        assert (status, len(answer["choices"][0]["message"]["tool_calls"])) == (200, 1)
    assert speaking.request("POST", path, body | {"tools": [given]})[1]["error"]["param"] == "parallel_tool_calls"


def test_a_function_without_parameters_takes_none(speaking: Any) -> None:
    given = {"type": "function", "function": {"name": "now"}}
    body = {"messages": USER, "tools": [given], "tool_choice": "required", "temperature": 1}
    for seed in range(4):
        status, answer, _ = speaking.request("POST", "/v1/chat/completions", body | {"seed": seed})
        assert status == 200
        assert json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]) == {}
