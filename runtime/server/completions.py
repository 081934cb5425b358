"""POST /v1/completions: texts, or token ids, continued."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from nibblelm.errors import RequestError, TokenizerError
from nibblelm.request import GenerationOutput, Request
from nibblelm.sampler import Sampled
from nibblelm.server.answers import Chunks, brief, finite, head, token_name, top_of, usage, whole_answer
from nibblelm.server.errors import as_api_error
from nibblelm.server.events import EventStream
from nibblelm.server.fields import Fields, is_integer
from nibblelm.server.sampling_fields import MOST_LOGPROBS, MOST_TOKENS, Common, read_common
from nibblelm.server.service import Service, read_body
from nibblelm.tokenizer import TextStream, Tokenizer

MAX_TOKENS = 16
"""Tokens where the request does not say, as in OpenAI's API."""

MOST_PROMPTS = 256

QUICK, OUTPUT = 4096, 512
"""Characters or ids of all prompts that are made into requests in the event loop, in about a millisecond; and for how
many of them an output counts beside its prompt."""

Prompt = str | list[int]


@dataclass(frozen=True)
class Completion:
    """What a request asks for. `asked`: tokens by number; 0 with echo computes one, which is not shown."""

    prompts: list[Prompt]
    common: Common
    asked: int
    echo: bool


def read_settings(f: Fields, generation_config: dict[str, Any]) -> tuple[Common, int, bool]:
    """What Completion has beside the prompts, which are taken. Raises ApiError 400, ConfigError."""
    asked = f.integer("max_tokens", 0, MOST_TOKENS)
    asked = MAX_TOKENS if asked is None else asked
    echo = f.flag("echo")
    logprobs = f.integer("logprobs", 0, MOST_LOGPROBS)
    if asked == 0 and not echo:
        f.refuse("max_tokens", 0, "1 or more, 0 only with echo")
    echoed = {"prompt_logprobs": logprobs} if echo else {}
    common = read_common(f, generation_config, max_tokens=max(asked, 1), logprobs=logprobs, **echoed)
    f.choice("best_of", common.n)
    f.choice("add_special_tokens", True)
    f.end()
    return common, asked, echo


def _prompts(f: Fields) -> list[Prompt]:
    supported = f"a string, a list of token ids, or a list of 1 to {MOST_PROMPTS} such prompts"

    def is_prompt(value: Any) -> bool:
        return isinstance(value, str) or (isinstance(value, list) and set(map(type, value)) == {int})

    def fits(value: Any) -> bool:
        return is_prompt(value) or (
            isinstance(value, list) and 1 <= len(value) <= MOST_PROMPTS and all(map(is_prompt, value))
        )

    value = f.take("prompt", supported, fits, required=True)
    return [value] if isinstance(value, str) or is_integer(value[0]) else value


async def completions(service: Service, http: HttpRequest) -> Any:
    """The endpoint."""
    f = await read_body(http)
    service.check_model(f)
    wanted = Completion(_prompts(f), *service.settings(read_settings, f))
    n, stream = wanted.common.n, wanted.common.stream
    with service.admitted(n * len(wanted.prompts), "n" if n > 1 else "prompt") as room:
        quick = not wanted.common.guided and n * sum(OUTPUT + len(prompt) for prompt in wanted.prompts) <= QUICK
        requests = await service.in_pool(_requests, service, wanted, quick=quick, of=f.size)
        if stream:
            return EventStream(service, requests, lambda: _Answer(service, wanted, requests).events, room.passed_on())
        outputs = await service.outputs(service.begun(requests, stream=False), http.receive)
        return await service.in_pool(_Answer(service, wanted, requests).whole, outputs, quick=brief(outputs))


def _requests(service: Service, wanted: Completion) -> list[Request]:
    requests: list[Request] = []
    for prompt in wanted.prompts:
        try:
            ids = service.llm.encode(prompt)
        except (RequestError, TokenizerError) as error:
            raise as_api_error(error, "prompt") from error
        requests += service.prepared(ids, wanted.common.params, wanted.common.n, wanted.asked, "prompt")
    return requests


