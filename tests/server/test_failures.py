"""What goes wrong inside a server, and clients that never come to the point: in this process, where it can be made."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn

from nibblelm import LLM
from nibblelm.runner import Runner
from nibblelm.server import events, listen, service
from nibblelm.server.app import application
from nibblelm.server.service import Limits, Service


class Running:
    """The application in a thread of its own."""

    def __init__(self, llm: LLM, limits: Limits) -> None:
        self.service = Service(llm, ["demo"], limits)
        config = uvicorn.Config(
            application(self.service, [], []), http=listen._Protocol, ws="none", lifespan="off", log_config=None
        )
        self._server = listen._Server(config)
        self._socket = listen.bound("127.0.0.1", 0)
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve([self._socket])))
        self._thread.start()

    def ask(self, body: dict[str, Any]) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read().decode()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


@pytest.fixture
def running(folder: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(**limits: Any) -> Running:
        started.append(Running(LLM(folder, device="cpu"), Limits(**limits)))
        return started[-1]

    yield start
    for one in started:
        one.stop()


def test_a_failed_step_is_an_event_of_the_stream(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, steps = running(), iter(range(1000))
    decode = Runner.decode

    def broken(self: Runner, *args: Any) -> Any:
        if next(steps) == 5:
            raise RuntimeError("illegal instruction")
        return decode(self, *args)

    monkeypatch.setattr(Runner, "decode", broken)
    status, text = server.ask({"prompt": "Once", "stream": True, "max_tokens": 100, "temperature": 0})
    *pieces, last = text.strip().split("\n\n")
    assert (status, len(pieces)) == (200, 6)
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == ("engine_ended", "server_error")
    assert "illegal instruction" in error["message"]
    assert server.ask({"prompt": "Once"})[0] == 503
    assert server.service.health()[0] == 503
    assert server.service.engine_failed.is_set()


def test_logits_that_are_not_finite_end_one_request(running: Any) -> None:
    server = running()
    unusable = torch.full((1, server.service.llm.config.vocab_size), float("nan"))
    for stream in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "prefill", lambda *_: unusable)
            status, text = server.ask({"prompt": "Once", "stream": stream, "max_tokens": 4})
        assert (status, "not usable" in text) == (200 if stream else 500, True)
    assert server.ask({"prompt": "The dog"})[0] == 200


def test_a_request_that_takes_too_long(running: Any) -> None:
    server = running(timeout_s=0.15)
    long = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "n": 20}
    status, text = server.ask(long)
    assert (status, json.loads(text)["error"]["code"]) == (504, "timeout")
    status, text = server.ask(long | {"stream": True})
    assert status == 200
    assert json.loads(text.strip().rpartition("data: ")[2])["error"]["code"] == "timeout"
    time.sleep(0.1)  # the answer is out a moment before its room is free
    assert server.service.unfinished == 0


def test_a_silent_stream_is_kept_alive(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.02)
    server, prefill = running(), Runner.prefill

    def slow(self: Runner, *args: Any) -> Any:
        time.sleep(0.2)
        return prefill(self, *args)

    monkeypatch.setattr(Runner, "prefill", slow)
    text = server.ask({"prompt": "Once", "stream": True, "max_tokens": 2})[1]
    assert text.count(": keep-alive\n\n") >= 3
    assert text.index(": keep-alive") < text.index("data: ")
    assert text.endswith("data: [DONE]\n\n")


def test_health_is_red_when_nothing_steps(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STALLED_S", 0.1)
    server, go_on = running(), threading.Event()
    assert server.service.health() == (200, "ok")
    prefill = Runner.prefill

    def stuck(self: Runner, *args: Any) -> Any:
        go_on.wait(20)
        return prefill(self, *args)

    monkeypatch.setattr(Runner, "prefill", stuck)
    asking = threading.Thread(target=server.ask, args=[{"prompt": "Once", "max_tokens": 2}])
    asking.start()
    time.sleep(0.5)
    status, word = server.service.health()
    go_on.set()
    asking.join()
    assert (status, "no step has come to an end" in word) == (503, True)
    assert server.service.health() == (200, "ok")


def closes(connection: socket.socket) -> bool:
    """Whether the other side ends the connection, with or without an answer."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def test_clients_that_never_come_to_the_point(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "HEAD_S", 0.3)
    monkeypatch.setattr(service, "BODY_S", 0.3)
    server = running()
    silent, slow, headless, bodiless = (server.connect() for _ in range(4))
    slow.sendall(b"POST /v1/comp")
    headless.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    bodiless.sendall(head + b'{"prompt"')
    assert b" 408 " in bodiless.recv(4096)
    assert all(closes(connection) for connection in (silent, slow, headless, bodiless))
    endless = server.connect()
    endless.sendall(b"GET / HTTP/1.1\r\nx: ")
    with pytest.raises(ConnectionError):
        endless.sendall(b"a" * (8 << 20))
    again = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    for _ in range(3):  # on one connection, which is kept for longer than a head may take
        again.request("GET", "/health")
        assert again.getresponse().read() == b'{"status": "ok"}'
        time.sleep(0.2)
    again.sock.sendall(b"GET /he")
    assert closes(again.sock)
