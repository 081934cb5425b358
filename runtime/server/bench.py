"""A client that measures any server with OpenAI's /v1/completions: arrivals as they come, and what each one waits for.

Arrivals are a Poisson process of a given rate, at most `concurrency` at a time: who comes while all places are taken
waits, and the wait counts. Without a rate all are there at once, and times count from a request's sending. Lengths are
log-normal, as conversations' are: prompts of 220 tokens on average (deviation of the logarithm 1.25), answers of 200
(0.9). Prompts are random words, so that no two begin alike. Everything follows from the seed.
"""

import asyncio
import json
import math
import random
import ssl
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools

from nibblelm.errors import RequestError

WORDS = (
    "time day way man thing life child world school state family student group country hand part place case week "
    "company system question work night point home water room mother area money story fact month lot right study"
).split()
"""Of which prompts are made."""


LONGEST = 1024
"""Words of a prompt, tokens of an answer, that a load has unasked."""

AMPLE = 8 * LONGEST
"""A context that shortens neither: a word may take four tokens, and both have a half of it."""

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
"""What reading a server's JSON may raise."""


@dataclass(frozen=True)
class Load:
    """rate: requests a second, inf for all at once; lengths in tokens, about as many words for a prompt. The longest
    are 1,024, fewer where a server that lists its model tells of a shorter context."""

    requests: int = 200
    rate: float = math.inf
    concurrency: int = 64
    prompt_mean: float = 220.0
    answer_mean: float = 200.0
    longest_prompt: int | None = None
    longest_answer: int | None = None
    ignore_eos: bool = False
    seed: int = 0


@dataclass
class Result:
    """One request: seconds from its arrival or sending, token counts of the server, or why it failed."""

    first_s: float = 0.0
    end_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    error: str | None = None

    @property
    def token_s(self) -> float:
        """Seconds for each token after the first."""
        return (self.end_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


def length(rng: random.Random, mean: float, sigma: float, longest: int) -> int:
    """A log-normal length of that mean, at least 4 where it may be."""
    return max(min(4, longest), min(longest, round(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma))))


Arrival = tuple[float, dict[str, Any]]
"""Seconds after the first, and the body of a request to /v1/completions."""


async def measured(url: str, model: str | None, key: str | None, load: Load) -> tuple[list[Result], float]:
    """Every request's result, and the seconds from the first arrival to the last end."""
    context = AMPLE
    if model is None:
        model, context = await _Target(url, key).first_model()
    return await answered(url, key, arrivals(load, model, context), load.concurrency, math.isfinite(load.rate))


