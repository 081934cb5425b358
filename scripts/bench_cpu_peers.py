"""NibbleLM on the CPU beside llama.cpp and PyTorch's dynamic int8 Linear, in one alternating run.

    python scripts/bench_cpu_peers.py --peer-python PEERS/bin/python --work CACHE --json benchmarks/cpu
    python scripts/bench_cpu_peers.py --shape qwen2.5-0.5b --threads 2 --rounds 3
    python scripts/bench_cpu_peers.py --rounds 0 --work CACHE --json benchmarks/cpu       the footprint alone
    python scripts/bench_cpu_peers.py --older COMMIT=OLD/bin/python ...    an older NibbleLM in the same rounds

PEERS is a virtual environment with llama.cpp built for this machine, numpy and the GGUF writer:

    python3 -m venv PEERS
    CMAKE_ARGS=-DGGML_NATIVE=ON PEERS/bin/pip install --no-binary llama-cpp-python llama-cpp-python gguf numpy

Without --peer-python only PyTorch is compared. OLD is an environment with another commit's wheel. Ratios of one
processor say nothing about another's: whether a tree is slower than an earlier one, only such rounds tell.

All engines run the same random bf16 weights: NibbleLM converts them with min/max to int4 and int8 per row (int8 head),
llama.cpp's own quantizer makes its default Q4_0 and Q8_0 files, PyTorch quantizes its Linear layers per tensor; the
first lines printed say how far the logits of each are from one another. The files (7 GB for the 1.1B shape) stay in
--work for the next run.

Every engine lives in its own process. A round asks each for one prefill and one decode, forwards in even rounds and
backwards in odd ones; a ratio is taken within a round, and its median, least and most over the rounds are given.
Prefill computes the logits of the last position only, everywhere; decode feeds back its greedy choices from an empty
cache. The limits (bytes read from memory, int8 products: 2 operations each) are measured in the same rounds.
"""

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import nibblelm
from nibblelm import _cpu, ops
from nibblelm.checkpoint.writer import FolderWriter, OutputTensor, plan_files
from nibblelm.models import tensor_plan
from nibblelm.shapes import SHAPES

ENGINES = Path(__file__).with_name("cpu_peer_engines.py")
ROOT = ENGINES.parent.parent
TOKENS = {"prefill": 512, "decode": 128}
PAUSE_S = 0.03  # longer than any engine's idle threads spin
RETURN_S = 5.0  # longer than Linux waits before it reports free memory to a host
PAIRS = (  # bits of NibbleLM, peer
    (4, "llama.cpp Q4_0"),
    (8, "llama.cpp Q8_0"),
    (4, "torch dynamic int8"),
    (8, "torch dynamic int8"),
    (4, "older int4"),
    (8, "older int8"),
)


# ---------------------------------------------------------------------------------------------- models


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when it is complete."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    partial.rename(folder)


def make_checkpoint(raw: dict[str, Any], folder: Path, device: str = "cpu", max_shard: int = 1 << 40) -> None:
    """config.json and bf16 files of at most `max_shard` bytes: Gaussian weights that keep the size of activations,
    biases of 0.1, gains of 1."""
    generator, specs = torch.Generator(device).manual_seed(0), tensor_plan(raw)
    outputs = [[OutputTensor(spec.name, torch.bfloat16, spec.shape)] for spec in specs]
    with FolderWriter(folder, plan_files(outputs, max_shard)) as writer:
        for spec in specs:
            value = torch.randn(spec.shape, generator=generator, device=device)
            if spec.kind == "vector":
                value = value * 0.1 + ("norm" in spec.name)
            elif spec.kind != "embedding":
                value *= spec.shape[1] ** -0.5
            writer.write(spec.name, 0, value.bfloat16().cpu())
        writer.finish()
    (folder / "config.json").write_text(json.dumps(raw))


