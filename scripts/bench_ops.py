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
from nibblelm.ops.types import ActivationBits, PackedLinear, QuantizedWeight

DEVICE = torch.device("cuda")
ROTATE_BYTES = 512 << 20


@dataclass
class Row:
    """One measurement; `gb_s` counts the fewest bytes the op must move, `percent_of_peak` is of the nearer limit.

    Linear has a second baseline in fp8.
    """

    op: str
    shape: str
    dtype: str
    time_us: float
    gb_s: float | None = None
    tflop_s: float | None = None
    percent_of_peak: float | None = None
    baseline: str | None = None
    baseline_time_us: float | None = None
    fp8_baseline: str | None = None
    fp8_time_us: float | None = None
    tree: str | None = None


@dataclass
class Limits:
    """This device's own rates, measured at the start of the run."""

    read_gb_s: float
    copy_gb_s: float
    bf16_tflop_s: float
    fp8_tflop_s: float


def time_us(
    call: Callable[[Any], object], buffers: Sequence[Any], replays: int = 20, programmatic: bool = True, calls: int = 20
) -> float:
    """Median microseconds of one `call(buffer)`: a graph over all buffers (repeated to at least `calls`), replayed."""
    repeated = list(buffers) * max(1, -(-calls // len(buffers)))
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
    fp8 = time_us(fp8_product(8192, 8192), [random_fp8(8192, 8192).t()] * 8, 5)
    nbytes, flops = source.numel() * 4, 2 * 8192**3
    return Limits(nbytes / read / 1e3, 2 * nbytes / copy / 1e3, flops / product / 1e6, flops / fp8 / 1e6)


def random_fp8(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16).to(torch.float8_e4m3fn)


def fp8_product(m: int, k: int) -> Callable[[Tensor], Tensor]:
    """What multiplies (m, k), already in fp8, by a column-major (k, N) in fp8, with one scale each; m and N in 16s."""
    one = torch.ones((), device=DEVICE)
    options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16, "use_fast_accum": True}
    return partial(torch.ops.aten._scaled_mm, random_fp8(m, k), **options)


# ---- linear ------------------------------------------------------------------------------------------------------

# (K, N) of Llama-3-8B: q/k/v, o, gate/up, down; then its head and Llama-3.2-1B, which have M = 1 only.
SHAPES = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)]
DECODE_SHAPES = [(4096, 128256), (2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048)]
QUICK_SHAPES = SHAPES[2:]  # the others have M = 1 only
ROWS = (1, 4, 8, 16, 17, 32, 64, 128, 256, 512, 2048, 8192)
LARGE_ROWS = 2048  # from here on one call is long enough to be timed in graphs of few

Scheme = tuple[int, int, ActivationBits]
"""Bits, group size, activation bits."""
# The row counts of --quick.
SCHEMES: dict[Scheme, tuple[int, ...]] = {
    (4, -1, 16): ROWS,
    (4, -1, 8): ROWS,
    (8, -1, 16): (1, 64, 128, 256, 2048),
    (8, -1, 8): (1, 64, 128, 256, 2048),
    (16, -1, 16): (1, 17, 128, 2048),
    (4, 128, 16): (1, 64, 128, 256, 2048),
}

Beside = tuple[str, float, str, float]
"""A row's two baselines, each with its microseconds; the second is fp8."""


