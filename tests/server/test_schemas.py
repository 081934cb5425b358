"""Answers that follow a schema over HTTP: the official client, streams, many at once, schemas that make no sense."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from nibblelm.server import sampling_fields

USER: list[Any] = [{"role": "user", "content": "a dog who lost his ball"}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "maximum": 120, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
MANY_PATTERNS = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string", "pattern": f"[a-z]{{{i % 7}}}(x|y)*"} for i in range(500)},
}


def form(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


@pytest.fixture(scope="module")
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


class Colour(BaseModel):
    """What the client's own `parse` asks for."""

    red: bool
    shade: Literal["dark", "light"]


def test_a_schema_and_any_object(client: openai.OpenAI) -> None:
    options: Any = dict(model="demo", messages=USER, temperature=1, seed=3)
    content = client.chat.completions.create(response_format=form(PERSON), **options).choices[0].message.content
    jsonschema.validate(json.loads(content or ""), PERSON)
    stream = client.chat.completions.create(response_format=form(PERSON), stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == content
    text = client.completions.create(
        model="demo", prompt="A", max_tokens=80, seed=3, extra_body={"response_format": form(PERSON)}
    )
    jsonschema.validate(json.loads(text.choices[0].text), PERSON)
    anything = client.chat.completions.create(response_format={"type": "json_object"}, max_tokens=30, **options)
    assert (anything.choices[0].message.content or "").startswith("{")
    plain = client.chat.completions.create(response_format={"type": "text"}, max_tokens=5, **options)
    assert not (plain.choices[0].message.content or "").startswith("{")
    parsed = client.chat.completions.parse(response_format=Colour, **(options | {"temperature": 0}))
    assert isinstance(parsed.choices[0].message.parsed, Colour)


def test_expressions_and_grammars(client: openai.OpenAI) -> None:
    options: Any = dict(model="demo", prompt="A", seed=1, temperature=1, max_tokens=40)
    answer = client.completions.create(extra_body={"regex": "[a-c]{5}(x|y)"}, **options)
    assert re.fullmatch("[a-c]{5}(x|y)", answer.choices[0].text)
    answer = client.completions.create(extra_body={"grammar": 'start: ("la" | "lo"){3}'}, **options)
    assert re.fullmatch("(la|lo){3}", answer.choices[0].text)


@pytest.mark.parametrize(
    ("body", "status", "param", "message"),
    [
        ({"response_format": form({"type": "strange"})}, 422, "response_format", "Invalid type"),
        ({"response_format": form({"enum": ["x" * 70_000]})}, 422, "response_format", "at most 65536"),
        ({"regex": "["}, 422, "regex", "invalid regex"),
        ({"response_format": {"type": "xml"}}, 400, "response_format.type", '"xml"; supported: "text"'),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema", "name and schema"),
        ({"response_format": {"type": "text", "x": 1}}, 400, "response_format.x", "not supported here"),
        ({"regex": "a", "grammar": "b"}, 400, "regex", "one of"),
        ({"regex": "a", "ignore_eos": True}, 400, "ignore_eos", "which ends it"),
        ({"regex": "ab", "min_tokens": 50}, 400, "min_tokens", "may have to end before"),
        ({"min_tokens": 9, "max_tokens": 8}, 400, "min_tokens", "9; supported: at most 8"),
        ({"grammar": 'start: a\na: "x" a | "x" a', "max_tokens": 300}, 422, "grammar", "cannot be followed"),
        ({"response_format": form({"const": -(1 << 63)})}, 422, "response_format", "integers up to 2^53"),
        ({"response_format": form(MANY_PATTERNS), "max_tokens": 300}, 422, "response_format", "cannot be followed"),
    ],
    ids=str,
)
def test_what_cannot_be_followed(body: Any, status: int, param: str, message: str, server: Any) -> None:
    got, answer, _ = server.request("POST", "/v1/completions", {"prompt": "A", **body})
    assert (got, answer["error"]["param"]) == (status, param)
    assert message in answer["error"]["message"]


def test_null_is_as_good_as_nothing(server: Any) -> None:
    """In every field that both endpoints have, and in those of one."""
    fields = dict.fromkeys(
        [*sampling_fields._READERS, "n", "stream", "max_tokens", "response_format", "regex", "logprobs"]
    )
    for path, body in (
        ("/v1/completions", {"prompt": "A", "echo": None}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "A"}], "max_completion_tokens": None}),
    ):
        for limit in {}, {"max_tokens": 4}:
            status, answer, _ = server.request("POST", path, fields | body | limit)
            assert status == 200, answer


def test_what_turns_out_in_a_stream(server: Any) -> None:
    body = {"prompt": "A", "grammar": 'start: a\na: "x" a | "x" a', "max_tokens": 300, "stream": True}
    status, text, _ = server.request("POST", "/v1/completions", body)
    error = json.loads(text.strip().rpartition("data: ")[2])["error"]
    assert (status, error["type"], error["code"]) == (200, "invalid_request_error", "unsupported_schema")


def test_many_at_once_beside_others(client: openai.OpenAI, server: Any) -> None:
    schemas = [{"enum": ["a", "b", i]} if i % 2 else PERSON for i in range(30)]

    def ask(place: int) -> str:
        options: Any = {} if place % 3 == 0 else {"response_format": form(schemas[place])}
        if place % 7 == 6:
            options = {"response_format": form({"type": f"strange{place}"})}
        try:
            answer = client.chat.completions.create(
                model="demo", messages=USER, seed=place, temperature=1, max_tokens=200, **options
            )
        except openai.UnprocessableEntityError:
            return "refused"
        return answer.choices[0].message.content or ""

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(30)))
    assert answers == [ask(place) for place in range(30)]
    for place, text in enumerate(answers):
        if place % 7 == 6:
            assert text == "refused"
        elif place % 3:
            jsonschema.validate(json.loads(text), schemas[place])
    assert server.request("GET", "/health")[0] == 200
