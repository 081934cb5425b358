"""A server on the demo model, as a process of its own, and the same model here to compare with."""

import asyncio
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from nibblelm import LLM, convert
from nibblelm.server import listen
from nibblelm.server.app import application
from nibblelm.server.service import Limits, Service

sys.path.insert(0, str(Path(__file__).parent))
from waiting import PATIENCE_S

DEMO = Path(__file__).resolve().parents[2] / "demo" / "stories-7m"


class Server:
    """`nibblelm serve` with options, on a port of its own choice; `log` is what it has said."""

    def __init__(self, folder: Path, *options: str) -> None:
        command = [sys.executable, "-m", "nibblelm", "serve", str(folder), "--port", "0", "--device", "cpu"]
        self.process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"serving \S+ on (http://\S+:(\d+))", line):
                self.url, self.port = found[1], int(found[2])
                break
        else:
            raise AssertionError("".join(self.log))
        self._reader = threading.Thread(target=lambda: self.log.extend(self.process.stderr or []), daemon=True)
        self._reader.start()

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, JSON (or text) and headers of one request on a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, data, {"content-type": "application/json", **(headers or {})})
        response = connection.getresponse()
        content, kind = response.read(), response.headers.get("content-type", "")
        connection.close()
        return response.status, json.loads(content) if "json" in kind else content.decode(), dict(response.headers)

    def metrics(self) -> dict[str, float]:
        """Every sample of /metrics by its name without `nibblelm:`, labels included."""
        text = self.request("GET", "/metrics")[1]
        lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("nibblelm:"): float(value) for name, _, value in lines}

    @property
    def memory(self) -> int:
        """Resident bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def cpu_s(self) -> float:
        """Seconds of the processor that it has used."""
        ticks = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def ended(self) -> int:
        """Its exit code, when it has come to its end and `log` is whole."""
        code = self.process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        return code


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in int4."""
    if not DEMO.is_dir():
        pytest.skip("the demo checkpoint is not beside these tests")
    target = tmp_path_factory.mktemp("served") / "demo"
    convert(DEMO, target, bits=4, group_size=-1, method="minmax")
    return target


@pytest.fixture(scope="session")
def llm(folder: Path) -> LLM:
    """The model that is served, in this process."""
    return LLM(folder, device="cpu")


@pytest.fixture(scope="session")
def with_template(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The model with another chat template."""

    def copy(template: str) -> Path:
        target = tmp_path_factory.mktemp("template") / "model"
        shutil.copytree(folder, target)
        (target / "chat_template.jinja").write_text(template)
        return target

    return copy


@pytest.fixture(scope="module")
def serving() -> Iterator[Callable[..., Server]]:
    """Starts servers; those that still run at the end are killed."""
    started: list[Server] = []

    def start(folder: Path, *options: str) -> Server:
        started.append(Server(folder, *options))
        return started[-1]

    yield start
    for server in started:
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def server(serving: Callable[..., Server], folder: Path) -> Server:
    """One for all tests of a file."""
    return serving(folder, "--served-model-name", "demo")


class Running:
    """The application in a thread of its own."""

    def __init__(self, llm: LLM, limits: Limits) -> None:
        self.service = Service(llm, ["demo"], limits)
        config = listen.configured(application(self.service, [], []))
        self._server = listen.Server(config)
        self._socket = listen.bound("127.0.0.1", 0)
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=[config])
        self._thread.start()

    def _run(self, config: uvicorn.Config) -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(self._server.serve([self._socket]))

    def begin(self, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse()

    def ask(self, body: dict[str, Any]) -> tuple[int, str]:
        response = self.begin(body)
        return response.status, response.read().decode()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

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
