"""Parts of answers that completions and chats have in common."""

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from starlette.responses import Response

from nibblelm import __version__
from nibblelm.request import GenerationOutput
from nibblelm.sampler import Sampled
from nibblelm.tokenizer import Tokenizer

FEW_SCORES = 100

LEAST_LOGPROB = -9999.0
"""What stands for minus infinity, which JSON has no word for."""


def head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """What every answer begins with."""
    return {
        "id": f"{prefix}-{secrets.token_hex(16)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"nibblelm-{__version__}",
    }


def usage(
    prompts: Sequence[GenerationOutput], outputs: Sequence[GenerationOutput], generated: int | None = None
) -> dict[str, Any]:
    """Tokens of a request: each prompt is counted once, each output in full.

    prompts    one output of each prompt
    generated  tokens of the outputs, if fewer were asked for than were computed
    """
    prompt = sum(o.timings.prompt_tokens for o in prompts)
    completion = sum(o.timings.generated_tokens for o in outputs) if generated is None else generated
    cached = sum(o.timings.prompt_tokens - o.timings.prefilled_tokens for o in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in ASCII, which holds whatever a text may: lone surrogates, too."""
    return Response(json.dumps(value), status, headers, media_type="application/json")


def brief(outputs: Sequence[GenerationOutput]) -> bool:
    """Whether their log-probabilities are written within about a millisecond."""
    return sum(len(output.logprobs or ()) + len(output.prompt_logprobs or ()) for output in outputs) <= FEW_SCORES


def whole_answer(head: dict[str, Any], choices: Iterable[dict[str, Any]], usage: Callable[[], Any]) -> Response:
    """An answer whose choices are written one by one: between two, a thread that does so makes way for others."""
    start, shown = json.dumps(head)[:-1], ", ".join(map(json.dumps, choices))
    text = f'{start}, "choices": [{shown}], "usage": {json.dumps(usage())}}}'
    return Response(text, media_type="application/json")


def event(value: str) -> str:
    """One server-sent event, of a JSON text."""
    return f"data: {value}\n\n"


class Chunks:
    """The events of a stream: an answer's head, written once, around the choices of each."""

    def __init__(self, head: dict[str, Any], with_usage: bool) -> None:
        self._start = json.dumps(head)[:-1] + ', "choices": ['
        self._end = '], "usage": null}' if with_usage else "]}"

    def of(self, choice: dict[str, Any]) -> str:
        return event(self._start + json.dumps(choice) + self._end)

    def of_texts(self, choice: Callable[[str], dict[str, Any]]) -> Callable[[str], str]:
        """`of` for choices that differ in one text alone: all else is written once."""
        before, _, behind = self.of(choice("")).rpartition('""')
        return lambda text: before + quoted(text) + behind

    def usage(self, figures: dict[str, Any]) -> str:
        """The last event, which has no choice."""
        return event(f'{self._start}], "usage": {json.dumps(figures)}}}')


def finite(logprob: float | None) -> float | None:
    """A log-probability that JSON can hold."""
    return None if logprob is None else max(logprob, LEAST_LOGPROB)


def token_name(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token's text; `bytes:\\\\xe2\\\\x82` where it is no whole characters, `token_id:5` without a tokenizer."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def top_of(scores: Sampled, most: int) -> list[tuple[int, float]]:
    """The most likely tokens of a place, and the one that was chosen."""
    top = scores.top[:most]
    assert scores.logprob is not None
    return top if any(i == scores.token_id for i, _ in top) else [*top, (scores.token_id, scores.logprob)]