def random_quantized(n: int, k: int, bits: int, group: int) -> QuantizedWeight:
    groups = 1 if group == -1 else k // group
    words = torch.randint(-(1 << 31), 1 << 31, (n, k * bits // 32), dtype=torch.int64, device=DEVICE).int()
    zero = torch.randint(-(1 << 31), 1 << 31, (-(-n * bits // 32), groups), dtype=torch.int64, device=DEVICE).int()
    scale = (torch.rand(n, groups, device=DEVICE) * 0.01).bfloat16()
    return QuantizedWeight(words, scale, zero, bits, group, (n, k))  # type: ignore[arg-type]


def linear_time_us(call: Callable[[Any], object], buffers: Sequence[Any], m: int) -> float:
    """`time_us` of a product of `m` rows: every weight once, five times over, where one call is long."""
    return time_us(call, buffers, 5, calls=1) if m >= LARGE_ROWS else time_us(call, buffers)


def linear_baselines(n: int, k: int, rows: Sequence[int]) -> dict[int, Beside]:
    """F.linear in bf16 and a product in fp8 per row count; the latter takes rows in 16s, and its name says how many."""
    dense = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies(2 * n * k))]
    full = {}
    for m in rows:
        x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
        full[m] = linear_time_us(partial(torch.nn.functional.linear, x), dense, m)
    del dense
    columns = [random_fp8(n, k).t() for _ in range(copies(n * k))]
    padded = {m: -(-m // 16) * 16 for m in rows}
    fp8 = {m: linear_time_us(fp8_product(m, k), columns, m) for m in sorted(set(padded.values()))}
    names = {m: "_scaled_mm e4m3" + (f" M={padded[m]}" if padded[m] != m else "") for m in rows}
    return {m: ("F.linear bf16", full[m], names[m], fp8[padded[m]]) for m in rows}


def int4pack_times(n: int, k: int, rows: Sequence[int]) -> dict[int, float]:
    """Microseconds of torch's own int4 kernel in groups of 128, per row count."""
    packs = []
    for _ in range(copies(n * k // 2)):
        nibbles = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=DEVICE)
        packs.append(torch.ops.aten._convert_weight_to_int4pack(nibbles, 8))
    scales = torch.rand(k // 128, n, 2, device=DEVICE).bfloat16()

    def product(x: Tensor, pack: Tensor) -> Tensor:
        return torch.ops.aten._weight_int4pack_mm(x, pack, 128, scales)

    inputs = {m: torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16) for m in rows}
    return {m: time_us(partial(product, x), packs) for m, x in inputs.items()}


def packed_weights(n: int, k: int, bits: int, group: int) -> list[PackedLinear]:
    """As many as a benchmark rotates over."""
    weights = []
    for _ in range(copies(n * k * bits // 8)):
        dense = bits == 16
        part = torch.randn(n, k, device=DEVICE).bfloat16() if dense else random_quantized(n, k, bits, group)
        weights.append(ops.pack_linear([part], DEVICE))
    return weights


def linear_row(
    limits: Limits, weights: Sequence[PackedLinear], m: int, activation_bits: ActivationBits, beside: Beside
) -> Row:
    """`m` rows of fp32 for activations of 24 bits, else of bf16."""
    (n, k), bits, group = weights[0].shape, weights[0].bits, weights[0].group_size
    dtype = torch.float32 if activation_bits == 24 else torch.bfloat16
    x = torch.randn(m, k, device=DEVICE).to(dtype)
    out = torch.empty(m, n, device=DEVICE, dtype=dtype)
    call = partial(ops.linear, x, bias=None, activation_bits=activation_bits, out=out)
    time = linear_time_us(call, weights, m)
    gb_s, tflop_s = (weights[0].nbytes + x.nbytes + out.nbytes) / time / 1e3, 2 * m * n * k / time / 1e6
    # Tensor cores multiply int8 at the rate of fp8, and so two digits of 16 bits at that of bf16.
    fastest = limits.fp8_tflop_s if activation_bits == 8 else limits.bf16_tflop_s
    percent = 100 * max(gb_s / limits.read_gb_s, tflop_s / fastest)
    name = "bf16" if bits == 16 else f"int{bits} {'per-row' if group == -1 else f'g{group}'}"
    activations = {8: "8-bit", 16: "bf16", 24: "fp32"}[activation_bits]
    return Row("linear", f"M={m} {k}x{n}", f"{name} x {activations}", time, gb_s, tflop_s, percent, *beside)


def linear_cases(shape: tuple[int, int], quick: bool) -> dict[Scheme, tuple[int, ...]]:
    """The row counts of each scheme at a shape (K, N)."""
    if shape in DECODE_SHAPES or (quick and shape not in QUICK_SHAPES):
        return {scheme: (1,) for scheme in SCHEMES if scheme[2] == 16}
    return SCHEMES if quick else dict.fromkeys(SCHEMES, ROWS)


def bench_linear(limits: Limits, quick: bool) -> Iterator[Row]:
    for shape in SHAPES + DECODE_SHAPES:
        k, n = shape
        cases = linear_cases(shape, quick)
        baselines = linear_baselines(n, k, sorted({m for rows in cases.values() for m in rows}))
        few = int4pack_times(n, k, [m for m in cases[4, 128, 16] if m <= 16])  # beyond, bf16 is the one to beat
        kind, weights = (0, 0), []
        for (bits, group, activation_bits), rows in cases.items():
            if kind != (bits, group):
                kind, weights = (bits, group), packed_weights(n, k, bits, group)
            for m in rows:
                beside = baselines[m]
                if kind == (4, 128) and m in few:
                    beside = ("_weight_int4pack_mm", few[m], *beside[2:])
                yield linear_row(limits, weights, m, activation_bits, beside)
        del weights
        torch.cuda.empty_cache()
    if not quick:
        weights = packed_weights(4096, 4096, 4, -1)
        for m, beside in linear_baselines(4096, 4096, (1, 16)).items():
            yield linear_row(limits, weights, m, 24, beside)


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
    print(f"matmul bf16 {limits.bf16_tflop_s:.0f}, fp8 {limits.fp8_tflop_s:.0f} TFLOP/s")
    rows = [
        Row("device", "read 2 GiB", "fp32", 2**31 / limits.read_gb_s / 1e3, limits.read_gb_s),
        Row("device", "copy 2 GiB", "fp32", 2**32 / limits.copy_gb_s / 1e3, limits.copy_gb_s),
        Row("device", "matmul 8192^3", "bf16", 2 * 8192**3 / limits.bf16_tflop_s / 1e6, None, limits.bf16_tflop_s),
        Row("device", "matmul 8192^3 fp8", "fp8", 2 * 8192**3 / limits.fp8_tflop_s / 1e6, None, limits.fp8_tflop_s),
    ]
    for name in arguments.ops.split(","):
        for row in BENCHMARKS[name](limits, arguments.quick):
            rows.append(row)
            rate = f"{row.gb_s or 0:6.0f} GB/s {row.tflop_s or 0:6.1f} TF/s {row.percent_of_peak or 0:5.1f}%"
            beside = ((row.baseline, row.baseline_time_us), (row.fp8_baseline, row.fp8_time_us))
            versus = ", ".join(f"{baseline} {time:.1f}" for baseline, time in beside if time)
            print(f"{row.op:14} {row.shape:22} {row.dtype:22} {row.time_us:8.1f} us {rate}  {versus}", flush=True)
    if arguments.json:
        for row in rows:
            row.tree = arguments.tree
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
