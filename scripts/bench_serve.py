"""What HTTP costs: `nibblelm serve` beside the engine in this process, on the same card and the same requests.

    python scripts/bench_serve.py [--shape llama-3-8b | --model FOLDER] [--device cuda] [--json serve.json]

A shape is made of random weights, int4 per row, with a vocabulary of words, and kept in --work. Both engines have it
loaded, and one computes while the other waits. `ready`: from the start of the process to the first answer of /health,
and `import torch` alone; the median of several, the files in the page cache. `first token`: prompts of 128 ids over one
connection that stays, in blocks and in turns with the engine; here the server has the same engine, since two on a card
differ by more than a hundredth of these times, and the client is a process of its own. `mixed`: the requests of `bench
--mixed`, all at once, answered whole and as streams, in turns with the engine. `saturation`: the load of `bench serve`,
as much as there are places for. `steady`: arrivals at 80 % of the requests per second that this gave. No two prompts
begin alike. What --limit seconds leave no time for is not measured, and said.

    python scripts/bench_serve.py --pretend [--json benchmarks/cpu/serve.json]

needs no card: `pretended card` is the mixed load on one that sleeps (pretended_card.py), as the engine alone and as
streams, in turns, with the CPU time of the engine's thread and of the event loop's for each token, and first tokens of
128 ids beside the engine's own time.
"""

import argparse
import asyncio
import dataclasses
import gc
import json
import multiprocessing
import random
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from bench_cpu_peers import appearing, make_checkpoint
from pretended_card import FIRST_ID, Card
from rows import Rows

import nibblelm
from nibblelm.benchmark import MIXED_CONTEXT, mixed_lengths
from nibblelm.cli.serve import SWITCH_S
from nibblelm.engine import STEP_TOKENS
from nibblelm.engine_core import Engine
from nibblelm.pages import page_count
from nibblelm.scheduler import Scheduler
from nibblelm.server import listen
from nibblelm.server.app import application
from nibblelm.server.bench import WORDS, Load, answered, measured, summary
from nibblelm.server.service import Service
from nibblelm.shapes import SHAPES
from nibblelm.sizes import parse_size

DEMO = Path(__file__).resolve().parent.parent / "demo" / "stories-7m"
KEY = ("test", "model", "kind", "tree")
BLOCK = 20
"""First tokens of a block."""

TESTS = ("ready", "first token", "mixed", "steady")

GREEDY = nibblelm.SamplingParams(temperature=0, ignore_eos=True)


def word_tokenizer(size: int) -> str:
    """tokenizer.json of `size` words, those of `bench serve` among them; bytes go to text as in Llama 3's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = dict.fromkeys([*WORDS, *(f"w{i}" for i in range(size))])
    backend = Tokenizer(models.WordLevel({f"Ġ{word}": i for i, word in zip(range(size), words, strict=False)}, "Ġtime"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    return backend.to_str()


def folder_of_shape(shape: str, work: Path, device: str) -> Path:
    """The shape as int4 per row, made where it is not there yet."""
    target = work / shape / "int4"
    if not target.exists():
        begun = time.monotonic()
        with appearing(work / shape / "bf16") as source:
            make_checkpoint(SHAPES[shape], source, device)
            (source / "tokenizer.json").write_text(word_tokenizer(SHAPES[shape]["vocab_size"]))
        nibblelm.convert(work / shape / "bf16", target, bits=4, group_size=-1, method="minmax")
        shutil.rmtree(work / shape / "bf16")
        torch.cuda.empty_cache()  # both engines plan with what is free
        print(f"{target}: made in {time.monotonic() - begun:.0f} s")
    return target


@contextmanager
def serving(folder: Path, options: list[str]) -> Iterator[tuple[str, float]]:
    """The address of a server, and the seconds that it took to answer /health."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "nibblelm", "serve", str(folder), "--port", str(port), *options]
    begun = time.perf_counter()
    with subprocess.Popen(command) as process:
        try:
            while not healthy(port):
                if process.poll() is not None:
                    raise SystemExit(f"{' '.join(command)} ended with {process.returncode}; its message is above")
                time.sleep(0.002)
            yield f"http://127.0.0.1:{port}", time.perf_counter() - begun
        finally:
            process.terminate()


def healthy(port: int) -> bool:
    """Whether /health says 200: a connection is taken before the model is loaded, and answered after."""
    try:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200")
    except OSError:
        return False


