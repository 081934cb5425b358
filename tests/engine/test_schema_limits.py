"""What llguidance would misread, or end the process for, is mended or refused before it sees it."""

import json
from pathlib import Path
from typing import Any

import pytest

from nibblelm.engine import LLM
from nibblelm.errors import SchemaError
from nibblelm.schema_limits import MOST, exact_grammar, exact_schema

LOW = -(1 << 63)
DEMO = Path(__file__).resolve().parents[2] / "demo" / "stories-7m"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(DEMO, device="cpu")


@pytest.mark.parametrize(
    "schema",
    [
        {"const": LOW},
        {"enum": ["a", LOW]},
        {"enum": [9007199254740993]},
        {"const": {"id": [1234567890123456789]}},
        {"const": 123456789.12345679},
        {"const": float("nan")},
        {"type": "integer", "minimum": -1e30, "maximum": -1e29},
        {"type": "integer", "minimum": MOST + 1, "maximum": MOST + 1},
        {"properties": {"a": {"items": [{"const": LOW}]}}, "type": "object"},
        {"type": "string", "pattern": "^a\\"},
    ],
    ids=str,
)
def test_what_would_be_followed_as_another_is_refused(schema: Any, llm: LLM) -> None:
    with pytest.raises(SchemaError, match=r"^the (schema|pattern) (has the number|ends with a backslash)"):
        llm.generate("A", max_tokens=4, schema=schema)
    grammar = f"start: %json {json.dumps(schema)}"
    with pytest.raises(SchemaError, match=r"^the (grammar|pattern) "):
        llm.generate("A", max_tokens=4, grammar=grammar)


def test_bounds_are_drawn_in() -> None:
    both = {"type": "integer", "minimum": LOW, "maximum": -LOW - 1}
    assert exact_schema(both) == {"type": "integer", "minimum": -MOST, "maximum": MOST}
    named = {"properties": {"minimum": {"type": "integer"}, "const": {"maximum": 1e300}}, "default": LOW}
    assert exact_schema(named)["properties"] == {"minimum": {"type": "integer"}, "const": {"maximum": MOST}}
    kept = {"const": [True, None, 0.1, -MOST, 1e15], "minimum": True, "maxLength": 9}
    assert exact_schema(kept) == kept
    text = 'start: "%json" /%json/ %json {"maximum": 1e300, "type": "number"} "x" %json'
    assert exact_grammar(text) == text.replace("1e300", str(MOST))


def test_a_number_of_names_that_may_come_twice_is_refused(llm: LLM) -> None:
    named = {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 2}
    free = {"type": "object", "patternProperties": {"^[ab]$": {"type": "boolean"}}, "additionalProperties": False}
    for schema in named, free | {"minProperties": 2}, {"anyOf": [named | {"required": ["a"], "minProperties": 3}]}:
        with pytest.raises(SchemaError, match=r"minProperties \d and .*: at most 1 then, which is 1 or as many"):
            llm.generate("A", max_tokens=4, schema=schema)
    closed = named | {"additionalProperties": False}
    both = named | {"required": ["a", "b"]}
    shown = {"type": "object", "default": named, "examples": [named]}
    others = [{"type": kind, "minProperties": 3} for kind in ("string", 5, None, {"a": 1})]  # some are no types
    for schema in closed, free | {"minProperties": 1}, both, shown, *others:
        assert exact_schema(schema) == schema
    with pytest.raises(SchemaError, match="cannot be"):
        llm.generate("A", max_tokens=4, schema=others[1])


def test_a_format_that_json_schema_does_not_know_says_nothing(llm: LLM) -> None:
    assert exact_schema({"format": "password", "maxLength": 3}) == {"maxLength": 3}
    assert exact_schema({"properties": {"format": {"format": "date"}}}) == {
        "properties": {"format": {"format": "date"}}
    }
    with pytest.raises(SchemaError, match="iri"):
        llm.generate("A", max_tokens=4, schema={"type": "string", "format": "iri"})


@pytest.mark.parametrize("constant", [MOST, -MOST, MOST - 1, 999999999999999, 0.1, 12345678901234.5, 1e-7, -3.5])
def test_constants_come_as_they_are(constant: float, llm: LLM) -> None:
    output = llm.generate("A", max_tokens=60, temperature=0, schema={"const": constant})
    assert (json.loads(output.text), output.finish_reason) == (constant, "stop")


def test_the_name_of_a_special_token_is_text(llm: LLM) -> None:
    """</s> ends an answer, and <s> never comes, unless they are spelled."""
    for text in ("x</s>y", "<s>", "<b>old</s>"):
        for asked in ({"regex": text}, {"grammar": f'start: "{text}"'}, {"schema": {"const": text}}):
            output = llm.generate("a list", max_tokens=60, temperature=0, **asked)
            said = json.loads(output.text) if "schema" in asked else output.text
            assert (said, output.finish_reason) == (text, "stop")


@pytest.mark.parametrize("regex", ["a\\", "\\", "ab|c\\", "a\\\\\\"])
def test_an_expression_that_ends_in_an_escape(regex: str, llm: LLM) -> None:
    with pytest.raises(SchemaError, match="the regex ends with a backslash"):
        llm.generate("A", max_tokens=4, regex=regex)
    assert llm.generate("A", max_tokens=9, regex=regex + "\\").text.endswith("\\")
