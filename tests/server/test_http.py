"""HTTP as other clients speak it: offers to upgrade, heads and bodies in pieces, requests behind each other, and what
is none."""

import http.client
import json
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from waiting import PATIENCE_S

BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}).encode()
OFFER = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQCAAAAAAIAAAAA"}


def post(headers: dict[str, str], body: bytes = BODY, chunked: bool = False) -> bytes:
    length = "transfer-encoding: chunked" if chunked else f"content-length: {len(body)}"
    lines = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json", length]
    head = "\r\n".join([*lines, *(f"{name}: {value}" for name, value in headers.items())])
    return head.encode() + b"\r\n\r\n" + (b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body)


def answers(server: Any, *pieces: bytes, count: int = 1) -> list[tuple[int, Any]]:
    """Statuses and JSON of the answers to what one connection sends."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
        found, came = [], connection.makefile("rb")
        for _ in range(count):
            status = int(came.readline().split()[1])
            length = int(http.client.parse_headers(came)["content-length"])
            found.append((status, json.loads(came.read(length))))
        return found


def test_who_asks_before_a_body_that_is_too_long_is_told_at_once(server: Any) -> None:
    head = (
        post({"expect": "100-continue"})
        .partition(b"\r\n\r\n")[0]
        .replace(b"content-length: ", b"content-length: 99999")
    )
    ((status, answer),) = answers(server, head + b"\r\n\r\n")
    assert (status, "more than 4194304 bytes" in answer["error"]["message"]) == (413, True)


@pytest.fixture(scope="module")
def text(server: Any) -> str:
    ((status, answer),) = answers(server, post({}))
    assert status == 200
    return answer["choices"][0]["text"]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("size", [10_000, 50, 1])
def test_an_upgrade_is_passed_over(size: int, chunked: bool, server: Any, text: str) -> None:
    whole = post(OFFER, chunked=chunked)
    ((status, answer),) = answers(server, *(whole[i : i + size] for i in range(0, len(whole), size)))
    assert (status, answer["choices"][0]["text"]) == (200, text)


def test_requests_behind_each_other(server: Any, text: str) -> None:
    web = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    several = [web, post(OFFER), post({}), web]
    for pieces in (several, [b"".join(several)]):
        found = answers(server, *pieces, count=len(several))
        assert [status for status, _ in found] == [200] * 4
        assert [found[i][1]["choices"][0]["text"] for i in (1, 2)] == [text] * 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"no such thing\r\n\r\n", "Invalid method"),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", "CONNECT is not supported"),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", "header"),
        (b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n", ""),
        (post({"content-length": "3"}), "Content-Length"),
    ],
)
def test_what_is_no_http_gets_the_errors_that_all_get(data: bytes, message: str, server: Any) -> None:
    ((status, answer),) = answers(server, data)
    assert (status, sorted(answer["error"])) == (400, ["code", "message", "param", "type"])
    assert re.match(f"this cannot be read as HTTP/1.1: .*{message}", answer["error"]["message"])


def test_what_is_no_http_waits_for_the_answers_before_it(server: Any, text: str) -> None:
    for rest in b"no such thing\r\n\r\n", post({"content-length": "3"}), b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000:
        for pieces in ([post({}), post({}), rest], [post({}) * 2 + rest]):
            *good, (status, answer) = answers(server, *pieces, count=3)
            assert [(status, answer["choices"][0]["text"]) for status, answer in good] == [(200, text)] * 2
            assert (status, answer["error"]["type"]) in ((400, "invalid_request_error"), (431, "invalid_request_error"))
    chunked = post({}, chunked=True).replace(b"0\r\n\r\n", b"no number\r\n\r\n")
    for pieces in ([post({}), chunked], [chunked[:-12], chunked[-12:]]):
        *good, (status, _) = answers(server, *pieces, count=len(pieces) - (pieces[0] != post({})))
        assert ([status for status, _ in good], status) == ([200] * len(good), 400)


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
@pytest.mark.parametrize("size", [1 << 20, 1000])
@pytest.mark.parametrize(("of", "status"), [("path", 414), ("headers", 431)])
def test_a_head_that_is_too_long_is_told_so(of: str, status: int, size: int, end: bytes, server: Any) -> None:
    """Whoever goes on sending is not cut off before having read why."""
    name = b"a: " if of == "headers" else b""
    head = (b"GET / HTTP/1.1\r\nhost: x\r\n" if name else b"GET /") + name + b"a" * 300_000
    head += end if name or not end else b" HTTP/1.1\r\nhost: x" + end
    ((got, answer),) = answers(server, *(head[i : i + size] for i in range(0, len(head), size)))
    assert (got, of in answer["error"]["message"]) == (status, True)


LARGE = json.dumps(json.loads(BODY) | {"user": "x" * 200_000}).encode()


@pytest.mark.parametrize("offer", [{}, OFFER])
def test_a_body_is_no_part_of_a_head_that_comes_in_pieces(server: Any, text: str, offer: dict[str, str]) -> None:
    whole = post(offer, LARGE)
    ((status, answer),) = answers(server, whole[:60], whole[60:])
    assert (status, answer["choices"][0]["text"]) == (200, text)


def test_trailers(server: Any, text: str) -> None:
    whole = post({}, LARGE, chunked=True)
    head, _, body = whole.partition(b"\r\n\r\n")
    for trailer, found in ((b"a: b\r\nc: d\r\n", 200), (b"a: b\r\n" * 20_000, 431)):
        ((status, _),) = answers(server, head + b"\r\n\r\n", body[:-2] + trailer + b"\r\n")
        assert status == found


def test_an_answer_that_does_not_wait_for_the_body(server: Any) -> None:
    """What comes behind the body is another request, whether it can be read or not."""
    early = b"POST /nope HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n"
    for rest, status in ((b"no such thing\r\n\r\n", 400), (b"GET /" + b"a" * 40_000, 414), (post({}), 200)):
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
            connection.sendall(early)
            came = connection.makefile("rb")
            for piece, want in ((b"hello" + rest, 404), (b"", status)):
                assert int(came.readline().split()[1]) == want
                came.read(int(http.client.parse_headers(came)["content-length"]))
                connection.sendall(piece)


def test_what_cannot_be_read_is_not_read_to_its_end(server: Any) -> None:
    """A client that goes on sending for a while learns why it was refused."""
    head = post({}, b"", chunked=True).removesuffix(b"0\r\n\r\n")
    for size in 10, 100_000:
        chunk = b"%x\r\n%b\r\n" % (size, b"x" * size)
        ((status, _),) = answers(server, head.removesuffix(b"0\r\n\r\n\r\n"), chunk, b"zz\r\n", b"y" * (4 << 20))
        assert status == 400
    expecting = post({"expect": "100-continue"}, b"", chunked=True).partition(b"\r\n\r\n")[0] + b"\r\n\r\nzz\r\n"
    assert [status for status, _ in answers(server, expecting)] == [400]
    assert not any("Traceback" in line for line in server.log)


def test_the_end_comes_while_a_client_lingers(serving: Any, folder: Path) -> None:
    own = serving(folder)
    with socket.create_connection(("127.0.0.1", own.port), timeout=PATIENCE_S) as connection:
        connection.sendall(post({}, b"", chunked=True).partition(b"\r\n\r\n")[0] + b"\r\n\r\nzz\r\n")
        assert b" 400 " in connection.recv(4096)
        own.process.send_signal(signal.SIGTERM)
        assert own.ended() == 0
    assert not any("Traceback" in line for line in own.log)
