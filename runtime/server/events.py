"""Server-sent events: a stream of JSON objects as OpenAI's clients read it."""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from nibblelm.engine_core import Handle
from nibblelm.readers import Reader
from nibblelm.server.answers import event
from nibblelm.server.errors import ApiError, error_of
from nibblelm.server.service import Service, until_gone

KEEP_ALIVE_S = 15.0
"""Seconds after which a comment tells proxies that a silent stream is alive."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx collects
]
_DONE = b"data: [DONE]\n\n"

CONNECTION = "connection"
"""Where the ASGI scope's `state` has the Connection that a request came by."""


class Connection(Protocol):
    """Writes parts of a body at once. ASGI's `send` takes a turn of a task and of each layer around it, together
    several times as long as making an event."""

    @property
    def in_time(self) -> bool:
        """Whether the client reads what it is sent; where it does not, `send` waits for it."""
        ...

    def write_chunk(self, body: bytes) -> None:
        """Send it behind what was sent, in HTTP's chunked coding; after the client has left, nothing."""
        ...


Events = Callable[[list[tuple[int, Any]]], Iterable[str]]
"""The events, in ASCII, for what has come of the handles; an empty list stands for the end."""


class EventStream:
    """A response whose events come of `handles`, which it aborts when the client leaves.

    room    holds what `Service.admitted` gave; closed at the end
    """

    def __init__(self, service: Service, handles: Sequence[Handle], events: Events, room: ExitStack) -> None:
        self._service, self._handles, self._events, self._room = service, handles, events, room
        self._turn = asyncio.Event()  # of the task: at the end, or where the client does not read in time
        self._failure: Exception | None = None
        self._unfinished = len(handles)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"][CONNECTION]
        last, started = _DONE, False
        try:
            try:
                async with self._service.limited(), until_gone(receive, self._handles):
                    await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS]})
                    started = True
                    await self._written(connection, send)
                if not self._unfinished:
                    last = "".join(self._events([])).encode() + _DONE
            except ApiError as error:
                if not started or not connection.in_time:
                    return  # which closes the connection: what it is sent, the client does not read
                last = event(json.dumps(error.body)).encode()
        finally:
            for handle in self._handles:
                handle.abort()
            self._room.close()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _written(self, connection: Connection, send: Send) -> None:
        """All events but the last are sent. Raises what the engine or the events did."""
        reader = Reader(self._handles, lambda: self._write(reader, connection))
        self._write(reader, connection)
        while True:
            try:
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await self._turn.wait()
            except TimeoutError:
                if connection.in_time:
                    connection.write_chunk(b": keep-alive\n\n")
                continue
            if self._failure is not None or reader.ended:
                break
            self._turn.clear()
            await send({"type": "http.response.body", "body": b"", "more_body": True})  # once the client has read
            self._write(reader, connection)
        if (failure := self._failure or reader.failure) is not None:
            raise failure

    def _write(self, reader: Reader, connection: Connection) -> None:
        """Send what is there; called by the loop, once for all streams of a step."""
        try:
            if connection.in_time:
                batch = reader.take()
                if text := "".join(self._events(batch)) if batch else "":
                    connection.write_chunk(text.encode())
                for _, piece in batch:
                    if piece.output is not None:
                        self._unfinished -= 1
                        if error := error_of(piece.output):
                            raise error
                if not reader.ended:
                    return
        except Exception as error:  # for the task
            self._failure = error
        self._turn.set()