def prepare(shape: str, work: Path, peer_python: Path | None, older_python: str | None) -> dict[str, list[str]]:
    """Make what is not in `work` yet. Returns the command line of each engine's process."""
    source, quantized = work / shape / "bf16", {bits: work / shape / f"int{bits}" for bits in (4, 8)}
    if not source.exists():
        print(f"making random weights of {shape} ...", file=sys.stderr)
        with appearing(source) as folder:
            make_checkpoint(SHAPES[shape], folder)
    for bits, folder in quantized.items():
        if not folder.exists():
            nibblelm.convert(source, folder, bits=bits, group_size=-1, method="minmax")  # type: ignore[arg-type]
    commands = {f"int{bits}": [sys.executable, str(ENGINES), "nibblelm", str(quantized[bits])] for bits in (4, 8)}
    if peer_python is not None:
        gguf = work / shape / "gguf"
        if not gguf.exists():
            with appearing(gguf) as folder:
                subprocess.run([peer_python, ENGINES, "gguf", source, folder], check=True, stdout=subprocess.DEVNULL)
        for name in ("Q4_0", "Q8_0"):
            path = gguf / f"{name.lower()}.gguf"
            commands[f"llama.cpp {name}"] = [str(peer_python), str(ENGINES), "llama.cpp", str(path)]
    if older_python is not None:
        for bits, folder in quantized.items():
            commands[f"older int{bits}"] = [older_python, str(ENGINES), "nibblelm", str(folder)]
    commands["torch dynamic int8"] = [sys.executable, str(ENGINES), "torch", str(source)]
    return {name: commands[name] for name in sorted(commands, key=_beside_its_peer)}


def _beside_its_peer(name: str) -> int:
    order = ["older int4", "int4", "llama.cpp Q4_0", "torch dynamic int8", "older int8", "int8", "llama.cpp Q8_0"]
    return order.index(name)


class Worker:
    """An engine in its own process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()  # the end of its input ends it

    def seconds(self, phase: str, threads: int, tokens: int, path: Path | None = None) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        command = {"phase": phase, "threads": threads, "tokens": tokens, "path": str(path)}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            raise SystemExit(f"{self._process.args} ended; its message is above")
        return json.loads(answer)["seconds"]


# ---------------------------------------------------------------------------------------------- measuring


class Limits:
    """The machine's read bandwidth (GB/s) and rate of int8 products (Top/s)."""

    def __init__(self) -> None:
        self._memory = torch.ones(128 << 20)

    def measure(self, threads: int) -> tuple[float, float]:
        """The best of five short passes each, now."""
        ops.set_threads(threads)
        read, products = [], []
        for _ in range(5):
            begun = time.perf_counter()
            _cpu.read_memory(self._memory.data_ptr(), self._memory.nbytes)
            middle = time.perf_counter()
            count = _cpu.multiply_bytes(64, 10000)
            read.append(self._memory.nbytes / (middle - begun) / 1e9)
            products.append(2 * count / (time.perf_counter() - middle) / 1e12)
        return max(read), max(products)


def print_agreement(workers: dict[str, Worker], threads: int) -> None:
    """Relative L2 between the logits of int8, which is the closest to the source's, and every engine."""
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name, worker in workers.items():
            path = Path(folder) / "logits.npy"
            worker.seconds("logits", threads, 32, path)
            found[name] = np.load(path)
    base = found["int8"]
    distances = (f"{name} {np.linalg.norm(found[name] - base) / np.linalg.norm(base):.3f}" for name in found)
    print("relative distance of a prompt's logits from int8's: " + ", ".join(distances))


Rates = dict[tuple[str, str], list[float]]  # tokens per second by (engine, phase), round by round


def run_rounds(
    workers: dict[str, Worker], limits: Limits, threads: int, phases: Sequence[str], rounds: int
) -> tuple[Rates, list[tuple[float, float]]]:
    rates: Rates = {}
    measured = []
    for worker in workers.values():  # first use allocates, and records the decode step
        worker.seconds("prefill", threads, TOKENS["prefill"])
        worker.seconds("decode", threads, 8)
    for i in range(rounds):
        for phase in phases:
            measured.append(limits.measure(threads))
            for name in list(workers)[:: -1 if i % 2 else 1]:
                time.sleep(PAUSE_S)
                seconds = workers[name].seconds(phase, threads, TOKENS[phase])
                rates.setdefault((name, phase), []).append(TOKENS[phase] / seconds)
    return rates, measured


