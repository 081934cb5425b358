"""Server-sent events: a stream of JSON objects as OpenAI's clients read it."""

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from nibblelm.engine_core import Handle
from nibblelm.readers import Reader
from nibblelm.request import Request
from nibblelm.server.answers import answer, event
from nibblelm.server.errors import ApiError, error_of
from nibblelm.server.service import CONNECTION, Connection, Room, Service, until_gone

HEAD_START_S = 0.001
"""Seconds that the engine's thread has the GIL to itself after a request is entered, if its first token takes so long:
what the loop has still to do for the stream it does while the device computes, or in one write with that token."""

KEEP_ALIVE_S = 15.0
"""Seconds after which a comment tells proxies that a silent stream is alive."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx collects
]
_DONE = b"data: [DONE]\n\n"

Events = Callable[[list[tuple[int, Any]]], Iterable[str]]
"""The events, in ASCII, for what has come of the handles; an empty list stands for the end."""


class EventStream:
    """A response whose events come of `requests`, which it aborts when the client leaves. It enters them as late as it
    can: what the loop does behind that, the engine's thread waits for, as it wakes and wants the GIL.

    writer  makes what writes the events, when the engine has begun
    room    holds what `Service.admitted` gave; closed at the end
    """

    _events: Events
    _handles: Sequence[Handle] = ()

    def __init__(self, service: Service, requests: Sequence[Request], writer: Callable[[], Events], room: Room) -> None:
        self._service, self._requests, self._writer, self._room = service, requests, writer, room
        self._turn = asyncio.Event()  # of the task: at the end, or where the client does not read in time
        self._started = False  # whether its head is sent
        self._failure: Exception | None = None
        self._unfinished = len(requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"][CONNECTION]
        last = _DONE
        try:
            try:
                reader = await self._begun(connection)
                self._events = self._writer()
                async with self._service.limited(), until_gone(receive, self._handles):
                    connection.begin_stream()
                    await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS]})
                    self._started = True
                    await self._written(reader, connection, send)
                if not self._unfinished:
                    last = "".join(self._events([])).encode() + _DONE
            except ApiError as error:
                if not self._handles:
                    return await answer(error.body, error.status, error.headers)(scope, receive, send)
                if not self._started or not connection.in_time:
                    return  # which closes the connection: what it is sent, the client does not read
                last = event(json.dumps(error.body)).encode()
        finally:
            for handle in self._handles:
                handle.abort()
            self._room.close()
        connection.write_chunk(last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begun(self, connection: Connection) -> Reader:
        """Enter the requests, until the first token is there or HEAD_START_S have gone by."""
        timer = asyncio.get_running_loop().call_later(HEAD_START_S, self._turn.set)
        try:
            self._handles = self._service.begun(self._requests, stream=True)
            reader = Reader(self._handles, lambda: self._news(reader, connection))
            await self._turn.wait()
        finally:
            timer.cancel()
        self._turn.clear()
        return reader

    def _news(self, reader: Reader, connection: Connection) -> None:
        if self._started:
            self._write(reader, connection)
        else:
            self._turn.set()

    async def _written(self, reader: Reader, connection: Connection, send: Send) -> None:
        """All events but the last are sent. Raises what the engine or the events did."""
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
