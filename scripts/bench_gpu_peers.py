"""vLLM on the GPU, to stand beside what `nibblelm bench` measures of the shape of Llama-3-8B there.

    python scripts/bench_gpu_peers.py --runner RUN_VLLM --site SITE --json benchmarks/h200/peers.json

RUN_VLLM is the script that measures vLLM and prints a JSON object a line; SITE the folder that holds vLLM, the first
place that its processes import from. Each format has a process of its own, whose messages go to --work. A row is
written as it comes: a format that fails, or is not done after --limit seconds, keeps what it has measured. Formats:
int4 groups of 128 with 16-bit activations, fp8 with 8-bit activations, both with a 16-bit head and cache.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rows import Rows

BATCHES = {"int4": "4,8,16,32,64,128,256", "fp8": "16,64,256"}
KEY = ("engine", "quant", "test", "batch", "tree")


def peer_row(line: dict[str, Any]) -> dict[str, Any] | None:
    """What a line of the runner says about speed; None for one that says something else."""
    kinds = {"decode": ("batch", "tok_s"), "prefill": ("batch", "tok_s"), "mixed": ("requests", "output_tok_s")}
    if line["test"] not in kinds:
        return None
    batch, rate = kinds[line["test"]]
    tokens = {key: line[key] for key in ("prompt", "new", "prompt_tokens", "output_tokens") if key in line}
    return {"quant": line["quant"], "test": line["test"], "batch": line[batch], "tok_s": line[rate], **tokens}


def measure(command: list[str], environment: dict[str, str], log: Path, limit: float, rows: Rows) -> bool:
    """Enter the rows of one process of the runner; whether it came to its end."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        timer = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))  # the engine's own process too
        timer.start()
        assert process.stdout is not None
        facts = {"engine": "vLLM", "version": None, "device": None}
        for text in process.stdout:
            if not text.startswith("{"):
                continue
            line = json.loads(text)
            if line["test"] == "setup":
                facts |= {"version": line["vllm"], "device": line["gpu"]}
            if (row := peer_row(line)) is not None:
                rows.add(**facts, **row)
        code = process.wait()
        timer.cancel()
    if code:
        print(f"{' '.join(command)} ended with {code}; the end of {log}:\n{log.read_text()[-1500:]}", file=sys.stderr)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", type=Path, required=True, metavar="RUN_VLLM")
    parser.add_argument("--site", type=Path, required=True)
    parser.add_argument("--quant", nargs="+", choices=tuple(BATCHES), default=list(BATCHES))
    parser.add_argument("--tests", default="abcd", help="a batch 1, b batches, c prefill of 2,048, d mixed load (abcd)")
    parser.add_argument("--work", type=Path, default=Path("out/peers"), help="the configurations, and what vLLM says")
    parser.add_argument("--limit", type=float, default=300, metavar="S", help="seconds for each format (300)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tree", metavar="HASHES")
    args = parser.parse_args()
    if not args.site.is_dir():
        parser.error(f"--site {args.site} is no folder; unpack vLLM there")
    args.work.mkdir(parents=True, exist_ok=True)
    site = str(args.site.resolve())
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([site, *filter(None, [os.environ.get("PYTHONPATH")])])}
    rows, complete = Rows(args.json, KEY, tree=args.tree), True
    for quant in args.quant:
        begun = time.monotonic()
        command = [sys.executable, str(args.runner), "--quant", quant, "--mp", "--site", site, "--tests", args.tests]
        command += ["--batches", BATCHES[quant], "--dir", str(args.work.resolve() / "llama-3-8b")]
        complete &= measure(command, environment, args.work / f"{quant}.log", args.limit, rows)
        print(f"vLLM {quant}: {time.monotonic() - begun:.0f} s")
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
