"""Time loading a checkpoint onto the GPU beside what the bus can do.

    python scripts/bench_load.py [--shape tinyllama-1.1b] [--json load.json] [--tree HASHES]

Makes a random bf16 checkpoint of the shape and its int8 form in a temporary folder, reads the files once so that they
are in the page cache, and loads each three times; the median counts. The bus: one 256 MiB pinned buffer, copied again
and again.
"""

import argparse
import gc
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_cpu_peers import make_checkpoint

import nibblelm
from nibblelm.shapes import SHAPES


def bus_gb_s() -> float:
    """GB/s from pinned memory to the device."""
    source = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    times = []
    for _ in range(10):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return source.nbytes / statistics.median(times) / 1e6


def load_seconds(folder: Path) -> float:
    for file in folder.iterdir():
        file.read_bytes()
    times = []
    for _ in range(3):
        llm = nibblelm.LLM(folder, device="cuda", max_context=512)
        times.append(llm.load_s)
        del llm
        gc.collect()
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="tinyllama-1.1b", choices=sorted(SHAPES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tree")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    bus = bus_gb_s()
    with tempfile.TemporaryDirectory() as work:
        folders = {"bf16": Path(work) / "bf16", "int8": Path(work) / "int8"}
        folders["bf16"].mkdir()
        make_checkpoint(args.shape, folders["bf16"], "cuda")
        nibblelm.convert(folders["bf16"], folders["int8"], bits=8, group_size=-1, method="minmax")
        for name, folder in folders.items():
            nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            seconds = load_seconds(folder)
            rate = nbytes / seconds / 1e9
            rows.append(
                {
                    "shape": args.shape,
                    "weights": name,
                    "file_bytes": nbytes,
                    "load_s": seconds,
                    "load_gb_s": rate,
                    "pinned_gb_s": bus,
                    "tree": args.tree,
                }
            )
            print(f"{args.shape} {name}: {nbytes / 1e9:.2f} GB in {seconds:.2f} s, {rate:.1f} GB/s of {bus:.1f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
