"""Time and memory of calibrated conversions of a large checkpoint, and whether a killed one ends in the same bytes.

    python scripts/bench_convert.py [--shape llama-3-8b] [--layers N] [--device cuda] [--json convert.json]

Makes a bf16 checkpoint of random weights in shards, with the demo model's tokenizer (16 GB for 8B, kept in --work), and
runs `nibblelm convert` on it with the bundled text, in a process of its own. `time`: wall time, and peaks of the
process's memory as /proc says (resident; of it anonymous, and pages of files and of memory shared with the driver) and
of what the card has less than before (its context included). With --layers the time of the whole shape is
extrapolated, by what one layer took between the first and the last: `seconds` is measured, `whole_s` is not. So it is
where --limit ends a conversion. `resume`: a conversion of --resume-layers layers, killed at a random tensor of the
first half, resumed, and compared with one that was not.
"""

import argparse
import hashlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_cpu_peers import appearing, make_checkpoint
from check_convert_memory import memory_of
from rows import Rows

from nibblelm.shapes import SHAPES

DEMO = Path(__file__).resolve().parent.parent / "demo" / "stories-7m"
KEY = ("test", "shape", "layers", "method", "format", "tree")
SHARD = 5 * 10**9
LAYER = re.compile(r"\.(\d+)\.")


@dataclass
class Run:
    """One conversion, watched: its seconds and exit code, how many tensors it finished, peaks of memory, and when each
    layer's first tensor was done."""

    seconds: float = 0.0
    code: int = 0
    tensors: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    layers: dict[int, float] = field(default_factory=dict)

    @property
    def layer_s(self) -> float | None:
        """Seconds of a layer, of all but the first, which also waits for libraries to start."""
        times = list(self.layers.values())
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def checkpoint(shape: str, layers: int, work: Path, device: str) -> Path:
    """The checkpoint of so many layers, made where it is not there yet."""
    folder = work / f"{shape}-{layers}"
    if not folder.exists():
        begun = time.monotonic()
        with appearing(folder) as partial:
            make_checkpoint(SHAPES[shape] | {"num_hidden_layers": layers}, partial, device, SHARD)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(DEMO / name, partial / name)
        if device != "cpu":
            torch.cuda.empty_cache()
        print(f"{folder}: made in {time.monotonic() - begun:.0f} s")
    return folder


def convert(source: Path, target: Path, options: list[str], device: str, limit: float, kill_after: int = -1) -> Run:
    """Run a conversion to its end, to `limit` seconds, or until that many tensors are done."""
    command = [sys.executable, "-m", "nibblelm", "convert", str(source), str(target), "--json", "--device", device]
    journal = target.with_name(f".{target.name}.partial") / "journal.jsonl"
    run, begun = Run(), time.monotonic()
    free = torch.cuda.mem_get_info(device)[0] if device != "cpu" else 0
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            now = time.monotonic() - begun
            peaks = {f"host_{name}": value for name, value in memory_of(process.pid).items()}
            if device != "cpu":
                peaks["device"] = free - torch.cuda.mem_get_info(device)[0]
            run.peaks |= {name: max(value, run.peaks.get(name, 0)) for name, value in peaks.items()}
            with suppress(FileNotFoundError):  # before the first tensor, and after the last
                lines = journal.read_text().splitlines()[1:]
                for line in lines[run.tensors :]:
                    if layer := LAYER.search(line.partition(",")[0]):
                        run.layers.setdefault(int(layer[1]), now)
                run.tensors = len(lines)
            if now > limit or run.tensors >= kill_after >= 0:
                process.send_signal(signal.SIGKILL)
            time.sleep(0.01)
    run.seconds, run.code = time.monotonic() - begun, process.returncode
    return run