def ready(rows: Rows, name: str, folder: Path, options: list[str], tries: int) -> None:
    """Start the server several times."""
    imports, starts = [], []
    for _ in range(tries):
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        imports.append(time.perf_counter() - begun)
        with serving(folder, options) as (_, seconds):
            starts.append(seconds)
    start, alone = statistics.median(starts), statistics.median(imports)
    rows.add(test="ready", model=name, ready_s=start, import_torch_s=alone, beside_s=start - alone)


class Connection:
    """One that stays open, read as little as it takes to see the first token."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))

    def first_token(self, ids: list[int]) -> float:
        """Seconds from sending a request to the first event of its stream."""
        body = json.dumps(_body(ids, 1, True)).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        begun, got = time.perf_counter(), b""
        self._socket.sendall(head.encode() + body)
        while b"data: " not in got:
            got += self._received()
        seconds = time.perf_counter() - begun
        while not got.endswith(b"0\r\n\r\n"):
            got += self._received()
        if b'"error"' in got:
            raise SystemExit(f"the server answered {got[-300:]!r}")
        return seconds

    def _received(self) -> bytes:
        if not (data := self._socket.recv(1 << 16)):
            raise SystemExit("the server closed the connection")
        return data


class Client:
    """A Connection in a process of its own: a thread of the server's would wait for its GIL to see a token."""

    def __init__(self, port: int) -> None:
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _connect, (port,))

    def first_tokens(self, prompts: list[list[int]]) -> list[float]:
        """Seconds, of one after another."""
        return self._pool.submit(_first_tokens, prompts).result()

    def close(self) -> None:
        self._pool.shutdown()


_connections: list[Connection] = []
"""The one of a Client's process."""


def _connect(port: int) -> None:
    _connections.append(Connection(port))


def _first_tokens(prompts: list[list[int]]) -> list[float]:
    return [_connections[0].first_token(ids) for ids in prompts]


def _body(ids: list[int], tokens: int, stream: bool) -> dict[str, Any]:
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    return body | ({"stream_options": {"include_usage": True}} if stream else {})