def rows_of(rates: Rates, read_gb_s: float, facts: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for age, phase, (bits, peer) in itertools.product(("", "older "), TOKENS, PAIRS):
        ours, theirs = rates.get((f"{age}int{bits}", phase)), rates.get((peer, phase))
        if ours is None or theirs is None or (age and peer.startswith(age)):
            continue
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        rows.append(
            {
                **{key: facts[key] for key in ("shape", "threads")},
                **({"older": facts["older"]} if age else {}),
                "bits": bits,
                "group_size": -1,
                "phase": phase,
                "ours_tok_s": round(statistics.median(ours), 2),
                "peer": peer,
                "peer_tok_s": round(statistics.median(theirs), 2),
                "ratio_median": round(statistics.median(ratios), 3),
                "ratio_min": round(min(ratios), 3),
                "ratio_max": round(max(ratios), 3),
                "read_gb_s": round(read_gb_s, 1),
                "rounds": len(ratios),
                "commit": facts["commit"],
            }
        )
    return rows


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    for r in rows:
        spread = f"{r['ratio_median']:5.2f} x [{r['ratio_min']:.2f} .. {r['ratio_max']:.2f}]"
        ours = f"{'older ' * ('older' in r)}int{r['bits']}"
        print(
            f"  {r['phase']:8} {ours:10} {r['ours_tok_s']:7.1f}   {r['peer']:19} {r['peer_tok_s']:7.1f}   {spread}",
            flush=True,
        )


def print_limits(
    rates: Rates, measured: Sequence[tuple[float, float]], weight_bytes: dict[int, int]
) -> tuple[float, float]:
    """Returns the medians of both limits; a decoded token reads the weights, and about two products per weight."""
    read, products = (statistics.median(values) for values in zip(*measured, strict=True))
    spread = [f"{min(v):.1f} .. {max(v):.1f}" for v in zip(*measured, strict=True)]
    print(f"  limits: read {read:.1f} GB/s [{spread[0]}], int8 products {products:.2f} Top/s [{spread[1]}]")
    for bits, count in weight_bytes.items():
        if (values := rates.get((f"int{bits}", "decode"))) is not None:
            share = count * statistics.median(values) / 1e9 / read
            print(f"  int{bits} decode reads {count / 1e6:.0f} MB a token: {share:.0%} of the bandwidth")
        if (values := rates.get((f"int{bits}", "prefill"))) is not None:
            share = 2 * weight_bytes[8] * statistics.median(values) / 1e12 / products
            print(f"  int{bits} prefill: {share:.0%} of the int8 products")
    return read, products


def read_through(folder: Path) -> int:
    """Bring a folder's files into the page cache; their size."""
    size = 0
    for path in folder.iterdir():
        with path.open("rb") as file:
            while block := file.read(8 << 20):
                size += len(block)
    return size


def footprint(shape: str, folder: Path, bits: int, measured_commit: str) -> dict[str, Any]:
    """Medians over fresh processes, three of each kind, which find the folder in the page cache.

    A virtual machine may return free memory to its host, and wait some 5 ms for every 2 MiB of it that is touched
    again. `load_s` is taken right after another process has touched and freed three times the size of the files,
    `load_untouched_s` after the machine had the time to return what was free.
    """
    runs: list[dict[str, float]] = []
    for untouched in (False, True) * 3:
        size = read_through(folder)
        if untouched:
            time.sleep(RETURN_S)
        else:
            np.ones(3 * size, np.uint8)
        run = json.loads(subprocess.check_output([sys.executable, ENGINES, "footprint", folder]))
        if untouched:
            run["load_untouched_s"] = run.pop("load_s")
        runs.append(run)
    keys = dict.fromkeys(key for run in runs for key in run)
    found = {key: statistics.median(run[key] for run in runs if key in run) for key in keys}
    rest = found["kv_bytes"] + found["torch_bytes"]
    shares = [found["peak_bytes"] / (found[key] + rest) for key in ("packed_bytes", "file_bytes")]
    mib = {key: f"{value / 2**20:.0f}" for key, value in found.items() if key.endswith("_bytes")}
    print(
        f"{shape} int{bits}: load {found['load_s']:.2f} s beyond import torch ({found['load_untouched_s']:.2f} s in "
        f"memory not touched before); peak {mib['peak_bytes']} MiB: "
        f"KV {mib['kv_bytes']} + import torch {mib['torch_bytes']} + matrices {mib['packed_bytes']} "
        f"({shares[0]:.2f} x) or + the whole file {mib['file_bytes']} ({shares[1]:.2f} x); "
        f"{found['outside_kernels']:.1%} of a decoded token outside kernels",
        flush=True,
    )
    facts = {key: round(value) if key.endswith("_bytes") else round(value, 4) for key, value in found.items()}
    return {"shape": shape, "bits": bits, **facts, "commit": measured_commit}


def compare(
    shape: str,
    commands: dict[str, list[str]],
    weight_bytes: dict[int, int],
    args: argparse.Namespace,
    measured_commit: str,
) -> list[dict[str, Any]]:
    """All engines on one shape; the rows of the record, which are printed too."""
    found, limits = [], Limits()
    facts = {"shape": shape, "commit": measured_commit, "older": args.older and args.older[0]}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(Worker(command)) for name, command in commands.items()}
        print_agreement(workers, args.threads[0])
        for threads in args.threads:
            print(f"{shape}, {threads} threads, {args.rounds} rounds, tok/s")
            rates, measured = run_rounds(workers, limits, threads, args.phase, args.rounds)
            read, _ = print_limits(rates, measured, weight_bytes)
            rows = rows_of(rates, read, facts | {"threads": threads})
            print_rows(rows)
            found += rows
    return found


