"""Time the linear kernels of the CPU on a model's matrix shapes, beside the machine's own limits.

    python scripts/bench_cpu_ops.py --isa avx512 --threads 2
    python scripts/bench_cpu_ops.py --isa avx2 avx512 --json benchmarks/cpu/avx2.json

Decode (M = 1) walks over several copies of each matrix, so that weights come from memory as in a model, and is
given in GB/s of streamed weight bytes and as a share of the read bandwidth taken in the same round. Prefill is given
in Top/s (2 M N K). Rounds alternate over everything that is measured and the best of them counts: the machine is
shared and its speed drifts.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nibblelm import _cpu, ops
from nibblelm.ops import PackedLinear, QuantizedWeight

SHAPES = {  # (K, N) of the matrices of a decode step
    "tinyllama": [(2048, 2560), (2048, 2048), (2048, 11264), (5632, 2048), (2048, 32000)],
    "qwen2.5-0.5b": [(896, 1152), (896, 896), (896, 9728), (4864, 896), (896, 151936)],
}
CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parent.parent


def random_weight(n: int, k: int, bits: int, group_size: int) -> QuantizedWeight:
    groups = 1 if group_size == -1 else -(-k // group_size)
    per_word = 32 // bits
    words = torch.randint(-(2**31), 2**31, (n, -(-k // per_word)), dtype=torch.int64).int()
    zeros = torch.randint(-(2**31), 2**31, (-(-n // per_word), groups), dtype=torch.int64).int()
    scale = (torch.rand(n, groups) * 0.02 + 0.001).bfloat16()
    return QuantizedWeight(words, scale, zeros, 4 if bits == 4 else 8, group_size, (n, k))


def random_panels(k: int, n: int, bits: int, group_size: int) -> PackedLinear:
    if bits == 16:
        return ops.pack_linear([torch.randn(n, k, dtype=torch.bfloat16)], CPU)
    return ops.pack_linear([random_weight(n, k, bits, group_size)], CPU)


def seconds(run: Callable[[], object], at_least: float = 0.05) -> float:
    """Time of one call from as many calls as fill `at_least` seconds."""
    start, calls = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < at_least or calls < 1:
        run()
        calls += 1
    return elapsed / calls


class Entry:
    """Something measured: its rates over the rounds."""

    def __init__(self, name: str, run: Callable[[], object], amount: float, unit: str) -> None:
        self.name, self.run, self.amount, self.unit = name, run, amount, unit
        self.rates: list[float] = []

    def measure(self) -> None:
        self.rates.append(self.amount / seconds(self.run))


def limit_entries(memory: torch.Tensor) -> list[Entry]:
    products = _cpu.multiply_bytes(64, 10000)
    return [
        Entry("read", lambda: _cpu.read_memory(memory.data_ptr(), memory.nbytes), memory.nbytes / 1e9, "GB/s"),
        Entry("int8 products", lambda: _cpu.multiply_bytes(64, 10000), 2e-12 * products, "Top/s"),
    ]


def decode_entry(copies: list[PackedLinear], digits: int) -> Entry:
    """One pass over all copies, recorded and replayed without Python."""
    x = torch.randn(1, copies[0].shape[1])
    with ops.capture(CPU) as program:
        for weight in copies:
            ops.linear(x, weight, None, 8 * digits)
    return Entry(f"decode D{digits}", program.replay, sum(w.nbytes for w in copies) / 1e9, "GB/s")


def prefill_entry(weight: PackedLinear, digits: int, m: int) -> Entry:
    (n, k), bits = weight.shape, 8 * digits
    x, out = torch.randn(m, k), torch.empty(m, n)
    return Entry(f"prefill D{digits}", lambda: ops.linear(x, weight, None, bits, out), 2e-12 * m * n * k, "Top/s")


def torch_entries(k: int, n: int, m: int) -> list[Entry]:
    """PyTorch's prefill on the same threads: dynamic int8 Linear and bf16."""
    from torch.ao.nn.quantized.dynamic import Linear as DynamicLinear

    x, half = torch.randn(m, k), torch.randn(n, k, dtype=torch.bfloat16)
    dense = torch.nn.Linear(k, n, bias=False)
    dense.qconfig = torch.ao.quantization.default_dynamic_qconfig  # type: ignore[assignment]
    dynamic = DynamicLinear.from_float(dense)
    count = 2e-12 * m * n * k
    return [
        Entry("torch int8", lambda: dynamic(x), count, "Top/s"),
        Entry("torch bf16", lambda: x.bfloat16() @ half.T, count, "Top/s"),
    ]


