"""The official client against /v1/chat/completions, and the async one beside it."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from nibblelm import LLM, SamplingParams

USER = [{"role": "user", "content": "a dog who lost his ball"}]
GREEDY: dict[str, Any] = dict(model="demo", temperature=0, max_completion_tokens=16)
SPEAKING = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ m.tool_call_id }}\n{% endfor %}"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a town",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
        },
    }
]


def client_of(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(server: Any) -> openai.OpenAI:
    return client_of(server)


@pytest.fixture(scope="module")
def speaking(serving: Any, with_template: Callable[[str], Path]) -> Any:
    """A server whose template shows all of a conversation, tools and variables too, and opens a thought if asked."""
    template = (
        "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{{ mood }}" + SPEAKING + "{% for m in messages %}"
        "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% endfor %}"
        "{% if enable_thinking %}<think>\n{% else %}<think></think>{% endif %}"
    )
    return serving(with_template(template), "--served-model-name", "demo")


def test_an_answer(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(messages=USER, **GREEDY)  # type: ignore[arg-type]
    want = llm.chat(USER, SamplingParams(temperature=0, max_tokens=16))
    (choice,) = answer.choices
    assert answer.object == "chat.completion"
    assert (choice.message.role, choice.message.content) == ("assistant", want.text)
    assert (choice.finish_reason, choice.message.tool_calls, choice.logprobs) == ("length", None, None)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (want.timings.prompt_tokens, 16)


def test_roles_and_parts(client: openai.OpenAI, llm: LLM) -> None:
    parts = [{"type": "text", "text": "a cat "}, {"type": "text", "text": "and a hat"}]
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        *USER,
        {"role": "assistant", "content": "He found it."},
        {"role": "user", "content": parts, "name": "Tim"},
    ]
    answer = client.chat.completions.create(messages=messages, **GREEDY)
    want = llm.chat([{"role": "user", "content": "a cat and a hat"}], SamplingParams(temperature=0, max_tokens=16))
    assert answer.choices[0].message.content == want.text


def test_an_answer_goes_on_to_its_end_unless_told_otherwise(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(model="demo", messages=USER, seed=2)  # type: ignore[arg-type]
    assert answer.choices[0].message.content == llm.chat(USER, seed=2, max_tokens=-1).text
    older = client.chat.completions.create(model="demo", messages=USER, max_tokens=3, temperature=0)  # type: ignore
    assert older.usage is not None
    assert older.usage.completion_tokens == 3


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream(n: int, client: openai.OpenAI, llm: LLM) -> None:
    stream = client.chat.completions.create(
        model="demo", messages=USER, n=n, seed=4, max_tokens=30, stop=".", stream=True,
        stream_options={"include_usage": True},
    )  # type: ignore[call-overload]  # fmt: skip
    chunks = list(stream)
    texts, roles, reasons = [""] * n, [""] * n, [""] * n
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index] += choice.delta.role or ""
        reasons[choice.index] += choice.finish_reason or ""
    want = [llm.chat(USER, SamplingParams(seed=4 + i, max_tokens=30, stop=["."])) for i in range(n)]
    assert texts == [output.text for output in want]
    assert roles == ["assistant"] * n
    assert reasons == [output.finish_reason for output in want]
    assert chunks[-1].usage.completion_tokens == sum(len(output.token_ids) for output in want)
    with client.chat.completions.stream(model="demo", messages=USER, temperature=0, stop=".") as events:  # type: ignore
        final = events.get_final_completion()
    assert final.choices[0].message.content == llm.chat(USER, temperature=0, max_tokens=-1, stop=["."]).text


def test_log_probabilities(client: openai.OpenAI, llm: LLM) -> None:
    want = llm.chat(USER, SamplingParams(temperature=0, max_tokens=16, logprobs=2)).logprobs
    assert want is not None
    asked: Any = dict(messages=USER, logprobs=True, top_logprobs=2, **GREEDY)
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.logprobs is not None
    content = whole.logprobs.content or []
    assert [one.logprob for one in content] == [one.logprob for one in want]
    assert [[top.logprob for top in one.top_logprobs] for one in content] == [[t[1] for t in one.top] for one in want]
    assert bytes(byte for one in content for byte in one.bytes or []).decode() == whole.message.content
    pieces = client.chat.completions.create(stream=True, **asked)
    streamed = [one for chunk in pieces if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert streamed == content


def test_the_async_client_side_by_side(server: Any, llm: LLM) -> None:
    async def ask(client: openai.AsyncOpenAI, seed: int) -> str | None:
        answer = await client.chat.completions.create(model="demo", messages=USER, seed=seed, max_tokens=20)  # type: ignore
        return answer.choices[0].message.content

    async def all_of_them() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, seed) for seed in range(8)))

    want = [llm.chat(USER, seed=seed, max_tokens=20).text for seed in range(8)]
    assert asyncio.run(all_of_them()) == want


def rendered(server: Any, llm: LLM, messages: list[Any]) -> str:
    """What /tokenize makes of a conversation, as text again."""
    status, body, _ = server.request("POST", "/tokenize", {"messages": messages})
    assert status == 200, body
    status, back, _ = server.request("POST", "/detokenize", {"tokens": body["tokens"]})
    assert (status, body["count"], body["max_model_len"]) == (200, len(body["tokens"]), 512)
    return back["prompt"]


def test_tools_are_rendered_and_results_go_back(speaking: Any, llm: LLM) -> None:
    client = client_of(speaking)
    asked = client.chat.completions.create(messages=USER, tools=TOOLS, **GREEDY)  # type: ignore[arg-type]
    plain = client.chat.completions.create(messages=USER, tools=TOOLS, tool_choice="none", **GREEDY)  # type: ignore
    assert asked.usage is not None
    assert plain.usage is not None
    assert asked.usage.prompt_tokens > plain.usage.prompt_tokens + 20
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Rome"}'}}
    messages: list[Any] = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    text = rendered(speaking, llm, messages)
    assert 'weather({"town": "Rome"})' in text
    assert "tool: sunnycall_1" in text
    assert client.chat.completions.create(messages=messages, **GREEDY).choices[0].message.content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}], ids=str)
def test_a_call_is_made_where_it_has_to_be(choice: Any, speaking: Any) -> None:
    town = {"type": "object", "properties": {"town": {"enum": ["Rome", "Köln"]}}, "required": ["town"]}
    zone = {
        "type": "object",
        "properties": {"zone": {"type": "integer", "minimum": 0, "maximum": 24}},
        "required": ["zone"],
    }
    parameters = {"weather": town, "clock": zone}
    tools: list[Any] = [
        {"type": "function", "function": {"name": name, "parameters": schema | {"additionalProperties": False}}}
        for name, schema in parameters.items()
    ]
    options: Any = dict(model="demo", messages=USER, tools=tools, tool_choice=choice, temperature=1)
    for seed in range(6):
        choice_made = client_of(speaking).chat.completions.create(seed=seed, **options).choices[0]
        assert choice_made.finish_reason == "tool_calls"
        assert choice_made.message.content is None
        (call,) = choice_made.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name in (["clock"] if isinstance(choice, dict) else parameters)
        jsonschema.validate(json.loads(call.function.arguments), parameters[call.function.name])
    chunks = list(client_of(speaking).chat.completions.create(seed=5, stream=True, **options))
    (streamed,) = [made for chunk in chunks for made in chunk.choices[0].delta.tool_calls or []]
    assert (streamed.function.name, streamed.function.arguments) == (call.function.name, call.function.arguments)
    with pytest.raises(openai.BadRequestError, match="with response_format"):
        client_of(speaking).chat.completions.create(response_format={"type": "json_object"}, **options)


def test_variables_of_the_template_and_reasoning(speaking: Any) -> None:
    client = client_of(speaking)
    asked: Any = dict(messages=USER, **GREEDY)
    said = client.chat.completions.create(**asked, extra_body={"chat_template_kwargs": {"mood": "happy"}})
    assert said.choices[0].message.content
    assert not hasattr(said.choices[0].message, "reasoning_content")
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    thought = client.chat.completions.create(**asked, extra_body=thinking).choices[0].message
    assert thought.content == ""
    assert thought.reasoning_content  # type: ignore[attr-defined]
    chunks = client.chat.completions.create(**asked, extra_body=thinking, stream=True)
    deltas = [chunk.choices[0].delta.model_extra or {} for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought.reasoning_content  # type: ignore


def test_a_tag_at_the_end_of_a_message_opens_no_thought(speaking: Any, serving: Any, with_template: Any) -> None:
    last = [{"role": "user", "content": "what is <think>"}]
    plain = client_of(serving(with_template("{{ messages[-1].content }}"), "--served-model-name", "demo"))
    said = plain.chat.completions.create(messages=last, **GREEDY).choices[0].message  # type: ignore[arg-type]
    assert said.content
    assert not hasattr(said, "reasoning_content")
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    thought = client_of(speaking).chat.completions.create(messages=last, extra_body=thinking, **GREEDY)  # type: ignore[arg-type]
    assert thought.choices[0].message.reasoning_content


def test_what_an_answer_follows_begins_behind_a_thought(serving: Any, with_template: Callable[[str], Path]) -> None:
    """The full stop of this model is </think>."""
    folder = with_template(
        "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}<s>Once upon a time there was a"
        + "{% if enable_thinking %}<think>{% endif %}"
    )
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    model = tokenizer["model"]
    model["vocab"] = {{".": "</think>"}.get(piece, piece): i for piece, i in model["vocab"].items()}
    model["merges"] = [merge for merge in model["merges"] if "." not in "".join(merge)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    client = client_of(serving(folder, "--served-model-name", "demo"))
    schema = {"type": "object", "properties": {"dog": {"enum": ["Rex", "Ada"]}}, "additionalProperties": False}
    asked: Any = dict(messages=USER, model="demo", temperature=1, max_tokens=300)
    asked["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    forced = {
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": schema}}],
        "tool_choice": "required",
        "response_format": openai.omit,
    }
    thoughts: list[str] = []
    for thinks in True, False:
        variables: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": thinks}}}
        for seed in range(4):
            message = client.chat.completions.create(**asked, **variables, seed=seed).choices[0].message
            jsonschema.validate(json.loads(message.content or ""), schema)
            thought = getattr(message, "reasoning_content", "")
            thoughts += [thought]
            chunks = list(client.chat.completions.create(**asked, **variables, seed=seed, stream=True))
            deltas = [chunk.choices[0].delta for chunk in chunks]
            assert "".join(delta.content or "" for delta in deltas) == message.content
            assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == thought
            called = client.chat.completions.create(**(asked | forced), **variables, seed=seed).choices[0]
            assert called.finish_reason == "tool_calls"
            jsonschema.validate(json.loads(called.message.tool_calls[0].function.arguments), schema)
            assert thinks or not hasattr(called.message, "reasoning_content")
    assert all(thoughts[1:4:2])
    assert not any(thoughts[4:])


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        (dict(messages=[]), "messages", "1 to 4096 objects"),
        (dict(messages=[{"role": "king", "content": "x"}]), "messages[0].role", '"king"; supported: "system"'),
        (dict(messages=[{"role": "user"}]), "messages[0].content", "missing"),
        (dict(messages=[{"role": "user", "content": "x", "mood": 1}]), "messages[0].mood", "not supported here"),
        (dict(messages=[{"role": "tool", "content": "x"}]), "messages[0].tool_call_id", "missing"),
        (
            dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
            "messages[0].content[0].type",
            '"image_url"; supported: "text"',
        ),
        (dict(messages=[{"role": "system", "content": "x"}]), None, "No last item"),
        (dict(top_logprobs=2), "top_logprobs", "without logprobs"),
        (dict(max_tokens=5), "max_tokens", "max_completion_tokens"),
        (dict(tools=TOOLS), "tools", "no tool calls"),
        (dict(tools=[{"type": "code"}]), "tools[0].type", '"function"'),
        (dict(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "x"}}), "tool_choice", "tools has"),
        (dict(tools=TOOLS, parallel_tool_calls=False), "parallel_tool_calls", "true"),
        (dict(reasoning_effort="low"), "reasoning_effort", "not supported here"),
        (dict(modalities=["audio"]), "modalities", '["text"]'),
        (dict(extra_body={"chat_template_kwargs": {"messages": []}}), "chat_template_kwargs", "fields of their own"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(options: Any, param: str | None, message: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**(GREEDY | dict(messages=USER) | options))
    assert caught.value.param == param
    assert message in str(caught.value)