def measure(
    source: Path, shape: str, layers: int, options: list[str], args: argparse.Namespace, limit: float
) -> dict[str, Any]:
    """The figures of one conversion of so many layers."""
    target = source.with_name(f"{source.name}-out")
    run = convert(source, target, [*options, "--overwrite"], args.device, limit)
    whole = SHAPES[shape]["num_hidden_layers"]
    if run.code != 0:  # else the last may have come between two looks at the journal
        layers = len(run.layers)
    if run.code not in (0, -signal.SIGKILL):
        raise SystemExit(f"the conversion ended with {run.code}; its message is above")
    shutil.rmtree(target, ignore_errors=True)
    shutil.rmtree(target.with_name(f".{target.name}.partial"), ignore_errors=True)
    whole_s = None if run.layer_s is None else run.seconds + (whole - layers) * run.layer_s
    peaks = {f"{name}_bytes": value for name, value in run.peaks.items()}
    facts = {"finished": run.code == 0, "seconds": run.seconds, "layers_done": layers, "layer_s": run.layer_s}
    return {**facts, "whole_layers": whole, "whole_s": whole_s, "extrapolated": layers < whole, **peaks}


def resumed(source: Path, options: list[str], args: argparse.Namespace, limit: float) -> dict[str, Any]:
    """Kill a conversion and resume it: whether the bytes are those of one that was left alone."""
    whole, broken = (source.with_name(f"{source.name}-{name}") for name in ("whole", "broken"))
    begun = time.monotonic()

    def left() -> float:
        return limit - (time.monotonic() - begun)

    for folder in (whole, broken):
        shutil.rmtree(folder, ignore_errors=True)
    first = convert(source, whole, [*options, "--overwrite"], args.device, left())
    last = random.Random(args.seed).randint(2, max(2, first.tensors // 2))  # with layers to come: it is killed in time
    killed = convert(source, broken, [*options, "--overwrite"], args.device, left(), last)
    again = convert(source, broken, [*options, "--resume"], args.device, left())
    if (first.code, killed.code, again.code) != (0, -signal.SIGKILL, 0):
        raise SystemExit(f"exit codes {first.code}, {killed.code}, {again.code}; 0, -9 and 0 were expected")
    hashes = [{p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in f.iterdir()} for f in (whole, broken)]
    for folder in (whole, broken):
        shutil.rmtree(folder)
    return {"killed_after_tensors": last, "files": len(hashes[0]), "identical": hashes[0] == hashes[1]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="llama-3-8b")
    parser.add_argument("--layers", type=int, metavar="N", help="of the one that is timed (the shape's; 0: none)")
    parser.add_argument("--resume-layers", type=int, default=4, metavar="N", help="0: no test of resuming (4)")
    parser.add_argument("--method", nargs="+", choices=("gptq", "awq", "mse"), default=["gptq", "awq"])
    parser.add_argument("--group-size", type=int, default=-1)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0, help="of the tensor at which a conversion is killed")
    parser.add_argument("--work", type=Path, default=Path("out/convert"))
    parser.add_argument("--limit", type=float, default=580, metavar="S", help="seconds of all (580)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--tree", metavar="HASHES")
    args = parser.parse_args()
    begun, identical = time.monotonic(), True
    device = "cpu" if args.device == "cpu" else torch.cuda.get_device_name(args.device)
    rows = Rows(args.json, KEY, device=device, tree=args.tree)
    whole = SHAPES[args.shape]["num_hidden_layers"] if args.layers is None else args.layers
    for test, layers in (("time", whole), ("resume", args.resume_layers)):
        if not layers:
            continue
        source = checkpoint(args.shape, layers, args.work, args.device)
        for method in args.method:
            options = ["--method", method, "--bits", "4", "--group-size", str(args.group_size)]
            options += ["--samples", str(args.samples)] if method != "mse" else []
            left = args.limit - (time.monotonic() - begun)
            facts = {"shape": args.shape, "layers": layers, "method": method, "format": f"int4 {args.group_size}"}
            if test == "resume":
                identical &= rows.add(test=test, **facts, **resumed(source, options, args, left))["identical"]
            else:
                rows.add(test=test, **facts, **measure(source, args.shape, layers, options, args, left))
    return 0 if identical else 1


if __name__ == "__main__":
    sys.exit(main())