class Bench:
    """The engine in this process and a server, with prompts that neither has seen."""

    def __init__(self, llm: nibblelm.LLM, url: str, name: str, rows: Rows) -> None:
        self._llm, self._url, self._name, self._rows = llm, url, name, rows
        self._draw = random.Random(0)

    def _ids(self, count: int) -> list[int]:
        return [self._draw.randrange(self._llm.config.vocab_size) for _ in range(count)]

    def first_token(self, repeats: int) -> None:
        """One after another, as who is alone with a server asks: blocks of the engine and of the server, of whose times
        the first few do not count. And in turns, where each finds what the other and its idle time left of the caches.
        Medians."""
        prompt = min(128, self._llm.max_context // 4)

        def inside() -> float:
            ids = self._ids(prompt)
            begun = time.perf_counter()
            handle = self._llm.submit(ids, GREEDY, max_tokens=1)  # kept: dropping it is not part of the time
            next(handle.tokens())
            return time.perf_counter() - begun

        def beside(client: Client, block: int, first: int) -> tuple[float, float]:
            times: tuple[list[float], list[float]] = ([], [])
            for _ in range(repeats // block):
                times[0].extend([inside() for _ in range(first + block)][first:])
                times[1].extend(client.first_tokens([self._ids(prompt) for _ in range(first + block)])[first:])
            return 1e3 * statistics.median(times[0]), 1e3 * statistics.median(times[1])

        with closing(Served(self._llm, self._name)) as server, closing(Client(server.port)) as client:
            engine, http = beside(client, BLOCK, 5)
            engine_turn, http_turn = beside(client, 1, 0)
        facts = {"prompt_tokens": prompt, "engine_ms": engine, "http_ms": http, "beside_ms": http - engine}
        self._rows.add(test="first token", model=self._name, **facts, turns_beside_ms=http_turn - engine_turn)

    def mixed(self, requests: int, repeats: int) -> None:
        """Output tokens per second of the engine, of whole answers and of streams; a first round does not count."""
        scale = min(1.0, self._llm.max_context / MIXED_CONTEXT)
        lengths = [(int(scale * prompt), int(scale * output)) for prompt, output in mixed_lengths(requests)]
        total = sum(output for _, output in lengths)
        rates: dict[str, list[float]] = {"engine": [], "whole": [], "streams": []}
        for _ in range(repeats + 1):
            for kind, results in rates.items():
                prompts = [self._ids(prompt) for prompt, _ in lengths]
                begun = time.perf_counter()
                if kind == "engine":
                    each = [nibblelm.SamplingParams(temperature=0, ignore_eos=True, max_tokens=n) for _, n in lengths]
                    done = sum(len(output.token_ids) for output in self._llm.generate(prompts, each))
                else:
                    sent = [
                        (0.0, _body(ids, tokens, kind == "streams"))
                        for ids, (_, tokens) in zip(prompts, lengths, strict=True)
                    ]
                    answers, _ = asyncio.run(answered(self._url, None, sent, requests))
                    done = sum(answer.tokens for answer in answers)
                if done != total:
                    raise SystemExit(f"{kind}: {done} tokens came of {total}")
                results.append(total / (time.perf_counter() - begun))
        engine, *others = (statistics.median(results[1:]) for results in rates.values())
        for kind, rate in zip(("whole", "streams"), others, strict=True):
            facts = {"kind": kind, "requests": requests, "output_tokens": total, "engine_tok_s": engine}
            self._rows.add(test="mixed", model=self._name, **facts, http_tok_s=rate, cost=1 - rate / engine)

    def steady(self, seconds: float, places: int) -> None:
        """Saturation of so many places, then what its users see of a server at 80 % of it."""
        room = self._llm.max_context
        common = {"longest_prompt": min(1024, room // 4), "longest_answer": min(1024, room // 2), "ignore_eos": True}
        for test, count in (("", places), ("saturation", 4 * places)):
            load = Load(count, concurrency=places, seed=count, **common)
            figures = self._figures(load)
            if test:
                self._rows.add(test=test, model=self._name, concurrency=places, **figures)
        rate = 0.8 * figures["requests_s"]
        load = Load(max(20, round(rate * seconds)), rate, places, seed=1, **common)
        figures = self._figures(load)
        between = figures["itl_p99_ms"] / figures["itl_p50_ms"]
        self._rows.add(test="steady", model=self._name, rate=rate, **figures, itl_p99_of_p50=between)

    def _figures(self, load: Load) -> dict[str, float]:
        results, took_s = asyncio.run(measured(self._url, None, None, load))
        found = summary(results, took_s, 1e3, 1e3)
        if found["failed"]:
            raise SystemExit(f"{found['failed']} of {load.requests} requests failed: {found['errors']}")
        times = {f"{name}_{p}_ms": found[f"{name}_ms"][p] for name in ("ttft", "itl") for p in ("p50", "p99")}
        return {key: found[key] for key in ("requests", "requests_s", "prompt_tokens_s", "output_tokens_s")} | times


class Served:
    """A server in this process."""

    def __init__(self, llm: nibblelm.LLM, name: str) -> None:
        self._socket = listen.bound("127.0.0.1", 0)
        self.port = self._socket.getsockname()[1]
        config = listen.configured(application(Service(llm, [name], listen.Options().limits), [], []))
        self._server = listen.Server(config)
        self.loop = threading.Thread(target=self._run, args=[config])
        self.loop.start()
        gc.collect()
        gc.freeze()  # as the command does, and
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)

    def _run(self, config: Any) -> None:
        with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
            runner.run(self._server.serve([self._socket]))

    def close(self) -> None:
        self._server.should_exit = True
        self.loop.join()
        gc.unfreeze()
        sys.setswitchinterval(self._switch_s)


class Pretended:
    """A server in this process, its engine on a pretended card: the host's side of 256 places."""

    def __init__(self, folder: Path, places: int = 256, context: int = MIXED_CONTEXT) -> None:
        self.llm = llm = nibblelm.LLM(folder, "cpu", threads=1)
        llm.max_context, llm.max_sequences, llm.generation_config = context, places, {}
        self.card = Card(places, llm.config.vocab_size)
        scheduler = Scheduler(places, places * page_count(context), STEP_TOKENS["cuda"])
        llm.engine = Engine(self.card, scheduler)  # type: ignore[arg-type]
        llm.generate([FIRST_ID], max_tokens=2)  # starts the engine's thread
        self._served = Served(llm, "pretended")

    def close(self) -> None:
        self._served.close()
        self.card.device = torch.device("cpu")  # its thread would wait for torch's CUDA
        self.llm.close()

    def cpu_s(self) -> tuple[float, float]:
        """Of the engine's thread and the event loop's, so far."""
        engine = next(thread for thread in threading.enumerate() if thread.name == "nibblelm-engine")
        idents = [thread.ident or 0 for thread in (engine, self._served.loop)]
        first, second = (time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents)
        return first, second

    def streamed_s(self, bodies: list[dict[str, Any]]) -> float:
        """Seconds until a client of its own process has read all streams."""
        command = [sys.executable, str(Path(__file__).with_name("pretended_card.py")), str(self._served.port)]
        told = subprocess.run(command, input=json.dumps(bodies), capture_output=True, text=True, check=True).stdout
        if (found := json.loads(told))["done"] != len(bodies):
            raise SystemExit(f"of {len(bodies)} streams {found['done']} came to their end")
        return found["seconds"]


def pretended(rows: Rows, folder: Path, requests: int, repeats: int) -> None:
    """The mixed load and first tokens of a pretended card; a first round does not count."""
    lengths, draw = mixed_lengths(requests), random.Random(0)
    total = sum(output for _, output in lengths)
    with closing(Pretended(folder)) as server:
        llm = server.llm
        figures: list[dict[str, float]] = []
        for _ in range(repeats + 1):
            found: dict[str, float] = {}
            for kind in ("engine", "http"):
                prompts = [[draw.randrange(llm.config.vocab_size) for _ in range(prompt)] for prompt, _ in lengths]
                before, busy_s, begun = server.cpu_s(), server.card.busy_s, time.perf_counter()
                if kind == "engine":
                    llm.generate(prompts, [dataclasses.replace(GREEDY, max_tokens=n) for _, n in lengths])
                    took_s = time.perf_counter() - begun
                else:
                    took_s = server.streamed_s([_body(p, n, True) for p, (_, n) in zip(prompts, lengths, strict=True)])
                engine_s, loop_s = (now - then for now, then in zip(server.cpu_s(), before, strict=True))
                found |= {f"{kind}_tok_s": total / took_s, f"{kind}_card_busy": (server.card.busy_s - busy_s) / took_s}
                found |= {f"{kind}_engine_us": 1e6 * engine_s / total, f"{kind}_loop_us": 1e6 * loop_s / total}
            figures.append(found | {"cost": 1 - found["http_tok_s"] / found["engine_tok_s"]})
        facts = {key: statistics.median(found[key] for found in figures[1:]) for key in figures[0]}
        rows.add(test="pretended card", model="llama-3-8b", requests=requests, output_tokens=total, **facts)
        Bench(llm, "", "pretended card", rows).first_token(100 * repeats)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-3-8b")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="measure this one instead of a shape")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--test", nargs="+", choices=TESTS, default=TESTS, metavar="NAME", help="measure these alone")
    parser.add_argument("--kv-memory", default="32G", metavar="BYTES", help="of each of the two engines (32G)")
    parser.add_argument("--requests", type=int, default=256, help="of the mixed load (256)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of the mixed load, and starts (3)")
    parser.add_argument("--seconds", type=float, default=20, help="of arrivals at 80 %% of saturation (20)")
    parser.add_argument("--places", type=int, help="requests at a time that saturate (as many as the engine takes)")
    parser.add_argument("--work", type=Path, default=Path("out/serve"))
    parser.add_argument("--limit", type=float, default=540, metavar="S", help="start no test after so many (540)")
    parser.add_argument("--pretend", action="store_true", help="measure the host's side, on a card that is none")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tree", metavar="HASHES")
    args = parser.parse_args()
    if args.pretend and args.test is not TESTS:
        parser.error("--test names what is measured on a card; --pretend has tests of its own")
    begun = time.monotonic()
    device = "cpu" if args.device == "cpu" or args.pretend else torch.cuda.get_device_name(args.device)
    rows = Rows(args.json, KEY, device=device, tree=args.tree)
    small = args.work / "demo-int4"
    if not small.exists():
        nibblelm.convert(DEMO, small, bits=4)
    if args.pretend:
        pretended(rows, small, args.requests, args.repeats)
        return 0
    folder = args.model or folder_of_shape(args.shape, args.work, args.device.split(":")[0])
    name = folder.name if args.model else args.shape
    options = ["--device", args.device, "--kv-memory", args.kv_memory]
    if "ready" in args.test:
        ready(rows, "stories-7m", small, ["--device", args.device], args.repeats)
        ready(rows, name, folder, options, args.repeats)
    compared = [test for test in TESTS[1:] if test in args.test]
    if not compared:
        return 0
    late = 0
    with serving(folder, options) as (url, _):
        llm = nibblelm.LLM(folder, args.device, kv_memory=parse_size(args.kv_memory))
        bench = Bench(llm, url, name, rows)
        tests = {
            "first token": lambda: bench.first_token(200),
            "mixed": lambda: bench.mixed(args.requests, args.repeats),
            "steady": lambda: bench.steady(args.seconds, args.places or llm.max_sequences),
        }
        for test in compared:
            if (spent := time.monotonic() - begun) > args.limit:
                print(f"{test}: not measured, {spent:.0f} s are spent of {args.limit:.0f}")
                late = 1
            else:
                tests[test]()
                print(f"{test}: done after {time.monotonic() - begun:.0f} s")
        llm.close()
    return late


if __name__ == "__main__":
    sys.exit(main())
