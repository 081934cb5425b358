"""Streams are written past the layers of the server: the same bytes, in order, to clients that read and that do not."""

import json
import random
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nibblelm.server import listen
from nibblelm.server.answers import Chunks
from nibblelm.server.metrics import Metrics

sys.path.insert(0, str(Path(__file__).parent))
from waiting import PATIENCE_S, wait_for

LONG = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "max_tokens": 400}


def texts(stream: str) -> list[str]:
    """What each event of a stream adds."""
    *events, last = stream.strip().split("\n\n")
    assert last == "data: [DONE]"
    return [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]


def test_choices_that_differ_in_a_text_are_written_as_json_writes_them() -> None:
    def choice(text: str) -> dict[str, Any]:
        return {"index": 3, "delta": {"content": text}, "logprobs": None, "finish_reason": None}

    chunks = Chunks({"id": '""', "model": 'a"", "b'}, with_usage=True)
    of_text = chunks.of_texts(choice)
    for text in ("", " plain", '"\\\n\0\x7f', "é 🙂 \ud83d", '""', "data: {}\n\n"):
        assert of_text(text) == chunks.of(choice(text))


def test_a_client_that_does_not_read_is_waited_for(running: Any) -> None:
    server, long = running(), LONG | {"max_tokens": 480}  # more than it takes to fill all that is between the two
    whole = json.loads(server.ask(long)[1])["choices"][0]["text"]
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # which connections inherit
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        body = json.dumps(long | {"stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)

        def shown() -> list[str]:
            lines = Metrics(server.service).text().decode().splitlines()
            return [
                line.removeprefix("nibblelm:num_requests_") for line in lines if line.startswith("nibblelm:num_req")
            ]

        assert wait_for(lambda: shown() == ["running 0.0", "waiting 0.0", "paused 1.0"])
        stats = server.service.llm.engine.stats
        before = stats.generated_tokens
        time.sleep(0.5)
        assert stats.generated_tokens == before < 2 * long["max_tokens"], "what cannot be sent is not computed"
        got = b"".join(iter(lambda: client.recv(1 << 16), b""))
    parts = got.partition(b"\r\n\r\n")[2].split(b"\r\n")  # sizes, and chunks between them
    assert [int(size, 16) for size in parts[:-3:2]] == [*map(len, parts[1:-3:2])]
    assert "".join(texts(b"".join(parts[1::2]).decode())) == whole


def test_a_client_that_never_reads_does_not_keep_its_places(running: Any) -> None:
    server = running(timeout_s=2)
    server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", server.port))
        body = json.dumps(LONG | {"stream": True, "n": 20, "logprobs": 5}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        aborted = server.service.llm.engine.stats.finished
        assert wait_for(lambda: aborted["abort"] == 20), "its time is over, though it was not told"
        assert wait_for(lambda: server.service.unfinished == 0)
        assert wait_for(lambda: not server.service.llm.engine.scheduler.has_work)


def test_who_waits_now_and_then_gets_the_same(running: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, draw = running(), random.Random(0)
    one_by_one = texts(server.ask(LONG | {"stream": True})[1])
    assert len(one_by_one) > LONG["max_tokens"] // 2
    monkeypatch.setattr(listen._Protocol, "in_time", property(lambda _: draw.random() < 0.5))
    assert texts(server.ask(LONG | {"stream": True})[1]) == one_by_one


@pytest.mark.parametrize("asked", [LONG | {"stream": True}, LONG | {"max_tokens": 3}], ids=["stream", "whole"])
def test_http_1_0_knows_no_chunks(running: Any, asked: dict[str, Any]) -> None:
    """ApacheBench, and nginx unless it is told otherwise: the end of the connection is that of the body."""
    server = running()
    body = json.dumps(asked | {"seed": 1}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as client:
        client.sendall(head.encode() + body)
        got = b"".join(iter(lambda: client.recv(4096), b""))
    headers, _, answer = got.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in headers.lower()
    if "stream" not in asked:
        assert json.loads(answer)["usage"]["completion_tokens"] == 3
        return
    assert texts(answer.decode()) == texts(server.ask(asked | {"seed": 1})[1])
    assert answer.endswith(b"data: [DONE]\n\n")
