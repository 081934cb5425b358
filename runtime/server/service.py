"""Between the endpoints and the engine: who may come in, what runs in threads, and how requests are waited for."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from nibblelm.engine import LLM
from nibblelm.engine_core import Handle
from nibblelm.errors import EngineFullError, NibbleLMError, RequestError, SchemaError
from nibblelm.readers import collect
from nibblelm.request import GenerationOutput, Request
from nibblelm.sampling_params import SamplingParams
from nibblelm.server.awake import Awake, awake_for
from nibblelm.server.errors import ApiError, as_api_error, error_of
from nibblelm.server.fields import Fields, parse

MOST_BYTES = 4 << 20
"""Of a request's body; a context of 128k tokens is about 0.5 MB of text."""

LONG_BYTES = 1 << 17
"""A body from which on tokenizing takes tens of milliseconds: 4 MiB take a second or two."""

BODY_S = 30.0
"""Seconds in which a body has to arrive."""

STALLED_S = 30.0
"""Seconds without a step, while something is to be computed, after which the server counts as ill."""

STOPPING = "the server is about to stop; ask another one"

CONNECTION = "connection"
"""Where the ASGI scope's `state` has the Connection that a request came by."""


class Connection(Protocol):
    """What ASGI does not tell of a client, and a way to write parts of a body at once: ASGI's `send` takes a turn of a
    task and of each layer around it, together several times as long as making an event."""

    def take_body(self) -> bytes | None:
        """The body of the request to be answered, once, if it has come to its end; else `receive` has it."""
        ...

    @property
    def in_time(self) -> bool:
        """Whether the client reads what it is sent; where it does not, `send` waits for it."""
        ...

    def begin_stream(self) -> None:
        """To be called before the head of a response whose length is not known."""
        ...

    def write_chunk(self, body: bytes) -> None:
        """Send it behind what was sent, in HTTP's chunked coding if the client knows it; after the client has left,
        nothing."""
        ...


AWAKE_OUTPUTS = 4
"""Outputs up to which the event loop stays awake: of more, some token or request is always there."""

MOST_SETTINGS, LONGEST_SETTINGS = 256, 1000
"""Ways to ask that are remembered, and characters of one."""

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """max_queue: outputs that may wait beyond those that are computed together; timeout_s: of one request, in all."""

    max_queue: int = 256
    timeout_s: float = 3600.0

    def check(self, max_sequences: int, most: int) -> None:
        """Raise RequestError where there may be more outputs than the `most` of an engine."""
        if max_sequences + self.max_queue > most:
            raise RequestError(
                f"max_sequences is {max_sequences} and max_queue is {self.max_queue}; supported: {most} in all"
            )


class ClientGoneError(Exception):
    """The client has closed its connection: there is nobody to answer."""


class Room:
    """Outputs that count among a service's `unfinished` until it is closed, as leaving a `with` does."""

    def __init__(self, service: "Service", outputs: int) -> None:
        self._service, self._outputs = service, outputs

    def __enter__(self) -> "Room":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._service.unfinished -= self._outputs
        self._outputs = 0

    def passed_on(self) -> "Room":
        """The same, for who closes it later."""
        room, self._outputs = Room(self._service, self._outputs), 0
        return room


