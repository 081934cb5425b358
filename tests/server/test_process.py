"""The server as a process: ready at once, keys, limits, signals, and clients that leave."""

import http.client
import json
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from nibblelm import LLM
from nibblelm.cli import main
from nibblelm.server import listen
from nibblelm.server.service import STOPPING

sys.path.insert(0, str(Path(__file__).parent))
from waiting import PATIENCE_S, wait_for

COMMAND = [sys.executable, "-m", "nibblelm", "serve"]
LONG = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True}
ENDLESS = LONG | {"stream": True, "n": 24, "logprobs": 5}
"""6 MB, more than Linux lets the sockets on the way hold: it does not end before it is read."""


def opened(server: Any, path: str, body: Any) -> http.client.HTTPResponse:
    """A response that has begun and is not read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    assert response.status == 200
    response.connection = connection  # type: ignore[attr-defined]  # else it is closed with the last reference
    return response


def left(response: http.client.HTTPResponse) -> None:
    """The client goes away."""
    connection = response.connection  # type: ignore[attr-defined]
    response.close()
    connection.close()


def idle(server: Any) -> bool:
    """Nothing is computed, and every page has come back."""
    seen = server.metrics()
    return seen["num_requests_running"] == seen["num_requests_waiting"] == seen["kv_cache_usage_perc"] == 0


def test_ready_within_a_second_of_importing_torch(serving: Any, folder: Path) -> None:
    """In time of the processor, the least of three: others may use the machine too, and its caches.

    One thread does it all, but for the copy of weights.
    """

    def beside_torch_s() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        server = serving(folder)
        assert server.request("GET", "/health")[:2] == (200, {"status": "ok"})
        return server.cpu_s - (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    assert any(beside_torch_s() < 1.0 for _ in range(3))


def test_paths_methods_and_bodies(server: Any) -> None:
    for method, path, body, headers, status, message in (
        ("GET", "/nothing", None, {}, 404, "not found: GET /nothing"),
        ("GET", "/v1/completions", None, {}, 405, "method not allowed"),
        ("POST", "/v1/completions", b"{}", {"content-type": "text/plain"}, 415, "Content-Type: application/json"),
        ("POST", "/v1/completions", b"{", {}, 400, "cannot be read as JSON"),
        ("POST", "/v1/completions", b'{"prompt": NaN}', {}, 400, "NaN is no JSON value"),
        ("POST", "/v1/completions", b"[" * 100_000, {}, 400, "cannot be read as JSON"),
        ("POST", "/v1/completions", b"[]", {}, 400, "the body is []; supported: an object"),
        ("POST", "/v1/completions", b'"' + b" " * (5 << 20), {}, 413, "more than 4194304 bytes"),
        ("POST", "/v1/completions", {"prompt": "a\ud800"}, {}, 400, "character 1 is half a surrogate pair"),
        ("POST", "/v1/completions", {"prompt": "a", "\ud800": 1}, {}, 400, "is not supported here"),
        ("POST", "/detokenize", {"tokens": [4096]}, {}, 400, "0 to 4095"),
        ("POST", "/tokenize", {}, {}, 400, "prompt is missing"),
        ("POST", "/v1/completions/", {}, {}, 404, "not found: POST /v1/completions/"),
        ("POST", "/v1/completions", b"{}", {"content-encoding": "gzip"}, 415, "Content-Encoding is gzip"),
        ("POST", "/v1/completions", b'{"seed": ' + b"9" * 5000 + b"}", {}, 400, "an integer has thousands of digits"),
    ):
        got, answer, _ = server.request(method, path, body, headers)
        assert (got, sorted(answer["error"])) == (status, ["code", "message", "param", "type"])
        assert message in answer["error"]["message"]


def test_who_sends_too_much_is_told_when_all_is_sent(server: Any) -> None:
    """A connection closed while the client still writes would take the answer with it."""
    body = b" " * (24 << 20)
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert (response.status, "more than 4194304 bytes" in response.read().decode()) == (413, True)


def test_long_prompts_do_not_hold_up_others(server: Any) -> None:
    """Refused for their length, but tokenized before, which takes a second each."""
    body, ended = {"prompt": "a" * 4_000_000}, []

    def ask() -> None:
        status, answer, _ = server.request("POST", "/v1/completions", body)
        assert (status, "tokens" in answer["error"]["message"]) == (400, True)
        ended.append(time.monotonic())

    asking = [threading.Thread(target=ask) for _ in range(4)]
    for thread in asking:
        thread.start()
    time.sleep(0.5)
    assert server.request("POST", "/tokenize", {"prompt": "A"})[0] == 200
    told = time.monotonic()
    for thread in asking:
        thread.join()
    assert told < sorted(ended)[1], "behind two of four long ones"


def test_tokens_are_those_of_the_model(server: Any, llm: LLM) -> None:
    text = "Lily & Ben, ☀"
    assert server.request("POST", "/tokenize", {"prompt": text})[1]["tokens"] == llm.encode(text)
    bare = server.request("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})[1]["tokens"]
    assert [llm.bos_id, *bare] == llm.encode(text)
    assert server.request("POST", "/detokenize", {"tokens": bare})[1] == {"prompt": text}


def test_keys_and_origins(serving: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("second\n\nthird\n")
    server = serving(folder, "--api-key", "first", "--api-key-file", str(tmp_path / "keys"), "--cors", "HTTP://Page/",
                     "--log-requests")  # fmt: skip
    assert server.request("GET", "/health")[0] == 200
    for path in ("/v1/models", "/metrics"):
        for given in (None, "Bearer wrong", "Basic first", "first", "Bearer firs", "Bearer "):
            status, body, headers = server.request(
                "GET", path, headers={} if given is None else {"authorization": given}
            )
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            assert body["error"]["message"].startswith("a key is needed" if given is None else "this key is none")
            logged = re.compile(f"127.0.0.1 GET {path} 401 .* {headers['x-request-id']}").match
            assert wait_for(lambda logged=logged: any(map(logged, server.log)))
            assert headers["www-authenticate"] == "Bearer"
        for key in ("first", "second", "third"):
            assert server.request("GET", path, headers={"authorization": f"Bearer {key}"})[0] == 200
    asked = {"origin": "http://page", "access-control-request-method": "POST"}
    status, _, headers = server.request("OPTIONS", "/v1/completions", headers=asked)
    assert (status, headers["access-control-allow-origin"]) == (200, "http://page")
    assert server.request("OPTIONS", "/v1/completions", headers=asked | {"origin": "http://other"})[0] == 400
    assert "access-control-allow-origin" not in server.request("GET", "/health", headers={"origin": "http://x"})[2]


def test_a_full_queue_says_when_to_come_back(serving: Any, folder: Path) -> None:
    server = serving(folder, "--max-sequences", "1", "--max-queue", "47")
    held = [opened(server, "/v1/completions", ENDLESS) for _ in range(2)]
    status, body, headers = server.request("POST", "/v1/completions", {"prompt": "a"})
    assert (status, body["error"]["code"], headers["retry-after"]) == (429, "queue_full", "1")
    assert server.request("POST", "/v1/completions", {"prompt": "a", "n": 49})[0] == 400
    assert server.request("GET", "/health")[0] == 200
    for response in held:
        left(response)
    assert wait_for(lambda: server.request("POST", "/v1/completions", {"prompt": "a"})[0] == 200)
    assert server.metrics()["admission_rejections_total"] >= 1


def test_a_client_that_leaves_is_not_computed_for(server: Any) -> None:
    """Streams in the middle, streams nobody reads, and requests that wait for a whole answer."""
    before = server.metrics()["generation_tokens_total"]
    streams = [opened(server, "/v1/completions", LONG | {"stream": True, "seed": i}) for i in range(20)]
    for response in streams[:10]:
        response.readline()
    whole = []
    for _ in range(10):
        connection = socket.create_connection(("127.0.0.1", server.port))
        body = json.dumps(LONG | {"n": 10})
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        whole.append(connection)
    assert wait_for(lambda: server.metrics()["num_requests_running"] > 30)
    for response in streams:
        left(response)
    for connection in whole:
        connection.close()
    assert wait_for(lambda: idle(server))
    assert server.metrics()["generation_tokens_total"] - before < 120 * 500 * 0.9
    assert server.metrics()['request_success_total{finished_reason="abort"}'] >= 30


@pytest.mark.parametrize("stream", [True, False])
def test_nor_is_one_with_another_request_behind_it(server: Any, stream: bool) -> None:
    """The connection's end is news for each of the requests that were pipelined."""
    aborts = 'request_success_total{finished_reason="abort"}'
    before = server.metrics()
    body = json.dumps(LONG | {"n": 8, "stream": stream, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}\r\n\r\n{body}".encode() * 2)
        assert wait_for(lambda: server.metrics()["num_requests_running"] >= 8)
    assert wait_for(lambda: idle(server))
    assert server.metrics()[aborts] - before[aborts] == 8


def test_a_long_text_holds_up_nobody_else(server: Any) -> None:
    """While it is encoded the event loop answers."""
    body = {"prompt": "a dog " * 500_000, "max_tokens": 1}

    def longest_share() -> float:
        """Of the time that the text takes alone, what the slowest of the others took."""
        slow = threading.Thread(target=server.request, args=("POST", "/v1/completions", body))
        took: list[float] = []
        slow.start()
        while slow.is_alive():
            begun = time.perf_counter()
            assert server.request("GET", "/health")[0] == 200
            took.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        assert server.request("POST", "/v1/completions", body)[1]["error"]["code"] == "context_length_exceeded"
        return max(took) / (time.perf_counter() - begun)

    assert any(longest_share() < 0.5 for _ in range(3))  # a machine's own pause is not there every time


def test_metrics_count_what_was_asked_for(server: Any) -> None:
    before = server.metrics()
    for _ in range(2):
        server.request("POST", "/v1/completions", {"prompt": [7] * 130, "max_tokens": 5, "temperature": 0, "n": 2})
    seen = {name: value - before[name] for name, value in server.metrics().items()}
    assert seen["prompt_tokens_total"] == seen["prefix_cache_queries_total"] == 4 * 130
    assert seen["prefix_cache_hits_total"] == 3 * 128
    assert seen["generation_tokens_total"] == 4 * 5
    assert seen['request_success_total{finished_reason="length"}'] == 4
    for name, count in (("time_to_first_token_seconds", 4), ("inter_token_latency_seconds", 16)):
        assert seen[f"{name}_count"] == seen[f'{name}_bucket{{le="+Inf"}}'] == count
        assert seen[f"{name}_sum"] > 0
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert seen[f"{name}_seconds_count"] == 4


def test_sigterm_lets_what_runs_come_to_its_end(serving: Any, folder: Path) -> None:
    server = serving(folder, "--drain", "600")
    stream = opened(server, "/v1/completions", ENDLESS)
    server.process.send_signal(signal.SIGTERM)
    assert wait_for(lambda: server.request("GET", "/health")[:2] == (503, {"status": "draining"}))
    status, body, headers = server.request("POST", "/v1/completions", {"prompt": "a"})
    assert (status, headers["retry-after"], body["error"]["type"]) == (503, "1", "server_error")
    text = stream.read().decode()
    assert text.endswith("data: [DONE]\n\n")
    assert text.count("data: ") > 24 * 100
    assert server.ended() == 0
    assert "24 outputs have 600 s to end" in "".join(server.log)


def test_sigterm_as_soon_as_it_says_that_it_serves(serving: Any, folder: Path) -> None:
    server = serving(folder)
    server.process.send_signal(signal.SIGTERM)
    assert server.ended() == 0


@pytest.mark.parametrize(
    ("options", "signals", "code"),
    [(("--drain", "600"), [signal.SIGTERM, signal.SIGTERM], 0), (("--drain", "0"), [signal.SIGINT], 130)],
    ids=["twice", "interrupt"],
)
def test_what_does_not_end_in_time_is_told(
    options: tuple[str, ...], signals: list[int], code: int, serving: Any, folder: Path
) -> None:
    server = serving(folder, *options)
    stream = opened(server, "/v1/completions", LONG | {"stream": True, "n": 40})
    for place, number in enumerate(signals):
        assert place == 0 or wait_for(lambda: "stopping;" in "".join(server.log))  # else two may count as one
        server.process.send_signal(number)
    text = stream.read().decode()
    assert server.ended() == code
    last = json.loads(text.strip().rpartition("data: ")[2])
    assert last["error"]["code"] == "engine_ended"
    assert last["error"]["message"] == STOPPING


def test_sigterm_does_not_wait_for_the_rest_of_a_body(serving: Any, folder: Path) -> None:
    server = serving(folder)
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as half:
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n{"
        )
        half.sendall(head.encode())
        assert server.request("GET", "/health")[0] == 200
        server.process.send_signal(signal.SIGTERM)
        got = b"".join(iter(lambda: half.recv(4096), b""))
    assert got.startswith(b"HTTP/1.1 503 ")
    assert json.loads(got.partition(b"\r\n\r\n")[2])["error"]["message"] == STOPPING
    assert server.ended() == 0
    assert "Traceback" not in "".join(server.log)


def test_killed_and_started_again(serving: Any, folder: Path) -> None:
    server = serving(folder)
    server.process.kill()
    assert server.ended() == -signal.SIGKILL
    port = str(server.port)
    again = subprocess.Popen([*COMMAND, str(folder), "--port", port], stderr=subprocess.PIPE, text=True)
    try:
        assert wait_for(lambda: again.poll() is not None or listens(server.port))
        assert again.poll() is None, again.communicate()[1]
        assert wait_for(lambda: server.request("GET", "/health")[0] == 200)
        taken = subprocess.run(
            [*COMMAND, str(folder), "--port", port], capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
        assert taken.returncode == 1
        assert "cannot listen on 127.0.0.1" in taken.stderr
    finally:
        again.kill()
        again.communicate()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_arguments_that_cannot_be(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "latin").write_bytes("schlüssel".encode("latin-1"))
    (tmp_path / "umlaut").write_text("schlüssel")
    for options, code, message in (
        (["--port", "70000"], 2, "0 to 65535"),
        (["--drain", "-1"], 2, "0 to 1000000"),
        (["--timeout", "0"], 2, "more than 0"),
        (["--served-model-name", ""], 1, "none of them empty"),
        (["--served-model-name", "a", "--served-model-name", "a"], 1, "names that differ"),
        (["--host", "no.such.host.invalid"], 1, "cannot listen on no.such.host.invalid"),
        (["--api-key-file", str(tmp_path / "empty")], 1, "has no key"),
        (["--api-key-file", str(tmp_path / "latin")], 1, "is no text in UTF-8"),
        (["--api-key-file", str(tmp_path / "umlaut")], 1, "supported: visible characters of ASCII"),
        (["--api-key", ""], 1, "supported: visible characters of ASCII"),
        (["--api-key", "good", "--api-key", "k\udcff"], 1, "supported: visible characters of ASCII"),
        (["--cors", "page.com"], 1, "'page.com' is no origin of a page (--cors)"),
        (["--max-queue", "5000", "--port", "0"], 1, "max_queue is 5000"),
        (["--max-sequences", "5000", "--port", "0"], 1, "max_sequences is 5000 and max_queue is 256; supported: 4096"),
        (["--kv-memory", "1M", "--max-context", "512", "--port", "0"], 1, "for keys and values hold"),
    ):
        try:
            ended = main(["serve", str(folder), "--device", "cpu", *options])
        except SystemExit as exit_:
            ended = exit_.code
        shown = capsys.readouterr().err
        assert (ended, message in shown, "serving" in shown) == (code, True, False)


def test_a_wrong_generation_config_is_no_requests_fault(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": "x"}')
    assert main(["serve", str(tmp_path / "model"), "--device", "cpu", "--port", "0"]) == 1
    shown = capsys.readouterr().err
    assert "generation_config.json: temperature is 'x'" in shown
    assert "serving" not in shown


def test_a_server_without_a_tokenizer_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object) -> int:
        return 0

    monkeypatch.setattr(listen, "_run", nothing)
    monkeypatch.setattr(llm, "tokenizer", None)
    with listen.bound("127.0.0.1", 0) as here, pytest.warns(UserWarning, match="prompts are token ids"):
        assert listen.serve(llm, ["demo"], here, listen.Options()) == 0


def test_a_server_open_to_all_says_so(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object) -> int:
        return 0

    monkeypatch.setattr(listen, "_run", nothing)
    with listen.bound("0.0.0.0", 0) as everywhere, pytest.warns(UserWarning, match="ask for a key with --api-key"):
        assert listen.serve(llm, ["demo"], everywhere, listen.Options()) == 0
    with warnings.catch_warnings(), listen.bound("127.0.0.1", 0) as here:
        warnings.simplefilter("error")
        assert listen.serve(llm, ["demo"], here, listen.Options()) == 0
        assert listen.serve(llm, ["demo"], here, listen.Options(keys=["key"])) == 0
