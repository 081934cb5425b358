"""Answers taken apart: however their text is cut, the message is the same, and nothing of it is lost."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nibblelm.server.reply import ReplyParser, whole_message
from nibblelm.server.tool_formats import LLAMA3, MISTRAL, QWEN, ToolFormat, tool_format

NAMES = ["weather", "time"]
ROME = {"name": "weather", "arguments": {"town": "Rome ☀"}}
CALL = json.dumps(ROME, ensure_ascii=False)
LLAMA = CALL.replace("arguments", "parameters")
END_MARKED = CALL.replace("Rome", "</tool_call> </tool_call>")

MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]

# format, thinking already, text, reasoning, content, calls
CASES: list[tuple[ToolFormat | None, bool, str, str, str | None, list[dict[str, Any]]]] = [
    (None, False, "Hello <b>you</b>", "", "Hello <b>you</b>", []),
    (None, False, "<think>\nHm </thin k>\n</think>\n\nYes", "Hm </thin k>\n", "Yes", []),
    (None, False, "\n <think>Hm", "Hm", "", []),
    (None, True, "Hm</think>Yes", "Hm", "Yes", []),
    (None, False, "I <think>so</think>", "", "I <think>so</think>", []),
    (None, False, "", "", "", []),
    (QWEN, False, f"Look:\n<tool_call>\n{CALL}\n</tool_call>", "", "Look:", [ROME]),
    (QWEN, False, f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", None, [ROME, ROME]),
    (QWEN, True, f"Hm</think>\n<tool_call>{CALL}</tool_call>", "Hm", None, [ROME]),
    (QWEN, False, f"<tool_call>{CALL}", "", None, [ROME]),
    (QWEN, False, "<tool_call>{bad</tool_call> x", "", "<tool_call>{bad</tool_call> x", []),
    (QWEN, False, f"<tool_call>{CALL.replace('weather', 'rm')}</tool_call>", "", None, []),
    (QWEN, False, "1 <tool 2", "", "1 <tool 2", []),
    (QWEN, False, "Sure.\n\n<tool_call> is a tag", "", "Sure.\n\n<tool_call> is a tag", []),
    (QWEN, False, f"A \n<tool_call>{CALL}</tool_call>\nB <tool_call> C", "", "A\nB <tool_call> C", [ROME]),
    (QWEN, False, f"<tool_call>{END_MARKED}</tool_call>", "", None, [json.loads(END_MARKED)]),
    (QWEN, False, '<tool_call>{"name": "</tool_call> x', "", '<tool_call>{"name": "</tool_call> x', []),
    (QWEN, False, f"<tool_call>{CALL}</tool_call>\nHello \n", "", "\nHello \n", [ROME]),
    (QWEN, False, f"<tool_call>{CALL}</tool_call>\nx \n<tool_cal ", "", "\nx \n<tool_cal ", [ROME]),
    (QWEN, False, f"<tool_call>{LLAMA}</tool_call>", "", None, [ROME]),
    (QWEN, False, '<tool_call>{"name": "time"}</tool_call>', "", None, [{"name": "time"}]),
    *(
        (QWEN, False, f"<tool_call>{text}</tool_call>", "", f"<tool_call>{text}</tool_call>", [])
        for text in (
            '{"name": "time", "args": {"x": 1}}',
            '{"name": ["time"], "arguments": {}}',
            '{"name": "time", "arguments": {"x": 1e999}}',
            '{"name": "time", "arguments": {"x": NaN}}',
            '{"name": "time", "arguments": null}',
        )
    ),
    (MISTRAL, False, f"[TOOL_CALLS][{CALL}, {CALL}]", "", None, [ROME, ROME]),
    (MISTRAL, False, '[TOOL_CALLS]weather[ARGS]{"town": "Rome ☀"}', "", None, [ROME]),
    (MISTRAL, False, "[TOOL_CALLS]time[CALL_ID]abc[ARGS]{}[TOOL_CALLS]time[ARGS]{}", "", None, [{"name": "time"}] * 2),
    (MISTRAL, False, "[TOOL_CALLS] none", "", "[TOOL_CALLS] none", []),
    (LLAMA3, False, LLAMA, "", None, [ROME]),
    (LLAMA3, False, CALL, "", None, [ROME]),
    (
        LLAMA3,
        False,
        r'{"name": "time", "parameters": {"x": "\ud800"}}',
        "",
        None,
        [{"name": "time", "arguments": {"x": "\ud800"}}],
    ),
    (LLAMA3, False, f"<|python_tag|>{LLAMA}; {LLAMA}", "", None, [ROME, ROME]),
    (LLAMA3, False, f"I say {LLAMA}", "", f"I say {LLAMA}", []),
    (LLAMA3, False, '{"name": "rm", "parameters": {}}', "", '{"name": "rm", "parameters": {}}', []),
    (LLAMA3, False, "{" * 10_000, "", "{" * 10_000, []),
]


@pytest.mark.parametrize(("tools", "thinking", "text", "reasoning", "content", "calls"), CASES, ids=range(len(CASES)))
def test_cases(
    tools: ToolFormat | None, thinking: bool, text: str, reasoning: str, content: str | None, calls: list[Any]
) -> None:
    for size in (1, 2, 3, 7, 10_001):
        parser = ReplyParser(True, thinking, tools, NAMES)
        deltas = [d for i in range(0, len(text), size) for d in parser.push(text[i : i + size])]
        message = whole_message(deltas + parser.push("", final=True))
        assert message.get("reasoning_content", "") == reasoning
        found = message.get("tool_calls", [])
        if content is not None or calls:
            assert message["content"] == content
        assert [json.loads(call["function"]["arguments"]) for call in found] == [c.get("arguments", {}) for c in calls]
        assert [call["function"]["name"] for call in found] == [c["name"] for c in calls]
        assert all(call["function"]["arguments"].encode() for call in found), "UTF-8 knows no half of a pair"
        assert len({call["id"] for call in found}) == len(found) == parser.calls


@given(
    st.lists(st.sampled_from([*MARKS, CALL, f"<tool_call>{CALL}</tool_call>", "{", "<", "a", " ", "\n"]), max_size=9),
    st.sampled_from([None, QWEN, MISTRAL, LLAMA3]),
    st.booleans(),
    st.integers(1, 9),
)
def test_pieces_make_what_the_whole_makes(
    parts: list[str], tools: ToolFormat | None, thinking: bool, size: int
) -> None:
    text = "".join(parts)
    whole = whole_message(ReplyParser(True, thinking, tools, NAMES).push(text, final=True))
    parser = ReplyParser(True, thinking, tools, NAMES)
    deltas = [d for i in range(0, len(text), size) for d in parser.push(text[i : i + size])]
    pieces = whole_message(deltas + parser.push("", final=True))
    for message in (whole, pieces):
        for call in message.get("tool_calls", []):
            del call["id"]
    assert whole == pieces


def test_a_template_says_its_format() -> None:
    assert tool_format(None) is None
    assert tool_format("{{ messages }}") is None
    assert tool_format("{% if tools %}<tool_call>{% endif %}") is QWEN
    assert tool_format("{% if tools %}[TOOL_CALLS]{% endif %}") is MISTRAL
    assert tool_format('{% if tools %}{"name": f, "parameters": p}{% endif %}') is LLAMA3
