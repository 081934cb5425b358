"""What a user waits for: first tokens, and what a long prompt costs those who are being served.

    python scripts/bench_latency.py [--shape llama-3-8b] [--json latency.json] [--tree HASHES]

Random int4 weights, one scale per row, on the GPU, through the engine. `first token`: from ids on the host to the first
token on the host, drawn with top-p, for prompts that are not in the cache; also how long the device stood idle from its
first kernel to its last (CUPTI). `delay`: eight requests decode when a prompt of 8,000 tokens arrives: the longest
time between two tokens of any of them, and the prompt's first token beside the same alone. It is the process's first
long prompt, which the engine has prepared for. `sampled`: 16 requests with top-p beside greedy.
"""

import argparse
import dataclasses
import json
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from nibblelm.cli import build_parser
from nibblelm.cli.bench import _from_shape
from nibblelm.cli.options import keep_loaded
from nibblelm.engine import STEP_TOKENS
from nibblelm.engine_core import Engine, Handle
from nibblelm.pages import page_count
from nibblelm.request import Request
from nibblelm.sampler import SamplingParams
from nibblelm.scheduler import Scheduler

CONTEXT = 8192
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
PROMPTS = (16, 64, 65, 128, 256, 300, 1024, 1100)


class Bench:
    """An engine, and requests to it."""

    def __init__(self, shape: str) -> None:
        args = build_parser().parse_args(
            ["bench", "--shape", shape, "--device", "cuda", "--bits", "4", "--group-size", "-1"]
        )
        runner, _ = _from_shape(args, CONTEXT)
        pages = 20 * page_count(CONTEXT)
        runner.reserve(18, pages + 1)
        self.vocab_size = runner.model.config.vocab_size
        self.engine = Engine(runner, Scheduler(17, pages, STEP_TOKENS["cuda"]))
        self._draw = random.Random(0)
        keep_loaded()
        self.engine.start()

    def prompt(self, count: int) -> list[int]:
        """Random ids."""
        return [self._draw.randrange(self.vocab_size) for _ in range(count)]

    def add(self, ids: list[int], tokens: int, params: SamplingParams = DRAWN, stream: bool = True) -> Handle:
        params = dataclasses.replace(params, max_tokens=tokens)
        return self.engine.add(Request(ids, params, None, self.vocab_size, CONTEXT, set()), stream)

    def first_token(self, prompt: int, tokens: int = 1) -> float:
        """Seconds from the ids to the first token."""
        ids, begun = self.prompt(prompt), time.perf_counter()
        handle = self.add(ids, tokens)
        next(handle.tokens())
        return time.perf_counter() - begun


def idle_ms(bench: Bench, prompt: int) -> float:
    """Of one first token: from the device's first kernel to its last, the time when none ran."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        bench.first_token(prompt)
        torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in trace.events() or () if e.device_type.name == "CUDA")
    idle, last = 0.0, spans[0][1]
    for begin, end in spans:
        idle += max(0.0, begin - last)
        last = max(last, end)
    return idle / 1e3


def gaps(handle: Handle, result: list[float]) -> None:
    """Enter the longest time between two tokens into `result`."""
    last, longest = None, 0.0
    for _ in handle.tokens():
        now = time.perf_counter()
        longest, last = max(longest, now - (last or now)), now
    result.append(longest)


def delay(bench: Bench) -> dict[str, Any]:
    """A prompt of 8,000 tokens beside eight requests that decode, then alone."""
    longest: list[float] = []
    readers = [threading.Thread(target=gaps, args=(bench.add(bench.prompt(128), 400), longest)) for _ in range(8)]
    for reader in readers:
        reader.start()
    time.sleep(0.3)  # they decode
    beside = bench.first_token(8000)
    for reader in readers:
        reader.join()
    alone = statistics.median(bench.first_token(8000) for _ in range(3))
    return {
        "longest_gap_ms": 1e3 * max(longest),
        "first_token_ms": 1e3 * beside,
        "alone_ms": 1e3 * alone,
        "ratio": beside / alone,
    }


def throughput(bench: Bench, params: SamplingParams) -> float:
    """Output tokens per second of 16 requests of 128 + 256 tokens at once, the median of 5."""
    rates = []
    for _ in range(6):
        prompts, begun = [bench.prompt(128) for _ in range(16)], time.perf_counter()
        handles = [bench.add(ids, 256, params, stream=False) for ids in prompts]  # read one after the other
        for handle in handles:
            handle.result()
        rates.append(16 * 256 / (time.perf_counter() - begun))
    return statistics.median(rates[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tree", metavar="HASHES")
    args = parser.parse_args()
    bench = Bench(args.shape)
    common = {"shape": args.shape, "device": torch.cuda.get_device_name(), "bits": 4, "group_size": -1}
    for _ in range(3):
        list(bench.add(bench.prompt(128), 64).tokens())
    while not bench.engine.prepared and bench.engine.end is None:
        time.sleep(0.1)
    rows: list[dict[str, Any]] = [{**common, "test": "delay", **delay(bench)}]
    for prompt in PROMPTS:
        times = [bench.first_token(prompt) for _ in range(13)][2:]
        result = {"prompt_tokens": prompt, "ms": 1e3 * statistics.median(times), "most_ms": 1e3 * max(times)}
        rows.append({**common, "test": "first token", **result, "idle_ms": idle_ms(bench, prompt)})
    greedy, drawn = (throughput(bench, params) for params in (SamplingParams(temperature=0), DRAWN))
    rows.append({**common, "test": "sampled", "batch": 16, "greedy_tok_s": greedy, "tok_s": drawn})
    bench.engine.close()
    for row in rows:
        print(", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in list(row.items())[4:]))
    if args.json:
        args.json.write_text(json.dumps([{**row, "tree": args.tree} for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
