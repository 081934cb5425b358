"""POST /v1/chat/completions: a conversation, answered through the model's chat template."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from nibblelm.errors import SchemaError
from nibblelm.request import GenerationOutput, Request
from nibblelm.sampler import Sampled
from nibblelm.server.answers import Chunks, brief, finite, head, token_name, usage, whole_answer
from nibblelm.server.errors import ApiError, as_api_error
from nibblelm.server.events import EventStream
from nibblelm.server.fields import Fields
from nibblelm.server.messages import read_messages, read_tool_choice, read_tools
from nibblelm.server.reply import THINK, THOUGHT, Delta, ReplyParser, whole_message
from nibblelm.server.sampling_fields import MOST_LOGPROBS, MOST_TOKENS, Common, read_common
from nibblelm.server.service import Service, read_body
from nibblelm.server.tool_formats import tool_format
from nibblelm.tokenizer import Tokenizer


@dataclass(frozen=True)
class Chat:
    """What a request asks for. `variables` go to the chat template; `asked`: tokens by number; `forced`: tools of which
    one has to be called."""

    messages: list[dict[str, Any]]
    variables: dict[str, Any]
    tool_names: list[str]
    forced: list[dict[str, Any]]
    common: Common
    asked: int | None


def read_chat(service: Service, f: Fields) -> Chat:
    """The request of a body's fields, but for `model`. Raises ApiError 400."""
    messages, tools = read_messages(f), read_tools(f)
    choice = read_tool_choice(f, tools)
    forced = [] if choice in (None, "none", "auto") else tools
    if choice is not None and choice.startswith("function:"):
        forced = [tool for tool in tools if tool["function"]["name"] == choice.removeprefix("function:")]
    offered = [] if choice == "none" else tools
    f.choice("parallel_tool_calls", True, *([] if offered and not forced else [False]))  # forced, there is one call
    variables, common, asked = service.settings(_read_settings, f)
    if forced and (common.guided or common.params.ignore_eos or common.params.min_tokens):
        f.refuse("tool_choice", choice, "none or auto with response_format, regex, grammar, ignore_eos or min_tokens")
    names = [tool["function"]["name"] for tool in offered]
    return Chat(messages, variables | ({"tools": offered} if offered else {}), names, forced, common, asked)


def _read_settings(f: Fields, generation_config: dict[str, Any]) -> tuple[dict[str, Any], Common, int | None]:
    """The chat template's variables, how to generate, and tokens by number."""
    variables = f.take("chat_template_kwargs", "an object", lambda v: isinstance(v, dict)) or {}
    if taken := sorted({"messages", "tools", "add_generation_prompt"} & set(variables)):
        f.refuse("chat_template_kwargs", taken, "names that are no fields of their own")
    asked, older = f.integer("max_completion_tokens", 1, MOST_TOKENS), f.integer("max_tokens", 1, MOST_TOKENS)
    if asked is not None and older not in (None, asked):
        f.refuse("max_tokens", older, "the value of max_completion_tokens, which takes its place")
    asked = older if asked is None else asked
    unasked = generation_config.get("max_new_tokens") or -1
    tokens = unasked if asked is None else asked
    common = read_common(f, generation_config, max_tokens=tokens, logprobs=_logprobs(f))
    f.take("modalities", '["text"]', lambda v: v == ["text"])
    f.end()
    return variables, common, asked


def _logprobs(f: Fields) -> int | None:
    """How many of the most likely tokens to report beside each; None: nothing."""
    wanted, top = f.flag("logprobs"), f.integer("top_logprobs", 0, MOST_LOGPROBS)
    if top is not None and not wanted:
        f.refuse("top_logprobs", top, "nothing without logprobs: true")
    return (top or 0) if wanted else None


async def chat_completions(service: Service, http: HttpRequest) -> Any:
    """The endpoint."""
    f = await read_body(http)
    service.check_model(f)
    wanted = read_chat(service, f)
    with service.admitted(wanted.common.n) as room:
        thinking, requests = await service.in_pool(_requests, service, wanted, of=f.size)
        if wanted.common.stream:
            return EventStream(service, requests, lambda: _Answer(service, wanted, thinking).events, room.passed_on())
        outputs = await service.outputs(service.begun(requests, stream=False), http.receive)
        return await service.in_pool(_Answer(service, wanted, thinking).whole, outputs, quick=brief(outputs))


