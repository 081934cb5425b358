"""What a server on this machine's CPU holds out: requests that make no sense, then as many that do as it can take.

    python scripts/soak_server.py [--model FOLDER] [--bad 10000] [--minutes 20] [--json benchmarks/cpu/serve.json]

`bad requests`: those of the tests (tests/server/bad_requests.py), by 16 clients, with a wrong key in one of ten, while
20 connections send a byte a second. `soak`: the load of `bench serve`, 64 requests at a time in rounds of 200, until
the minutes are over. Memory is that of the server's process, read when a tenth of the bad requests, or a quarter of
the minutes, is over (pages are taken and steps recorded as they are first used), and at the end: it may grow by 5 %.
Fails where it grows more, where what makes no sense is answered with anything but a 4xx or a closed connection (a
changed byte may leave a request that makes sense), where a request of the soak fails, or where pages do not come back.
"""

import argparse
import asyncio
import random
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from bench_serve import DEMO, serving
from rows import Rows

import nibblelm
from nibblelm.server.bench import Load, measured, summary

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "server"))
from bad_requests import bad_request, status_of  # type: ignore[import-not-found]

KEYS = ("right",) * 9 + ("wrong",)
GROWTH = 1.05


def memory() -> int:
    """Resident bytes of the server."""
    (server,) = psutil.Process().children()
    return server.memory_info().rss


def slow(port: int, done: threading.Event) -> None:
    """A request that comes a byte a second, again and again: the server closes it when it has waited long enough."""
    while not done.is_set():
        with socket.create_connection(("127.0.0.1", port)) as connection:
            try:
                while connection.send(b"P") and not done.wait(1):
                    pass
            except ConnectionError:
                pass


def bad_requests(port: int, count: int) -> dict[str, Any]:
    """The row of `count` requests that make no sense."""
    rng, done = random.Random(7), threading.Event()
    loris = [threading.Thread(target=slow, args=(port, done)) for _ in range(20)]
    for thread in loris:
        thread.start()
    begun, statuses = time.monotonic(), Counter[int]()
    with ThreadPoolExecutor(16) as pool:

        def send(requests: int) -> int:
            bad = [bad_request(rng, KEYS) for _ in range(requests)]
            statuses.update(pool.map(lambda request: status_of(port, *request), bad))
            return memory()

        before, after = send(count // 10), send(count - count // 10)
    done.set()
    for thread in loris:
        thread.join()
    odd = sum(n for status, n in statuses.items() if status and not 400 <= status < 500)
    good = set(statuses) - {0, 200} <= set(range(400, 500)) and odd < count / 20 and after < before * GROWTH
    row = {"requests": count, "seconds": time.monotonic() - begun}
    row |= {"statuses": {str(status): n for status, n in sorted(statuses.items())}}
    return row | {"memory_before_bytes": before, "memory_after_bytes": after, "holds": good}


def soak(url: str, minutes: float) -> dict[str, Any]:
    """The row of the load of `bench serve` for that long."""
    begun, held, answered, failed, tokens = time.monotonic(), list[int](), 0, 0, 0.0
    while not held or time.monotonic() - begun < 60 * minutes:
        load = Load(200, concurrency=64, prompt_mean=80, answer_mean=100, longest_prompt=200, longest_answer=200)
        load = Load(**{**vars(load), "seed": len(held)})
        results, took_s = asyncio.run(measured(url, None, "right", load))
        figures = summary(results, took_s, 1.0, 1.0)
        answered, failed = answered + figures["requests"] - figures["failed"], failed + figures["failed"]
        tokens += figures["output_tokens_s"] * took_s
        held.append(memory())
    took_s = time.monotonic() - begun
    row = {"requests": answered + failed, "failed": failed, "seconds": took_s, "output_tokens_s": tokens / took_s}
    before = held[len(held) // 4]
    row |= {"memory_before_bytes": before, "memory_after_bytes": held[-1], "memory_bytes": held}
    return row | {"holds": not failed and held[-1] < before * GROWTH}


def pages_in_use(url: str) -> float:
    """The share of pages that are in use, a second after the last request."""
    time.sleep(1)
    request = urllib.request.Request(f"{url}/metrics", headers={"authorization": "Bearer right"})
    with urllib.request.urlopen(request) as response:
        lines = response.read().decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("nibblelm:kv_cache_usage_perc "))


def main() -> int:
    parser = argparse.ArgumentParser(description="Bad requests and a soak for nibblelm serve.")
    parser.add_argument("--model", type=Path, help="a folder (default: the demo model as int4)")
    parser.add_argument("--bad", type=int, default=10_000, metavar="N")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tree", metavar="HASHES", help="what to record as the source tree")
    args = parser.parse_args()
    rows = Rows(args.json, ("test", "model", "tree"), tree=args.tree)
    with tempfile.TemporaryDirectory() as work:
        folder = args.model or Path(work) / "demo-int4"
        if args.model is None:
            nibblelm.convert(DEMO, folder, bits=4, group_size=-1, method="minmax")
        with serving(folder, ["--device", "cpu", "--api-key", "right"]) as (url, _):
            parts = {
                "bad requests": lambda: bad_requests(int(url.rpartition(":")[2]), args.bad),
                "soak": lambda: soak(url, args.minutes),
            }
            holds = True
            for name, part in parts.items():
                row = part()
                in_use = pages_in_use(url)
                row["holds"] = row["holds"] and in_use == 0
                holds = holds and row["holds"]
                rows.add(test=name, model=folder.name, pages_in_use=in_use, **row)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