def matrix_entries(args: argparse.Namespace, k: int, n: int, bits: int) -> list[Entry]:
    """Everything measured on one matrix; freed before the next, since the copies fill `--rotate-mb`."""
    copies = [random_panels(k, n, bits, args.group_size)]
    while args.decode and sum(w.nbytes for w in copies) < args.rotate_mb << 20:
        copies.append(random_panels(k, n, bits, args.group_size))
    found: list[Entry] = []
    for digits in args.digits if bits < 16 else [1]:
        if args.decode:
            found.append(decode_entry(copies, digits))
        if args.prefill:
            found.append(prefill_entry(copies[0], digits, args.prefill))
    return found + (torch_entries(k, n, args.prefill) if args.torch and args.prefill and bits == 8 else [])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tinyllama")
    parser.add_argument("--isa", nargs="+", default=[_cpu.isa()], help="instruction sets (default: the best)")
    parser.add_argument("--threads", type=int, default=0, help="default: all cores")
    parser.add_argument("--bits", type=int, nargs="+", choices=(4, 8, 16), default=[4, 8])
    parser.add_argument("--group-size", type=int, default=-1)
    parser.add_argument("--digits", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3])
    parser.add_argument("--decode", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--prefill", type=int, default=512, help="tokens; 0 leaves prefill out")
    parser.add_argument("--torch", action="store_true", help="PyTorch's bf16 and dynamic int8 beside prefill")
    parser.add_argument("--rotate-mb", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the medians there")
    return parser.parse_args()


def measure(args: argparse.Namespace, memory: torch.Tensor, k: int, n: int, bits: int) -> list[dict[str, Any]]:
    """One matrix on the instruction set in force; the rows of the record, which are printed too."""
    measured, rows = limit_entries(memory) + matrix_entries(args, k, n, bits), []
    for _ in range(args.rounds):
        for entry in measured:
            entry.measure()
    limits = {entry.unit: max(entry.rates) for entry in measured[:2]}
    print(f"{_cpu.isa()}: {k} x {n}, {bits} bits, groups of {args.group_size}")
    for e in measured:
        best, median = max(e.rates), statistics.median(e.rates)
        print(f"  {e.name:14} {best:7.2f} ({median:6.2f}) {e.unit:6} {best / limits[e.unit]:5.0%}", flush=True)
        facts = {"isa": _cpu.isa(), "k": k, "n": n, "bits": bits}
        rows.append({**facts, "name": e.name, "unit": e.unit, "median": round(median, 3)})
    return rows


def main() -> None:
    args = parse()
    _cpu.set_threads(args.threads)
    torch.set_num_threads(_cpu.threads())
    memory, rows = torch.ones(args.rotate_mb << 18), []
    print(f"{_cpu.threads()} threads; best (median) of {args.rounds} rounds")
    for k, n in SHAPES[args.shape]:
        for bits, isa in itertools.product(args.bits, args.isa):
            _cpu.set_isa(isa)
            rows += measure(args, memory, k, n, bits)
    if args.json:
        commit = subprocess.check_output(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], text=True)
        scheme = {"commit": commit.strip(), "threads": _cpu.threads(), "group_size": args.group_size}
        lines = ",\n  ".join(json.dumps(row) for row in rows)  # a line for each row
        args.json.write_text(json.dumps(scheme)[:-1] + f', "rows": [\n  {lines}\n]}}\n')


if __name__ == "__main__":
    main()