def _requests(service: Service, wanted: Chat) -> tuple[bool, list[Request]]:
    """Whether the template has opened a thought, and the engine's requests."""
    tokenizer = service.llm.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
    fields: dict[str, Any] = {}
    if wanted.tool_names:
        spoken = tool_format(tokenizer.template(with_tools=True))
        if spoken is None:
            raise ApiError(400, "this model's chat template has no tool calls in a form known here", param="tools")
        if wanted.forced and spoken.forced is None:
            raise ApiError(400, "tool calls of this model's form cannot be forced; use auto", param="tool_choice")
        if wanted.common.params.skip_special_tokens:
            fields = {"skip_special_tokens": spoken.shown}
        if wanted.forced and spoken.forced is not None:
            try:
                fields |= spoken.forced(wanted.forced)
            except RecursionError as error:
                raise ApiError(422, "the parameters of a tool are nested too deeply", param="tools") from error
    prompt = tokenizer.apply_chat_template(wanted.messages, **wanted.variables)
    thinking = _thinking(tokenizer, wanted, prompt)
    if thinking and (wanted.forced or wanted.common.guided):
        fields["guided_after"] = THOUGHT
    params = service.llm.resolve(wanted.common.params, fields)
    ids = service.llm.encode_rendered(prompt)
    try:
        return thinking, service.prepared(ids, params, wanted.common.n, wanted.asked, "messages", answers=True)
    except SchemaError as error:
        raise as_api_error(error, "tools" if wanted.forced else None) from error


def _thinking(tokenizer: Tokenizer, wanted: Chat, prompt: str) -> bool:
    """Whether the template has opened a thought: a tag at the end of the last message is that message's own."""
    *others, last = wanted.messages
    if prompt.rstrip().endswith(THINK) and last["content"].rstrip().endswith(THINK):
        prompt = tokenizer.apply_chat_template([*others, last | {"content": "."}], **wanted.variables)
    return prompt.rstrip().endswith(THINK)


class _Answer:
    """Writes what comes of the n requests."""

    def __init__(self, service: Service, wanted: Chat, thinking: bool) -> None:
        tokenizer = service.llm.tokenizer
        template = (None if tokenizer is None else tokenizer.template(bool(wanted.tool_names))) or ""
        kind = "chat.completion.chunk" if wanted.common.stream else "chat.completion"
        self._head = head("chatcmpl", kind, service.names[0])
        self._chunks = Chunks(self._head, wanted.common.include_usage)
        self._common, self._tokenizer = wanted.common, tokenizer
        self._outputs: dict[int, GenerationOutput] = {}
        tools = tool_format(template) if wanted.tool_names else None
        self._parsers = [
            ReplyParser(THOUGHT in template, thinking, tools, wanted.tool_names) for _ in range(wanted.common.n)
        ]
        self._begun = [False] * wanted.common.n
        self._plain = wanted.common.params.logprobs is None
        self._of_text = [self._chunks.of_texts(partial(_said, place)) for place in range(wanted.common.n)]

    def whole(self, outputs: Sequence[GenerationOutput]) -> Response:
        def choice(place: int) -> dict[str, Any]:
            output = outputs[place]
            message = whole_message(self._parsers[place].push(output.text, final=True))
            scores = self._scores(output.logprobs or [])
            return {"index": place, "message": message, "logprobs": scores} | self._end(place, output)

        return whole_answer(self._head, map(choice, range(len(outputs))), lambda: usage(outputs[:1], outputs))

    def events(self, batch: list[tuple[int, Any]]) -> Iterator[str]:
        """The role first, then what each token makes certain; at the end the usage, if it was asked for."""
        for place, piece in batch:
            if not self._begun[place]:
                self._begun[place] = True
                yield self._chunk(place, {"role": "assistant", "content": ""}, None)
            if self._plain and piece.output is None and self._parsers[place].says_all:  # most of all
                if piece.text:
                    yield self._of_text[place](piece.text)
                continue
            deltas = self._parsers[place].push(piece.text, piece.output is not None)
            scores = self._scores([piece.logprobs] if piece.logprobs else [])
            for delta in deltas or ([{}] if scores is not None and scores["content"] else []):
                yield self._chunk(place, delta, scores)
                scores = self._scores([])
            if piece.output is not None:
                self._outputs[place] = piece.output
                yield self._chunk(place, {}, None, **self._end(place, piece.output))
        if not batch and self._common.include_usage:
            outputs = [self._outputs[place] for place in range(self._common.n)]
            yield self._chunks.usage(usage(outputs[:1], outputs))

    def _chunk(self, place: int, delta: Delta, scores: Any, **end: Any) -> str:
        return self._chunks.of(_choice(place, delta, scores) | end)

    def _end(self, place: int, output: GenerationOutput) -> dict[str, Any]:
        called = self._parsers[place].calls and output.finish_reason == "stop"
        return {"finish_reason": "tool_calls" if called else output.finish_reason, "stop_reason": output.stop_reason}

    def _scores(self, sampled: Sequence[Sampled]) -> dict[str, Any] | None:
        most = self._common.params.logprobs
        if most is None:
            return None
        content = []
        for one in sampled:
            top = [self._score(i, value) for i, value in one.top[:most]]
            content.append(self._score(one.token_id, one.logprob) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _score(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = [] if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))
        return {"token": token_name(self._tokenizer, token_id), "logprob": finite(logprob), "bytes": raw}


def _choice(place: int, delta: Delta, scores: Any) -> dict[str, Any]:
    return {"index": place, "delta": delta, "logprobs": scores, "finish_reason": None}


def _said(place: int, text: str) -> dict[str, Any]:
    return _choice(place, {"content": text}, None)
