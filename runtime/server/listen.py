"""The process: a socket, its limits on slow clients, signals, and the way out."""

import asyncio
import json
import logging
import re
import signal
import socket
import sys
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TextIO

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nibblelm.engine import LLM
from nibblelm.errors import RequestError
from nibblelm.server.app import application
from nibblelm.server.errors import ApiError
from nibblelm.server.service import CONNECTION, STOPPING, Limits, Service

HEAD_S = 15.0
"""Seconds that a client may take for a request's first line and headers, from its connection or its first byte on."""

HEAD_BYTES = 64 << 10
KEEP_ALIVE_S = 75

LINGER_S = 2.0
"""Seconds that a client may go on sending what is not read, so that it sees why: closing at once would reset."""


@dataclass(frozen=True)
class Options:
    """Where to listen, and for whom.

    keys      any of them is asked for; none: everyone may come. RequestError for one that is not visible ASCII
    origins   of web pages that may use the server from a browser, "*" for all
    drain_s   seconds that running requests have to end after SIGTERM
    log       gets a line for each request
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    limits: Limits = field(default_factory=Limits)
    drain_s: float = 30.0
    log: TextIO | None = None

    def __post_init__(self) -> None:
        origins = tuple(origin.lower().removesuffix("/") for origin in self.origins)  # as browsers send them
        object.__setattr__(self, "origins", origins)
        for origin in origins:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
                raise RequestError(
                    f"{origin!r} is no origin of a page (--cors); supported: as http://localhost:3000, or *"
                )
        if not all(re.fullmatch("[!-~]+", key) for key in self.keys):
            raise RequestError(
                "a key (--api-key, --api-key-file) is empty, or has characters that headers do not carry; "
                "supported: visible characters of ASCII"
            )


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens: connections wait in it until the server is up. RequestError if it cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError, UnicodeError) as error:
        raise RequestError(f"cannot listen on {host}, port {port}: {error}; choose others (--host, --port)") from error


def serve(
    llm: LLM,
    names: Sequence[str],
    listening: socket.socket,
    options: Options,
    ready: Callable[[], object] = lambda: None,
) -> int:
    """Serve until SIGTERM, SIGINT or the end of the engine; the exit code. Run by the main thread. `ready` is called
    once signals are heeded.

    SIGTERM: nothing new, what runs has `drain_s` to end; 0. A second one, or SIGINT: at once; 130 after SIGINT.
    """
    host = listening.getsockname()[0]
    if not options.keys and not _is_loopback(host):
        warnings.warn(f"everyone who reaches {host} can use this server; ask for a key with --api-key", stacklevel=2)
    if llm.tokenizer is None:
        warnings.warn("the model has no tokenizer: prompts are token ids, and answers have no text", stacklevel=2)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # its warnings are about requests of strangers
    service = Service(llm, names, options.limits)
    llm.engine.start()
    config = configured(application(service, options.keys, options.origins, options.log))
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(_run(service, config, listening, options.drain_s, ready))


def configured(app: ASGIApp) -> uvicorn.Config:
    """How uvicorn serves an application here."""
    return uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        loop="uvloop",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # who asks is of no account
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=2,
    )


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


class Server(uvicorn.Server):
    """uvicorn's, run by whoever has the loop."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)  # without its signal handlers, which know no draining


