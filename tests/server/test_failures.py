"""What goes wrong inside a server, and clients that never come to the point: in this process, where it can be made."""

import gc
import http.client
import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from nibblelm.runner import Runner
from nibblelm.server import events, listen, service

sys.path.insert(0, str(Path(__file__).parent))
from waiting import PATIENCE_S, wait_for


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
    for stream in (False, True):  # a stream that cannot begin is no stream
        status, text = server.ask({"prompt": "Once", "stream": stream})
        assert (status, "illegal instruction" in json.loads(text)["error"]["message"]) == (503, True)
    assert wait_for(lambda: server.service.unfinished == 0)
    assert server.service.health()[0] == 503
    assert server.service.engine_failed.is_set()


def test_logits_that_are_not_finite_end_one_request(running: Any) -> None:
    server = running()
    unusable = torch.full((1, server.service.llm.config.vocab_size), float("nan"))
    for stream in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Runner, "prefill_together", lambda *_: unusable)
            status, text = server.ask({"prompt": "Once", "stream": stream, "max_tokens": 4})
        assert (status, "not usable" in text) == (200 if stream else 500, True)
    assert server.ask({"prompt": "The dog"})[0] == 200


def test_an_engine_that_is_full_is_asked_again_later(running: Any) -> None:
    """Others may have entered requests beside the server's, or those of clients that left are not gone yet."""
    server = running()
    server.service.llm.engine.most = 1
    for refused, stream in enumerate((False, True), 1):
        response = server.begin({"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "n": 2, "stream": stream})
        assert (response.status, response.headers["retry-after"]) == (429, "1")
        assert json.loads(response.read())["error"]["code"] == "queue_full"
        assert (server.service.refused, server.service.unfinished) == (refused, 0)
        assert wait_for(lambda: server.service.llm.engine.unfinished == 0)
    assert server.ask({"prompt": "Once"})[0] == 200


def test_a_request_that_takes_too_long(running: Any) -> None:
    server = running(timeout_s=0.15)
    long = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "n": 20}
    status, text = server.ask(long)
    assert (status, json.loads(text)["error"]["code"]) == (504, "timeout")
    status, text = server.ask(long | {"stream": True})
    assert status == 200
    assert json.loads(text.strip().rpartition("data: ")[2])["error"]["code"] == "timeout"
    assert wait_for(lambda: server.service.unfinished == 0)


def test_a_silent_stream_is_kept_alive(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "KEEP_ALIVE_S", 0.02)
    server, prefill, go_on = running(), Runner.prefill_together, threading.Event()

    def held(self: Runner, *args: Any) -> Any:
        go_on.wait(PATIENCE_S)
        return prefill(self, *args)

    monkeypatch.setattr(Runner, "prefill_together", held)
    response = server.begin({"prompt": "Once", "stream": True, "max_tokens": 2})
    silence = [response.readline() for _ in range(6)]
    go_on.set()
    assert silence == [b": keep-alive\n", b"\n"] * 3
    text = response.read().decode()
    assert text.count("data: ") == 3
    assert text.endswith("data: [DONE]\n\n")


def test_health_is_red_when_nothing_steps(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "STALLED_S", 0.1)
    server, is_stuck, go_on = running(), threading.Event(), threading.Event()
    assert server.service.health() == (200, "ok")
    prefill = Runner.prefill_together

    def stuck(self: Runner, *args: Any) -> Any:
        is_stuck.set()
        go_on.wait(PATIENCE_S)
        return prefill(self, *args)

    monkeypatch.setattr(Runner, "prefill_together", stuck)
    asking = threading.Thread(target=server.ask, args=[{"prompt": "Once", "max_tokens": 2}])
    asking.start()
    assert is_stuck.wait(PATIENCE_S)
    assert wait_for(lambda: server.service.health()[0] == 503)
    word = server.service.health()[1]
    go_on.set()
    asking.join()
    assert "no step has come to an end" in word
    assert wait_for(lambda: server.service.health() == (200, "ok"))  # the thread may not be idle yet


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


def test_a_connection_that_is_reset_leaves_nothing(running: Any) -> None:
    """Neither one that was kept for another request, nor one whose client was still to read why it was refused."""
    server = running()

    def alive() -> int:
        gc.collect()
        return sum(type(thing) is listen._Protocol for thing in gc.get_objects())

    before = alive()
    for data in b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n", b"no such thing\r\n\r\n":
        for _ in range(10):
            connection = server.connect()
            connection.sendall(data)
            assert connection.recv(9) == b"HTTP/1.1 "
            connection.close()  # with more to be read, which resets it
    begun = time.monotonic()
    assert wait_for(lambda: alive() <= before)  # what an earlier test has left may go meanwhile
    assert time.monotonic() - begun < listen.KEEP_ALIVE_S / 2


def test_clients_that_never_come_to_the_point(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One limit is short at a time, and what it holds for is sent as soon as there is a connection."""
    monkeypatch.setattr(service, "BODY_S", 0.3)
    server = running()
    bodiless = server.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    bodiless.sendall(head + b'{"prompt"')
    assert b" 408 " in bodiless.recv(4096)
    assert closes(bodiless)
    endless = server.connect()
    endless.sendall(b"GET / HTTP/1.1\r\nx: ")
    endless.sendall(b"a" * (4 << 20))
    assert b" 431 " in endless.recv(4096)
    assert closes(endless)
    again = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    again.connect()
    monkeypatch.setattr(listen, "HEAD_S", 2.0)
    silent, slow, headless = (server.connect() for _ in range(3))
    slow.sendall(b"POST /v1/comp")
    headless.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
    for _ in range(2):  # on one connection, which is kept for longer than a head may take
        again.request("GET", "/health")
        assert again.getresponse().read() == b'{"status": "ok"}'
        time.sleep(listen.HEAD_S + 0.1)
    again.sock.sendall(b"GET /he")
    assert all(closes(connection) for connection in (silent, slow, headless, again.sock))
