"""Requests that make no sense, at random: JSON that was changed, cut, or of wrong types, sizes and depths; wrong
lengths and kinds; connections that are half closed; bytes that are no HTTP."""

import json
import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any


def mutated(rng: random.Random) -> bytes:
    """A request's JSON, made wrong: a byte, a cut, a type, a size, a depth."""
    body: dict[str, Any] = {"prompt": "Once", "max_tokens": 2, "temperature": 0.5, "stream": False, "n": 1}
    wrong: list[Any] = [
        "☀" * 50,
        -1,
        1e308,
        10**30,
        [],
        {},
        [[[]]],
        True,
        "\ud800",
        {"a": {"b": [1] * 50}},
        [-1],
        2**63,
    ]
    match rng.randrange(6):
        case 0:
            data = bytearray(json.dumps(body).encode())
            for _ in range(rng.randrange(1, 6)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            return bytes(data)
        case 1:
            return json.dumps(body).encode()[: rng.randrange(1, 60)]
        case 2:
            return json.dumps(body | {rng.choice(list(body)[1:]): rng.choice(wrong)}).encode()
        case 3:
            return json.dumps(body | {rng.choice(["x", "é", "\ud800", "prompt ", "__proto__"]): 1}).encode()
        case 4:
            depth = rng.choice((10, 1000, 100_000))
            return b'{"prompt": ' + rng.choice((b"[", b'{"a":')) * depth
        case _:
            huge = rng.choice(
                (dict(n=10**9), dict(max_tokens=10**12), dict(prompt=["a"] * 5000), dict(stop=["x"] * 500))
            )
            return json.dumps(body | huge).encode()


def status_of(port: int, data: bytes, half_close: bool) -> int:
    """The status of what is answered to these bytes; 0: the connection was closed without an answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=300) as connection:
        answer = b""
        try:
            connection.sendall(data)
            if half_close:
                with suppress(OSError):  # it was closed over there
                    connection.shutdown(socket.SHUT_WR)
            while b"\r\n" not in answer and (more := connection.recv(4096)):
                answer += more
        except ConnectionError:
            pass
        return int(answer.split(b" ", 2)[1]) if answer else 0


def bad_request(rng: random.Random, keys: Sequence[str] = ("",)) -> tuple[bytes, bool]:
    """Bytes to send, with one of `keys`, and whether to close the way to the server behind them."""
    path = rng.choice(["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/nothing", "/\xff"])
    body = mutated(rng)
    length = rng.choice([len(body)] * 8 + [len(body) + 5, 0, -1, 10**12, "x"])
    kind = rng.choice(["application/json"] * 8 + ["text/plain", ""])
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n"
    head += f"authorization: Bearer {rng.choice(keys)}\r\n"
    if rng.random() < 0.1:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 300))) + b"\r\n\r\n", True
    whole = isinstance(length, int) and 0 <= length <= len(body)
    return head.encode("latin1") + b"\r\n" + body, not whole or rng.random() < 0.1
