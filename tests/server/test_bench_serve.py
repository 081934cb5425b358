"""`nibblelm bench serve` against this server: what it counts is what the server counts."""

import json
import random
import socketserver
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from nibblelm.cli import main
from nibblelm.server.bench import length, percentile


def test_figures_agree_with_the_servers_own(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = server.metrics()
    sizes = ["--prompt-mean", "20", "--answer-mean", "15", "--longest-prompt", "200", "--longest-answer", "40"]
    load = ["--requests", "40", "--rate", "60", "--concurrency", "8", "--ignore-eos", *sizes]
    assert (
        main(["bench", "serve", "--url", server.url, *load, "--json", "--ttft-goal", "1e6", "--tpot-goal", "1e6"]) == 0
    )
    figures = json.loads(capsys.readouterr().out)
    seen = {name: value - before[name] for name, value in server.metrics().items()}
    assert (figures["requests"], figures["failed"], figures["errors"]) == (40, 0, [])
    assert figures["output_tokens_s"] * figures["seconds"] == pytest.approx(seen["generation_tokens_total"])
    assert figures["prompt_tokens_s"] * figures["seconds"] == pytest.approx(seen["prompt_tokens_total"])
    assert figures["goodput_share"] == 1
    assert figures["goodput_s"] == figures["requests_s"]
    assert figures["seconds"] > 20 / 60  # arrivals took their time
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert 0 < figures[name]["p50"] <= figures[name]["p90"] <= figures[name]["p99"]
    whole = seen["e2e_request_latency_seconds_sum"] / 40 * 1000
    assert figures["e2e_ms"]["p99"] > whole * 0.9


def test_without_a_rate_times_count_from_sending(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """All requests are there at once then, and whoever comes last does not wait for all the others."""
    load = ["--requests", "24", "--answer-mean", "20", "--longest-answer", "20", "--ignore-eos", "--concurrency", "2"]
    assert main(["bench", "serve", "--url", server.url, *load, "--prompt-mean", "10", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["e2e_ms"]["p50"] < 1000 * figures["seconds"] / 4
    assert main(["bench", "serve", "--url", server.url, *load, "--rate", "100000", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["e2e_ms"]["p99"] > 1000 * figures["seconds"] * 0.8


def test_errors_are_counted_and_goals_judged(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--requests", "6", "--prompt-mean", "900", "--longest-prompt", "1024", "--longest-answer", "200"]
    options += ["--ttft-goal", "0.001"]
    assert main(["bench", "serve", "--url", f"{server.url}/v1/", *options]) == 0
    shown = capsys.readouterr().out
    assert "RequestError: status 400" in shown
    assert "0 %" in shown
    for given, message in (
        (["--url", "ftp://x"], "supported: http://HOST:PORT"),
        (["--url", "http://127.0.0.1:99999"], "supported: http://HOST:PORT"),
        (["--url", "http://[::1"], "supported: http://HOST:PORT"),
        (["--url", "http://a..b"], "cannot be reached"),
        (["--url", "http://127.0.0.1:1"], "cannot be reached"),
        (["--url", server.url, "--served-model", "other"], "none of 200 requests was answered"),
    ):
        assert main(["bench", "serve", *given]) == 1
        assert message in capsys.readouterr().err
    assert main(["bench"]) == 1
    assert "say what to measure" in capsys.readouterr().err


OK = b"HTTP/1.1 200 OK\r\n"
MODELS = b'{"data": [{"id": "m"}]}'
SSE = OK + b"\r\ndata: "
NO_MODELS = [
    (b"SSH-2.0-OpenSSH_9.6\r\n", "the answer is not HTTP"),
    (b"", "the connection ended in the middle"),
    (OK, "the connection ended in the middle"),
    (OK + b"content-length: 9\r\n\r\n{", "the connection ended in the middle"),
    (b"HTTP/1.1 101 X\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\nabc", "status 101"),
    (OK + b"\r\n<html>", "lists no model: '<html>'"),
    (OK + b'\r\n{"data": []}', "lists no model"),
    (OK + b"\r\n[1]", "lists no model"),
    (OK + b"\r\n" + b"[" * 200_000, "lists no model"),
]
NO_TOKENS = [
    (OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n", "the answer is not HTTP"),
    (OK + b"transfer-encoding: chunked\r\n", "the connection ended in the middle"),
    (OK + b"content-le", "the connection ended in the middle"),
    (b"HTTP/1.1 101 X\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\nabc", "status 101"),
    (OK + b"\r\n<html>", "an answer without text or usage"),
    (SSE + b'{"choices": [{"text": "a", "finish_reason": null}]}\n\n', "ends without a finish_reason"),
    (SSE + b"[1]\n\n", "AttributeError"),
    (SSE + b'{"choices": 1}\n\n', "TypeError"),
    (SSE + b"[" * 200_000 + b"\n\n", "RecursionError"),
    (SSE + b'{"usage": {"prompt_tokens": null, "completion_tokens": null}}\n\n', "TypeError"),
    (b"HTTP/1.1 503 Busy\r\ncontent-length: 5\r\n\r\na\nbcd", r"status 503: a\nbcd"),
    (b"HTTP/1.1 503 Busy\r\ncontent-length: 500\r\n\r\nout of memory", "status 503: out of memory"),
]
NO_ANSWER = [(models, b"", text) for models, text in NO_MODELS]
NO_ANSWER += [(OK + b"\r\n" + MODELS, answer, text) for answer, text in NO_TOKENS]


@pytest.mark.parametrize(("models", "answer", "message"), NO_ANSWER, ids=range(len(NO_ANSWER)))
def test_servers_that_answer_oddly(
    models: bytes, answer: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(models, answer) as (url, _):
        assert main(["bench", "serve", "--url", url, "--requests", "3"]) == 1
    assert message in capsys.readouterr().err


def test_a_context_that_is_listed_bounds_lengths_and_one_token_has_no_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    models = OK + b'\r\n{"data": [{"id": "m", "max_model_len": 64}]}'
    answer = SSE + b'{"choices": [{"text": "a", "finish_reason": "length"}]}\n\n'
    with answering(models, answer) as (url, asked):
        for options, most in ([], 32), (["--longest-answer", "1", "--longest-prompt", "3"], 1):
            asked.clear()
            assert main(["bench", "serve", "--url", url, "--requests", "9", "--json", *options]) == 0
            figures = json.loads(capsys.readouterr().out)
            bodies = [json.loads(body) for body in asked if body.startswith(b"{")]
            assert max(body["max_tokens"] for body in bodies) == most
            assert max(len(body["prompt"].split()) for body in bodies) == (8 if most == 32 else 3)
            assert set(figures["itl_ms"].values()) == {None}
            assert main(["bench", "serve", "--url", url, "--requests", "1", *options]) == 0
            assert "between tokens         -" in capsys.readouterr().out


def test_an_answer_in_other_forms(capsys: pytest.CaptureFixture[str]) -> None:
    """A status before the answer, no length, no space before data, another answer behind; the host as it was given."""
    body = b'data:{"choices": [{"text": "a"}]}\r\n\r\ndata:[DONE]\r\n\r\n'
    answer = OK + b"content-length: %d\r\n\r\n" % len(body) + body + b"HTTP/1.1 408 Late\r\ncontent-length: 0\r\n\r\n"
    with answering(b"HTTP/1.1 103 Early Hints\r\n\r\n" + OK + b"\r\n" + MODELS, answer) as (url, asked):
        assert main(["bench", "serve", "--url", url.replace("//", "//me:secret@"), "--requests", "2", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["failed"] == 0
        heads = [head for head in asked if not head.startswith(b"{")]
        assert all(f"host: {url.removeprefix('http://')}\r\n".encode() in head for head in heads)
        assert asked


@pytest.mark.parametrize("command", ["serve x", "bench serve --url http://x"])
def test_without_the_extra(command: str) -> None:
    code = "import sys; sys.modules['httptools'] = None; from nibblelm.cli import main; sys.exit(main(sys.argv[1:]))"
    line = [sys.executable, "-c", code, *command.split()]
    result = subprocess.run(line, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "needs httptools; install it with pip install 'nibblelm[serve]'" in result.stderr


@contextmanager
def answering(models: bytes, answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that says the same to all that ask for models, and to all others, and closes; and what it was asked."""
    asked: list[bytes] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked.append(b"".join(iter(self.rfile.readline, b"\r\n")))
            head = asked[-1]
            if body := self.rfile.read(int(head.partition(b"content-length: ")[2].split()[0])):
                asked.append(body)
            self.wfile.write(models if head.startswith(b"GET") else answer)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_address[1]}", asked
        listening.shutdown()


def test_lengths_and_percentiles() -> None:
    rng = random.Random(1)
    lengths = [length(rng, 220, 1.25, 100_000) for _ in range(50_000)]
    assert statistics.fmean(lengths) == pytest.approx(220, rel=0.03)
    assert min(lengths) == 4
    values = [rng.random() for _ in range(101)]
    for percent in (1, 50, 90, 99, 100):
        assert percentile(values, percent) == np.percentile(values, percent, method="inverted_cdf")