class _Answer:
    """Writes what comes of the requests, of which each prompt has n."""

    def __init__(self, service: Service, wanted: Completion, requests: Sequence[Request]) -> None:
        self._wanted, self._requests = wanted, requests
        self._tokenizer = service.llm.tokenizer
        self._head = head("cmpl", "text_completion", service.names[0])
        self._chunks = Chunks(self._head, wanted.common.include_usage)
        self._outputs: dict[int, GenerationOutput] = {}
        self._offsets: dict[int, _Offsets] = {}
        self._echoes: dict[int, tuple[str, list[int]]] = {}
        self._begun = [not wanted.echo] * len(requests)
        self._plain = wanted.asked > 0 and wanted.common.params.logprobs is None
        places = range(len(requests)) if self._plain else ()
        self._of_text = [self._chunks.of_texts(partial(self._choice, i, [], None)) for i in places]

    def whole(self, outputs: Sequence[GenerationOutput]) -> Response:
        self._outputs = dict(enumerate(outputs))

        def choice(place: int) -> dict[str, Any]:
            output, (text, scores) = outputs[place], self._beginning(place)
            if self._wanted.asked:
                text, scores = text + output.text, [*scores, *(output.logprobs or [])]
            return self._choice(place, scores, output, text)

        return whole_answer(self._head, map(choice, range(len(outputs))), self._usage)

    def events(self, batch: list[tuple[int, Any]]) -> Iterator[str]:
        """One event for each token; at the end the usage, if it was asked for."""
        for place, piece in batch:
            if self._plain and self._begun[place] and piece.output is None:  # most of all
                if piece.text:
                    yield self._of_text[place](piece.text)
                continue
            text, scores = ("", []) if self._begun[place] else self._beginning(place)
            self._begun[place] = True
            if self._wanted.asked:
                text, scores = text + piece.text, scores + ([piece.logprobs] if piece.logprobs else [])
            if piece.output is not None:
                self._outputs[place] = piece.output
            if text or scores or piece.output is not None:
                yield self._chunks.of(self._choice(place, scores, piece.output, text))
        if not batch and self._wanted.common.include_usage:
            yield self._chunks.usage(self._usage())

    def _end(self, output: GenerationOutput | None) -> dict[str, Any]:
        """Where no token was asked for, one is drawn and not shown: what it would end is not said."""
        if output is None or (not self._wanted.asked and output.finish_reason == "stop"):
            return {"finish_reason": None if output is None else "length", "stop_reason": None}
        return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}

    def _beginning(self, place: int) -> tuple[str, list[Sampled | None]]:
        """With echo the prompt, and the log-probabilities of its tokens (None for the first)."""
        if not self._wanted.echo:
            return "", []
        return self._echo(place)[0], list(self._requests[place].prompt_logprobs or [])

    def _echo(self, place: int) -> tuple[str, list[int]]:
        """Made once for the n of a prompt."""
        at = place // self._wanted.common.n
        if at not in self._echoes:
            scored = self._wanted.common.params.logprobs is not None
            self._echoes[at] = _echo(self._tokenizer, self._requests[place], self._wanted.prompts[at], scored)
        return self._echoes[at]

    def _choice(
        self, place: int, scores: list[Sampled | None], output: GenerationOutput | None, text: str
    ) -> dict[str, Any]:
        shown = None if self._wanted.common.params.logprobs is None else self._logprobs(place, scores)
        return {"index": place, "text": text, "logprobs": shown} | self._end(output)

    def _logprobs(self, place: int, scores: list[Sampled | None]) -> dict[str, Any]:
        most = self._wanted.common.params.logprobs or 0
        first = self._requests[place].ids[0]
        if (at := self._offsets.get(place)) is None:
            shown, begins = self._echo(place) if self._wanted.echo else ("", [])
            at = self._offsets[place] = _Offsets(self._tokenizer, self._requests[place], begins, len(shown))
        names, values, tops, offsets = [], [], [], []
        for sampled in scores:
            token_id = first if sampled is None else sampled.token_id
            name = token_name(self._tokenizer, token_id)
            names.append(name)
            values.append(None if sampled is None else finite(sampled.logprob))
            tops.append(None if sampled is None else _top(self._tokenizer, sampled, most))
            offsets.append(at.of(token_id))
        return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _usage(self) -> dict[str, Any]:
        n, outputs = self._wanted.common.n, [self._outputs[place] for place in range(len(self._requests))]
        return usage(outputs[::n], outputs, None if self._wanted.asked else 0)


class _Offsets:
    """Where the tokens of an answer begin in its text: with echo those of the prompt at `begins`, others behind its
    `shown` characters and those that the tokens before them make, of which some take several."""

    def __init__(self, tokenizer: Tokenizer | None, request: Request, begins: Sequence[int], shown: int) -> None:
        self._echoed, self._at, self._stream = iter(begins), shown, None
        if tokenizer is not None:
            self._stream = TextStream(tokenizer, (), request.params.skip_special_tokens, request.ids)

    def of(self, token_id: int) -> int:
        """The offset of the next token."""
        if (at := next(self._echoed, None)) is None:
            at = self._at
            self._at += 0 if self._stream is None else len(self._stream.push(token_id))
        return at


def _echo(tokenizer: Tokenizer | None, request: Request, prompt: Prompt, scored: bool) -> tuple[str, list[int]]:
    """An echoed prompt: a text as it is written, ids with the special tokens that the answer shows; and, where its
    tokens are `scored`, where in it they begin."""
    skips, opening = request.params.skip_special_tokens, 0
    if tokenizer is None:
        return "", [0] * len(request.ids)
    if isinstance(prompt, str):
        known = tokenizer.offsets(prompt) if scored else []
        if not scored or (known is not None and len(known) == len(request.ids)):
            return prompt, known or []
        skips, opening = False, len(tokenizer.opening)
    stream, at, begins = TextStream(tokenizer, (), skips), 0, [0] * min(opening, len(request.ids))
    for token_id in request.ids[opening:]:
        begins.append(at)
        at += len(stream.push(token_id))
    stream.flush()
    return prompt if isinstance(prompt, str) else stream.text, begins


def _top(tokenizer: Tokenizer | None, sampled: Sampled, most: int) -> dict[str, float | None]:
    return {token_name(tokenizer, i): finite(logprob) for i, logprob in top_of(sampled, most)}