class Service:
    """One model, under `names`. Used by one event loop; `unfinished` counts outputs from admission to the end."""

    def __init__(self, llm: LLM, names: Sequence[str], limits: Limits) -> None:
        self.llm, self.names, self.limits = llm, list(names), limits
        self.unfinished = 0
        self.refused = 0
        self.draining = False
        self.created = int(time.time())
        self.engine_failed = asyncio.Event()
        limits.check(llm.max_sequences, llm.engine.most)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="nibblelm-server")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="nibblelm-server-long")  # for who others shall not wait
        self._settings: dict[tuple[Any, str], Any] = {}

    @cached_property
    def _awake(self) -> Awake | None:
        device, loop = self.llm.device.type, asyncio.get_running_loop()
        return awake_for(device, loop, lambda: 0 < self.unfinished <= AWAKE_OUTPUTS)

    @property
    def most(self) -> int:
        """Outputs that may be unfinished at a time."""
        return self.llm.max_sequences + self.limits.max_queue

    def health(self) -> tuple[int, str]:
        """HTTP status, and a word for it."""
        if (end := self.llm.engine.end) is not None:
            return 503, f"ended: {end}"
        if self.draining:
            return 503, "draining"
        stalled_s = self.llm.engine.stats.stalled_s
        if stalled_s > STALLED_S:
            return 503, f"stalled: requests wait, and no step has come to an end for {stalled_s:.0f} s"
        return 200, "ok"

    def check_model(self, f: Fields) -> None:
        """Take the field `model`; a request that names none means the one there is."""
        name = f.text("model")
        if name is not None and name not in self.names:
            known = ", ".join(self.names)
            raise ApiError(
                404, f"the model {name!r:.80} is not here; served: {known}", param="model", code="model_not_found"
            )

    def settings(self, read: Callable[[Fields, dict[str, Any]], T], f: Fields) -> T:
        """What `read` makes of all fields that are left and generation_config.json. It is remembered: most clients ask
        in one way for one prompt after another, and to read that is a third of what comes before the engine."""
        key = read, f.left()
        if key not in self._settings:
            try:
                found = read(f, self.llm.generation_config)
            except NibbleLMError as error:
                raise as_api_error(error) from error
            if len(key[1]) > LONGEST_SETTINGS:
                return found
            if len(self._settings) >= MOST_SETTINGS:
                self._settings.clear()
            self._settings[key] = found
        return self._settings[key]

    async def in_pool(self, function: Callable[..., T], *args: Any, quick: bool = False, of: int = 0) -> T:
        """Run what would hold up the event loop, but for what is `quick`. `of`: bytes of the request's body, by which
        long ones have a thread of their own. The package's errors become a client's."""
        try:
            if quick:  # handing it to a thread and back takes longer
                return function(*args)
            pool = self._long if of > LONG_BYTES else self._pool
            return await asyncio.get_running_loop().run_in_executor(pool, function, *args)
        except NibbleLMError as error:
            raise as_api_error(error) from error

    def admitted(self, outputs: int, param: str = "n") -> Room:
        """Room for so many outputs. Raises ApiError 400, 429 or 503 where there is none."""
        if outputs > self.most:
            raise ApiError(400, f"{outputs} outputs in one request; supported: at most {self.most}", param=param)
        if self.draining:
            raise ApiError(503, STOPPING, headers={"retry-after": "1"})
        if self.unfinished + outputs > self.most:
            self.refused += 1
            raise ApiError(
                429,
                f"{self.unfinished} outputs are being computed or wait; with {outputs} more there would be more than "
                f"{self.most}: try again later",
                code="queue_full",
                headers={"retry-after": "1"},
            )
        self.unfinished += outputs
        if self._awake is not None:
            self._awake.stir()
        return Room(self, outputs)

    def prepared(
        self,
        ids: list[int],
        params: SamplingParams,
        count: int,
        asked: int | None,
        param: str,
        answers: bool = False,
    ) -> list[Request]:
        """Engine requests for `count` outputs after a prompt, drawn with seed, seed + 1, ... For a thread of the pool.

        answers  as `LLM.request` has it
        asked    tokens that the client asked for by number: fewer would be a silent cut
        """
        context = self.llm.max_context
        least = 1 if params.prompt_logprobs is None else 0  # a prompt that is only scored may fill the context
        if len(ids) + max(least, 1 if asked is None else asked) > context:
            wanted = f" and {asked} are asked for" if asked else ""
            raise ApiError(
                400,
                f"the prompt has {len(ids)} tokens{wanted}; the context holds {context}: shorten it, or ask for fewer",
                param=param,
                code="context_length_exceeded",
            )
        try:
            return self.llm.requests(ids, params, count, answers)
        except SchemaError:  # of what the answer has to follow, or of tools: who asked knows
            raise
        except RequestError as error:
            text, names = str(error), ("logit_bias", "stop_token_ids", "stop", param)
            named = next(name for name in names if text.startswith(name) or name == param)
            raise as_api_error(error, named) from error

    def begun(self, requests: Sequence[Request], stream: bool) -> list[Handle]:
        """Enter requests into the engine."""
        handles: list[Handle] = []
        try:
            for request in requests:
                handles.append(self.llm.engine.add(request, stream))
        except NibbleLMError as error:
            for handle in handles:
                handle.abort()
            self.refused += isinstance(error, EngineFullError)
            raise self._failed(error) from error
        return handles

    @asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """The time that a request may take; errors of the engine become a client's."""
        try:
            async with asyncio.timeout(self.limits.timeout_s):
                yield
        except TimeoutError as error:
            raise ApiError(
                504,
                f"the request took more than {self.limits.timeout_s:g} s; ask for fewer tokens, or raise --timeout",
                code="timeout",
                headers={"x-should-retry": "false"},
            ) from error
        except NibbleLMError as error:
            raise self._failed(error) from error

    async def outputs(self, handles: Sequence[Handle], receive: Receive) -> list[GenerationOutput]:
        """What requests without a stream come to, in their order. Raises ClientGoneError when the client leaves."""
        done: list[GenerationOutput | None] = [None] * len(handles)
        async with self.limited(), until_gone(receive, handles):
            async for batch in collect(handles):
                for place, piece in batch:
                    done[place] = piece.output
        finished = [output for output in done if output is not None]
        if len(finished) < len(handles):
            raise ClientGoneError
        if failed := next((error for output in finished if (error := error_of(output))), None):
            raise failed
        return finished

    def _failed(self, error: NibbleLMError) -> ApiError:
        if self.llm.engine.end is not None:
            if self.draining:
                return ApiError(503, STOPPING, code="engine_ended")
            self.engine_failed.set()
        return as_api_error(error)


