"""Time loading a checkpoint onto the GPU beside what the bus can do.

    python scripts/bench_load.py [--model SHAPE[:LAYERS] ...] [--json load.json] [--tree HASHES]

Makes a random bf16 checkpoint of each shape and its int8 form in a temporary folder and reads the files once so that
they are in the page cache. A load is everything from opening the folder to weights that kernels can use, packing
included; CUDA has been started before. The first load, which also pins the staging memory and takes the device's, is
apart; of four more the median counts. The bus: one 256 MiB pinned buffer, copied again and again.
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


def load_seconds(folder: Path) -> list[float]:
    for file in folder.iterdir():
        file.read_bytes()
    times = []
    for _ in range(5):
        llm = nibblelm.LLM(folder, device="cuda", max_context=512)
        times.append(llm.load_s)
        del llm
        gc.collect()
    return times


def measure(name: str, raw: dict[str, Any], bus: float) -> list[dict[str, Any]]:
    """A row each for the bf16 and the int8 checkpoint of a configuration."""
    rows = []
    with tempfile.TemporaryDirectory() as work:
        folders = {"bf16": Path(work) / "bf16", "int8": Path(work) / "int8"}
        folders["bf16"].mkdir()
        make_checkpoint(raw, folders["bf16"], "cuda")
        nibblelm.convert(folders["bf16"], folders["int8"], bits=8, group_size=-1, method="minmax")
        for weights, folder in folders.items():
            nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            torch.cuda.empty_cache()
            first, *rest = load_seconds(folder)
            seconds = statistics.median(rest)
            row = {"shape": name, "weights": weights, "file_bytes": nbytes, "first_load_s": first, "load_s": seconds}
            rows.append({**row, "load_gb_s": nbytes / seconds / 1e9, "pinned_gb_s": bus})
            print(
                f"{name} {weights}: {nbytes / 1e9:.2f} GB in {seconds:.3f} s (first {first:.3f} s), "
                f"{nbytes / seconds / 1e9:.1f} GB/s of {bus:.1f}"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["tinyllama-1.1b", "llama-3-8b:8"], metavar="SHAPE[:LAYERS]")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tree")
    args = parser.parse_args()
    rows, bus = [], bus_gb_s()
    for name in args.model:
        shape, _, layers = name.partition(":")
        raw = SHAPES[shape] | ({"num_hidden_layers": int(layers)} if layers else {})
        rows += [{**row, "tree": args.tree} for row in measure(name, raw, bus)]
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
