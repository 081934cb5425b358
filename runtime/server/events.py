"""Server-sent events: a stream of JSON objects as OpenAI's clients read it."""

import json
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import ExitStack, aclosing
from typing import Any

from starlette.types import Receive, Scope, Send

from nibblelm.engine_core import Handle, collect
from nibblelm.server.errors import ApiError
from nibblelm.server.service import Service, until_gone

KEEP_ALIVE_S = 15.0
"""Seconds after which a comment tells proxies that a silent stream is alive."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx collects
]
_DONE = b"data: [DONE]\n\n"

Events = Callable[[list[tuple[int, Any]]], Iterable[str]]
"""The JSON texts to send for what has come of the handles; an empty list stands for the end."""


def event(value: str) -> bytes:
    """One event, of a JSON text."""
    return b"data: " + value.encode() + b"\n\n"


class EventStream:
    """A response whose events come of `handles`, which it aborts when the client leaves.

    room    holds what `Service.admitted` gave; closed at the end
    """

    def __init__(self, service: Service, handles: Sequence[Handle], events: Events, room: ExitStack) -> None:
        self._service, self._handles, self._events, self._room = service, handles, events, room

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS]})
            last = _DONE
            try:
                async with (
                    self._service.limited(),
                    until_gone(receive, self._handles),
                    aclosing(self._chunks()) as chunks,
                ):
                    async for chunk in chunks:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except ApiError as error:
                last = event(json.dumps(error.body))
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            for handle in self._handles:
                handle.abort()
            self._room.close()

    async def _chunks(self) -> AsyncGenerator[bytes]:
        unfinished = len(self._handles)
        async for batch in collect(self._handles, KEEP_ALIVE_S):
            if chunk := b"".join(map(event, self._events(batch))) if batch else b": keep-alive\n\n":
                yield chunk
            for _, piece in batch:
                if piece.output is not None:
                    unfinished -= 1
                    if piece.output.error is not None:
                        raise ApiError(500, piece.output.error)
        if not unfinished:
            yield b"".join(map(event, self._events([])))