@asynccontextmanager
async def until_gone(receive: Receive, handles: Sequence[Handle]) -> AsyncIterator[None]:
    """Abort `handles` as soon as the client closes its connection; for a request whose body has been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for handle in handles:
            handle.abort()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()


async def read_body(request: HttpRequest) -> Fields:
    """The JSON object that a request carries."""
    headers = dict(reversed(request.scope["headers"]))  # of several the first counts
    kind, encoding = headers.get(b"content-type", b""), headers.get(b"content-encoding", b"").strip()
    if encoding.lower() not in (b"", b"identity"):
        raise ApiError(415, f"Content-Encoding is {encoding.decode('latin-1'):.60}; send the body as it is")
    announced = headers.get(b"content-length", b"").lstrip(b"0") or b"0"  # a number: httptools refuses others
    if b"expect" in headers and (len(announced) > 18 or int(announced) > MOST_BYTES):  # who does not ask has begun
        raise _too_long()
    if kind.split(b";")[0].strip().lower() != b"application/json":
        raise ApiError(415, "the body has to be JSON, sent with the header Content-Type: application/json")

    async def read() -> bytes:  # to the end, also what is too long: closed before, few clients see the answer
        body = bytearray()
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            if len(body) <= MOST_BYTES:
                body += message["body"]
            more = message["more_body"]
        return bytes(body)

    connection: Connection = request.scope["state"][CONNECTION]
    if (whole := connection.take_body()) is None:
        whole = await within(BODY_S, read(), "the body")
    if len(whole) > MOST_BYTES:
        raise _too_long()
    return Fields(parse(whole), size=len(whole))


def _too_long() -> ApiError:
    return ApiError(413, f"the body has more than {MOST_BYTES} bytes", headers={"connection": "close"})


async def within(seconds: float, work: Awaitable[T], what: str) -> T:
    """The result of `work`, or ApiError 408."""
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError as error:
        raise ApiError(408, f"{what} did not arrive within {seconds:g} s", headers={"connection": "close"}) from error