async def _run(
    service: Service, config: uvicorn.Config, listening: socket.socket, drain_s: float, ready: Callable[[], object]
) -> int:
    server, loop = Server(config), asyncio.get_running_loop()
    received: asyncio.Queue[int] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received.put_nowait, number)
    ready()
    serving = asyncio.create_task(server.serve([listening]))
    stopped = asyncio.create_task(received.get())
    failed = asyncio.create_task(service.engine_failed.wait())
    await asyncio.wait({serving, stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
    code = 1
    if stopped.done():
        code = 0
        if stopped.result() == signal.SIGINT or await _interrupted(service, received, drain_s):
            code = 130
    elif failed.done():
        print(f"nibblelm: error: {service.llm.engine.end}", file=sys.stderr)
    service.draining = True
    await loop.run_in_executor(None, service.llm.close)  # what has not ended by now gets its error
    server.should_exit = True
    failed.cancel()
    await serving
    return code


async def _interrupted(service: Service, received: "asyncio.Queue[int]", drain_s: float) -> bool:
    """Wait for what runs to end. Whether Ctrl-C put an end to that."""
    service.draining = True
    print(f"nibblelm: stopping; {service.unfinished} outputs have {drain_s:g} s to end", file=sys.stderr)
    with suppress(TimeoutError):
        async with asyncio.timeout(drain_s):
            while service.unfinished:
                with suppress(TimeoutError):
                    return await asyncio.wait_for(received.get(), 0.02) == signal.SIGINT
    return False


class _Protocol(HttpToolsProtocol):
    """uvicorn's, with an end to clients that never come to the point: it has none for a request's head. An upgrade to
    another protocol, which HTTP/2 clients offer, is passed over; uvicorn's drops the request's body. It is a
    `Connection` for streams, too."""

    parser: Any  # an HttpRequestParser, and none once the connection is lost
    _head_timer: asyncio.TimerHandle | None = None
    _head_open = False  # a request's head has begun, and has not come to its end
    _head_bytes = 0  # received since its beginning, but for the piece that it began in
    _read_bytes = 0  # of its path and of its headers that are whole
    _chunked = True  # the stream that is being sent
    _cycles: tuple[Any, ...] = ()  # of requests that are not answered yet, of which several may be pipelined
    _refusal: ApiError | None = None  # of what cannot be read, and nothing is read after it

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(HEAD_S, transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_done()
        self._unset_keepalive_if_required()  # with `exc` uvicorn does not, and would free nothing for 75 s
        super().connection_lost(exc)  # which tells the newest request alone
        for cycle in self._cycles:
            cycle.disconnected = cycle.disconnected or not cycle.response_complete
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse_rest(self._too_long() or ApiError(400, f"this cannot be read as HTTP/1.1: {error}"))
            return
        if self._head_open and self._head_timer is None:  # most heads come in one piece
            self._head_timer = self.loop.call_later(HEAD_S, self.transport.close)
        if self._head_open and (too_long := self._too_long(self._head_bytes)):
            self._refuse_rest(too_long)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope.setdefault("state", {})[CONNECTION] = self
        self._head_open, self._head_bytes, self._read_bytes = True, 0, 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._read_bytes += len(url)
        if len(self.url) > HEAD_BYTES // 2:
            raise httptools.HttpParserError  # else the parser would go on to the end of what has come

    def on_header(self, name: bytes, value: bytes) -> None:
        self._read_bytes += len(name) + len(value) + len(": \r\n")
        if self._read_bytes > HEAD_BYTES:
            raise httptools.HttpParserError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._head_done()
            super().on_headers_complete()
            self._cycles = (*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self.cycle.more_body = False  # of a request that was answered before its end, too

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._refuse_in_turn()

    def shutdown(self) -> None:
        """At the end of draining: nobody waits for what a client has still to send."""
        if self._refusal is not None and all(cycle.response_complete for cycle in self._cycles):
            self.transport.close()
        elif self._refusal is None and (now := self.cycle) and now.more_body and not now.response_started:
            self._refuse_rest(ApiError(503, STOPPING))
            self.transport.close()
        else:
            super().shutdown()

    def _refuse_rest(self, error: ApiError) -> None:
        """Refuse the request that is being read, past the application, and all that comes after it."""
        self._head_done()
        self._refusal = error
        unread = self.cycle
        if unread is not None and unread.more_body:  # it has begun already
            self.pipeline = deque(entry for entry in self.pipeline if entry[0] is not unread)
            self._cycles = tuple(cycle for cycle in self._cycles if cycle is not unread)
            unread.disconnected, unread.waiting_for_100_continue = True, False
            unread.message_event.set()
            if unread.response_started:
                self.transport.close()
        self._refuse_in_turn()

    def _refuse_in_turn(self) -> None:
        """The requests before it are answered first."""
        if self._refusal is None or self.transport.is_closing() or not all(c.response_complete for c in self._cycles):
            return
        self._unset_keepalive_if_required()
        self.flow.resume_reading()
        status, body = HTTPStatus(self._refusal.status), json.dumps(self._refusal.body)
        head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
        self.transport.write(f"HTTP/1.1 {status.value} {status.phrase}\r\n{head}\r\n\r\n{body}".encode())
        self.transport.write_eof()
        self._head_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _parse(self, data: bytes) -> None:
        """Feed the parser, which takes what follows a head that offers an upgrade for the other protocol's: the head is
        fed again, without the offer."""
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                method, version = self.parser.get_method(), self.parser.get_http_version().encode()
                if method == b"CONNECT":
                    raise httptools.HttpParserError("the method CONNECT is not supported") from offer
                kept = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
                self.parser.feed_data(b"%b %b HTTP/%b\r\n%b\r\n" % (method, self.url, version, kept))
                rest = rest[offer.args[0] :]

    def take_body(self) -> bytes | None:
        cycle = self._answered
        if cycle is None or cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = cycle.body, bytearray()
        return bytes(body)

    @property
    def in_time(self) -> bool:
        return not self.flow.write_paused

    def begin_stream(self) -> None:
        self._chunked = self._answered.scope["http_version"] != "1.0"
        if not self._chunked:  # the end of the connection is that of the body
            self._answered.chunked_encoding = False

    def write_chunk(self, body: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if self._chunked else body)

    @property
    def _answered(self) -> Any:
        """The cycle of the request whose turn it is, for which the others wait; None if its rest was refused."""
        return next((cycle for cycle in self._cycles if not cycle.response_complete), None)

    def _too_long(self, received: int = 0) -> ApiError | None:
        """What to answer to a head, of which so much has been received, or to trailers that have more than they may."""
        if self.scope is None:
            return None
        if len(self.url) > HEAD_BYTES // 2:
            return ApiError(414, f"the path has more than {HEAD_BYTES // 2} bytes")
        if max(received, self._read_bytes) > HEAD_BYTES:
            return ApiError(431, f"the request's first line and headers have more than {HEAD_BYTES} bytes")
        return None

    def _head_done(self) -> None:
        self._head_open = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