def arrivals(load: Load, model: str, context: int = AMPLE) -> Iterator[Arrival]:
    """The requests of a load, as they come, that fit a context of so many tokens."""
    rng, due = random.Random(load.seed), 0.0
    longest_prompt = load.longest_prompt or max(1, min(LONGEST, context // 8))
    longest_answer = load.longest_answer or max(1, min(LONGEST, context // 2))
    for i in range(load.requests):
        prompt = " ".join(rng.choices(WORDS, k=length(rng, load.prompt_mean, 1.25, longest_prompt)))
        answer = length(rng, load.answer_mean, 0.9, longest_answer)
        body = {"model": model, "prompt": prompt, "max_tokens": answer, "stream": True, "seed": load.seed + i}
        body |= {"stream_options": {"include_usage": True}} | ({"ignore_eos": True} if load.ignore_eos else {})
        yield due, body
        due += 0.0 if math.isinf(load.rate) else rng.expovariate(load.rate)


async def answered(
    url: str, key: str | None, requests: Iterable[Arrival], concurrency: int, waits_count: bool = True
) -> tuple[list[Result], float]:
    """Send each request when it is due, at most `concurrency` at a time; results as `measured` gives them."""
    target, room = _Target(url, key), asyncio.Semaphore(concurrency)

    async def one(body: dict[str, Any], arrival: float) -> Result:
        async with room:
            return await _request(target, body, arrival if waits_count else time.perf_counter())

    begun = time.perf_counter()
    tasks: list[asyncio.Task[Result]] = []
    for due_s, body in requests:
        due = begun + due_s
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(body, due)))
    return list(await asyncio.gather(*tasks)), time.perf_counter() - begun


def summary(results: Sequence[Result], took_s: float, first_goal_s: float, token_goal_s: float) -> dict[str, Any]:
    """Rates, percentiles in milliseconds (None of no times), and goodput: requests a second that met both goals."""
    good = [r for r in results if r.error is None]
    if not good:
        raise RequestError(f"none of {len(results)} requests was answered; the first failed with: {results[0].error}")
    met = [r for r in good if r.first_s <= first_goal_s and r.token_s <= token_goal_s]
    times = {
        "ttft_ms": [r.first_s for r in good],
        "itl_ms": [gap for r in good for gap in r.gaps_s],
        "tpot_ms": [r.token_s for r in good if r.tokens > 1],
        "e2e_ms": [r.end_s for r in good],
    }
    return {
        "requests": len(results),
        "failed": len(results) - len(good),
        "errors": sorted({r.error for r in results if r.error is not None})[:5],
        "seconds": took_s,
        "requests_s": len(good) / took_s,
        "prompt_tokens_s": sum(r.prompt_tokens for r in good) / took_s,
        "output_tokens_s": sum(r.tokens for r in good) / took_s,
        "goodput_s": len(met) / took_s,
        "goodput_share": len(met) / len(results),
        **{
            name: {f"p{p}": 1000 * percentile(values, p) if values else None for p in (50, 90, 99)}
            for name, values in times.items()
        },
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


async def _request(target: "_Target", body: dict[str, Any], arrival: float) -> Result:
    result, last, counted, ended = Result(), 0.0, False, False
    try:
        async for data in target.events("/v1/completions", body):
            now = time.perf_counter()
            if data == b"[DONE]":
                ended = True
                continue
            event = json.loads(data)
            if "error" in event:
                raise RequestError(str(event["error"].get("message")))
            ended |= any(choice.get("finish_reason") for choice in event.get("choices", ()))
            if any(choice.get("text") for choice in event.get("choices", ())):
                if last:
                    result.gaps_s.append(now - last)
                else:
                    result.first_s = now - arrival
                last = now
                result.tokens += 1
            if usage := event.get("usage"):
                result.prompt_tokens, result.tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
                counted = True
        if not (last or counted):
            raise RequestError("an answer without text or usage")
        if not ended:
            raise RequestError("an answer that ends without a finish_reason or [DONE]")
        result.end_s = time.perf_counter() - arrival
    except (OSError, RequestError, *UNREADABLE) as error:
        result.error = f"{type(error).__name__}: {error}"[:200]
    return result


class _Target:
    """A server; a connection for each request."""

    def __init__(self, url: str, key: str | None) -> None:
        try:
            parts = urlsplit(url)
            self._host, port = parts.hostname or "", parts.port
            if parts.scheme not in ("http", "https") or not self._host:
                raise ValueError("a scheme or a host is missing")
        except ValueError as error:  # which a bracket without its other is, too, and a port above 65535
            raise RequestError(f"--url is {url!r}; supported: http://HOST:PORT or https://HOST") from error
        self._tls = parts.scheme == "https"
        self._port = port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._fields = f"host: {parts.netloc.rpartition('@')[2]}\r\nconnection: close\r\n"
        self._fields += "" if key is None else f"authorization: Bearer {key}\r\n"

    async def first_model(self) -> tuple[str, int]:
        """The first that the server lists, and its context, AMPLE where it does not tell."""
        text = b"\n".join([line async for line in self._lines("GET", "/v1/models", b"")])
        try:
            first = json.loads(text)["data"][0]
            told = first.get("max_model_len")
            return str(first["id"]), told if isinstance(told, int) and told > 0 else AMPLE
        except UNREADABLE as error:
            shown = text[:150].decode(errors="replace")
            raise RequestError(f"/v1/models lists no model: {shown!r}; name one with --served-model") from error

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """The data of each event, [DONE] too, to the end; of an answer without a stream its one line."""
        async for line in self._lines("POST", path, json.dumps(body).encode()):
            if line.startswith(b"data:"):
                yield line[5:].strip()
            elif line.startswith(b"{"):
                yield line

    async def _lines(self, method: str, path: str, body: bytes) -> AsyncIterator[bytes]:
        """Lines of the answer's body. Raises RequestError for another status than 200 and for what is no answer."""
        context = ssl.create_default_context() if self._tls else None
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=context)
        except (OSError, UnicodeError) as error:
            raise RequestError(f"{self._host}:{self._port} cannot be reached: {error}") from error
        try:
            head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._fields}content-type: application/json\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            answer, rest = _Answer(), b""
            while not answer.complete and (data := await reader.read(1 << 16)):
                rest += answer.body_of(data)
                if answer.status == 200:
                    *lines, rest = rest.split(b"\n")
                    for line in lines:
                        yield line.rstrip(b"\r")
            if answer.status not in (0, 200):
                raise RequestError(f"status {answer.status}: {rest[:150].decode(errors='replace')}")
            if answer.unfinished:
                raise RequestError("the connection ended in the middle of the answer")
            yield rest
        finally:
            writer.close()


class _Answer:
    """An HTTP answer, as httptools tells of it.

    status      0 until its head has come
    complete    it has ended, by its own count
    unfinished  it does not end here, if the connection does
    """

    def __init__(self) -> None:
        self.status, self.complete, self.unfinished = 0, False, True
        self._body, self._counted = b"", False
        self._parser = httptools.HttpResponseParser(self)

    def body_of(self, data: bytes) -> bytes:
        """What of the body is in the next bytes from the connection. What comes behind the answer does not count."""
        self._body = b""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            raise RequestError(f"status {self.status}: the server changes the protocol") from error
        except httptools.HttpParserError as error:
            if not self.complete:
                raise RequestError(f"the answer is not HTTP: {error}") from error
        return self._body

    def on_message_begin(self) -> None:
        self._counted = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._counted |= name.lower() == b"content-length"
        self._counted |= name.lower() == b"transfer-encoding" and b"chunked" in value.lower()

    def on_headers_complete(self) -> None:
        if not self.complete:
            self.status, self.unfinished = self._parser.get_status_code(), self._counted

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self._body += data

    def on_message_complete(self) -> None:
        if self.status >= 200:  # others come before the answer
            self.complete, self.unfinished = True, False