# ---------------------------------------------------------------------------------------------- command line


def commit() -> str:
    """The commit that was measured, marked where what the CPU runs differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", "-C", str(ROOT), *arguments], text=True).strip()

    sources = ("csrc/cpu", "csrc/bindings_cpu.cpp", "runtime", "models", "scripts/*peer*")
    changed = git("status", "--porcelain", "--", *sources)
    return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")


def commit_and_path(text: str) -> tuple[str, str]:
    older, _, path = text.partition("=")
    if not path:
        raise argparse.ArgumentTypeError(f"{text!r}; want COMMIT=PATH, as 2540dcd=OLD/bin/python")
    return older, path


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = ("tinyllama-1.1b", "qwen2.5-0.5b")
    parser.add_argument("--shape", nargs="+", choices=shapes, default=list(shapes))
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    parser.add_argument("--phase", nargs="+", choices=tuple(TOKENS), default=list(TOKENS))
    parser.add_argument("--rounds", type=int, default=7, help="0: no engines, only the footprint")
    parser.add_argument("--peer-python", type=Path, metavar="PATH", help="interpreter that has llama_cpp and gguf")
    parser.add_argument(
        "--older", type=commit_and_path, metavar="COMMIT=PATH", help="an older NibbleLM, and an interpreter that has it"
    )
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="keeps the models (default: a temporary folder)")
    parser.add_argument("--footprint", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FOLDER",
        help="write what was measured there: peers.json, footprint.json; with --older one more run in peers_older.json",
    )
    return parser.parse_args()


def one_more_run(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is recorded there, and `rows` as a run of their own."""
    before = json.loads(path.read_text()) if path.exists() else []
    run = 1 + max((row["run"] for row in before), default=0)
    return [*before, *({**row, "run": run} for row in rows)]


def main() -> None:
    args = parse()
    rows, footprints, measured_commit = [], [], commit()
    with ExitStack() as outer:
        work = args.work or Path(outer.enter_context(tempfile.TemporaryDirectory()))
        for shape in args.shape:
            commands = prepare(shape, work, args.peer_python, args.older and args.older[1])
            for bits in (4, 8) if args.footprint else ():
                footprints.append(footprint(shape, work / shape / f"int{bits}", bits, measured_commit))
            weight_bytes = {f["bits"]: f["packed_bytes"] for f in footprints if f["shape"] == shape}
            if args.rounds:
                rows += compare(shape, commands, weight_bytes, args, measured_commit)
    if args.json:
        args.json.mkdir(parents=True, exist_ok=True)
        if args.older and rows:
            rows = one_more_run(args.json / "peers_older.json", rows)
        for name, record in (("peers_older" if args.older else "peers", rows), ("footprint", footprints)):
            if record:
                (args.json / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
