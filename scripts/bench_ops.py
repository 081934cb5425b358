"""Time every CUDA op over the shapes of Llama-3-8B and Llama-3.2-1B, beside this device's limits and a user's baseline.

    python scripts/bench_ops.py [--ops linear,softmax] [--quick] [--json ops.json] [--tree HASHES]

Each time is the median over replays of a CUDA graph of many calls that rotate over at least 512 MB of weights or
inputs, so L2 does not help. One function per op, each yielding `Row`s; add new ones to `BENCHMARKS`.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.ops import cuda
from nibblelm.ops.types import QuantizedWeight

DEVICE = torch.device("cuda")
ROTATE_BYTES = 512 << 20


@dataclass
class Row:
    """One measurement; `gb_s` counts the fewest bytes the op must move, `percent_of_peak` is of the nearer limit."""

    op: str
    shape: str
    dtype: str
    time_us: float
    gb_s: float | None = None
    tflop_s: float | None = None
    percent_of_peak: float | None = None
    baseline: str | None = None
    baseline_time_us: float | None = None
    tree: str | None = None


@dataclass
class Limits:
    """This device's own rates, measured at the start of the run."""

    read_gb_s: float
    copy_gb_s: float
    bf16_tflop_s: float


def time_us(
    call: Callable[[Any], object], buffers: Sequence[Any], replays: int = 20, programmatic: bool = True
) -> float:
    """Median microseconds of one `call(buffer)`: a graph over all buffers (repeated to at least 20 calls), replayed."""
    repeated = list(buffers) * max(1, -(-20 // len(buffers)))
    with cuda.programmatic_launch(programmatic):
        for buffer in buffers:
            call(buffer)
        torch.cuda.synchronize()
        with ops.capture(DEVICE) as program:
            for buffer in repeated:
                call(buffer)
    program.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        program.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(repeated))
    return statistics.median(times)


def copies(nbytes: int) -> int:
    """How many buffers of this size a benchmark rotates over."""
    return max(2, -(-ROTATE_BYTES // max(nbytes, 1)))


def measure_limits() -> Limits:
    source = torch.randn(1 << 29, device=DEVICE)  # 2 GiB
    target = torch.empty_like(source)
    # As a kernel: inside a graph copy_ becomes a memcpy node, which was seen at two thirds of a kernel's rate.
    copy = time_us(partial(torch.neg, out=target), [source] * 4, 5)
    read = time_us(torch.sum, [source] * 4, 5)
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    product = time_us(a.matmul, [b] * 8, 5)
    nbytes = source.numel() * 4
    return Limits(nbytes / read / 1e3, 2 * nbytes / copy / 1e3, 2 * 8192**3 / product / 1e6)


# ---- linear ------------------------------------------------------------------------------------------------------

# (K, N) of Llama-3-8B and Llama-3.2-1B: q/k/v, o, gate/up, down, head.
GEMV_SHAPES = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096, 128256)]
GEMV_SHAPES += [(2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048)]


def random_quantized(n: int, k: int, bits: int, group: int) -> QuantizedWeight:
    groups = 1 if group == -1 else k // group
    words = torch.randint(-(1 << 31), 1 << 31, (n, k * bits // 32), dtype=torch.int64, device=DEVICE).int()
    zero = torch.randint(-(1 << 31), 1 << 31, (-(-n * bits // 32), groups), dtype=torch.int64, device=DEVICE).int()
    scale = (torch.rand(n, groups, device=DEVICE) * 0.01).bfloat16()
    return QuantizedWeight(words, scale, zero, bits, group, (n, k))  # type: ignore[arg-type]


def linear_baselines(n: int, k: int, rows: tuple[int, ...]) -> dict[int, tuple[str, float]]:
    """F.linear in bf16 per row count."""
    dense = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies(2 * n * k))]
    inputs = {m: torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16) for m in rows}
    return {m: ("F.linear bf16", time_us(partial(torch.nn.functional.linear, x), dense)) for m, x in inputs.items()}


def int4pack_baselines(n: int, k: int, rows: tuple[int, ...]) -> dict[int, tuple[str, float]]:
    """torch's own int4 kernel in groups of 128, per row count."""
    packs = []
    for _ in range(copies(n * k // 2)):
        nibbles = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
        packs.append(torch.ops.aten._convert_weight_to_int4pack(nibbles, 8))
    scales = torch.rand(k // 128, n, 2, device=DEVICE).bfloat16()

    def product(x: Tensor, pack: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, pack, 128, scales)

    inputs = {m: torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16) for m in rows}
    return {m: ("_weight_int4pack_mm", time_us(partial(product, x), packs)) for m, x in inputs.items()}


def linear_rows(
    limits: Limits,
    n: int,
    k: int,
    scheme: tuple[int, int],
    baselines: dict[int, tuple[str, float]],
    dtype: torch.dtype = torch.bfloat16,
) -> Iterator[Row]:
    """One weight of `scheme` (bits, group size) at the row counts of `baselines`."""
    bits, group = scheme
    weights = []
    for _ in range(copies(n * k * bits // 8)):
        dense = bits == 16
        part = torch.randn(n, k, device=DEVICE).bfloat16() if dense else random_quantized(n, k, bits, group)
        weights.append(ops.pack_linear([part], DEVICE))
    for m, (baseline, baseline_time) in baselines.items():
        x = torch.randn(m, k, device=DEVICE).to(dtype)
        out = torch.empty(m, n, device=DEVICE, dtype=dtype)
        time = time_us(partial(ops.linear, x, bias=None, activation_bits=24, out=out), weights)
        moved, flops = weights[0].nbytes + x.nbytes + out.nbytes, 2 * m * n * k
        gb_s, tflop_s = moved / time / 1e3, flops / time / 1e6
        percent = 100 * max(gb_s / limits.read_gb_s, tflop_s / limits.bf16_tflop_s)
        name = "bf16" if bits == 16 else f"int{bits} {'per-row' if group == -1 else f'g{group}'}"
        kind = f"{name} x {'bf16' if dtype == torch.bfloat16 else 'fp32'}"
        yield Row("linear", f"M={m} {k}x{n}", kind, time, gb_s, tflop_s, percent, baseline, baseline_time)


def bench_linear(limits: Limits, quick: bool) -> Iterator[Row]:
    for k, n in GEMV_SHAPES:
        rows = (1,) if quick or n > 100_000 else (1, 4, 8, 16, 2048)
        baselines = linear_baselines(n, k, rows)
        yield from linear_rows(limits, n, k, (4, -1), baselines)
        yield from linear_rows(limits, n, k, (8, -1), baselines)
        yield from linear_rows(limits, n, k, (16, -1), {m: b for m, b in baselines.items() if m == 1})
        yield from linear_rows(limits, n, k, (4, 128), int4pack_baselines(n, k, (1,) if quick else (1, 16)))
        torch.cuda.empty_cache()
    if not quick:
        yield from linear_rows(limits, 4096, 4096, (4, -1), linear_baselines(4096, 4096, (1, 16)), torch.float32)


BENCHMARKS: dict[str, Callable[[Limits, bool], Iterator[Row]]] = {"linear": bench_linear}


def main() -> None:
    from bench_rows import BENCHMARKS as OTHER_OPS  # it imports this file's helpers

    BENCHMARKS.update(OTHER_OPS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=",".join(BENCHMARKS), help="comma-separated: " + ", ".join(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="fewer row counts")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--tree", help="what the record is of (git tree hashes)")
    arguments = parser.parse_args()
    cuda.require()
    torch.manual_seed(0)
    limits = measure_limits()
    print(
        f"{torch.cuda.get_device_name()}: read {limits.read_gb_s:.0f} GB/s, copy {limits.copy_gb_s:.0f} GB/s, ", end=""
    )
    print(f"bf16 matmul {limits.bf16_tflop_s:.0f} TFLOP/s")
    rows = [
        Row("device", "read 2 GiB", "fp32", 2**31 / limits.read_gb_s / 1e3, limits.read_gb_s),
        Row("device", "copy 2 GiB", "fp32", 2**32 / limits.copy_gb_s / 1e3, limits.copy_gb_s),
        Row("device", "matmul 8192^3", "bf16", 2 * 8192**3 / limits.bf16_tflop_s / 1e6, None, limits.bf16_tflop_s),
    ]
    for name in arguments.ops.split(","):
        for row in BENCHMARKS[name](limits, arguments.quick):
            rows.append(row)
            rate = f"{row.gb_s or 0:6.0f} GB/s {row.tflop_s or 0:6.1f} TF/s {row.percent_of_peak or 0:5.1f}%"
            versus = f"{row.baseline} {row.baseline_time_us:.1f}" if row.baseline_time_us else ""
            print(f"{row.op:8} {row.shape:22} {row.dtype:22} {row.time_us:8.1f} us {rate}  {versus}", flush=True)
    if arguments.json:
        for row in rows:
            row.tree = arguments.tree
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
