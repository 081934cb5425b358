"""Decode on the CPU of each family at 1B, beside llama's at equal bytes, in turns.

    python scripts/bench_cpu_families.py [--shape gemma2-9b ...] [--rounds 5] [--json benchmarks/cpu/families.json]

Every shape of `bench --shape` with the width of a 1B model: its head size and ratios kept, 32,000 words, as many layers
as come nearest to TinyLlama's weights; random int4, one scale per row. A rate is the bytes of matrices that a token
reads times tokens per second, so that a little more or less does not count; a ratio to llama's is taken within a round,
of which every second one runs backwards. Median, least and most over the rounds are recorded.
"""

import argparse
import statistics
from math import prod
from pathlib import Path
from typing import Any

import torch
from bench_cpu_peers import commit
from rows import Rows

from nibblelm import ops
from nibblelm.arguments import numeric_types
from nibblelm.benchmark import Load, measure
from nibblelm.models import family, tensor_plan
from nibblelm.random_weights import RandomWeights
from nibblelm.runner import Runner
from nibblelm.shapes import SHAPES

LLAMA = "tinyllama-1.1b"
SIZES = {  # hidden size, heads, heads of keys and values
    "qwen3-8b": (2048, 16, 4),
    "mistral-7b": (2048, 16, 4),
    "glm4-9b": (2048, 16, 1),
    "gemma2-9b": (2048, 8, 4),
    "gemma3-12b": (2048, 8, 4),
    "phi3-mini": (2304, 24, 24),
    "gpt-neox-6.9b": (2048, 16, 16),
    "falcon-7b": (2048, 32, 1),
    "bloom-7b": (2048, 16, 16),
    "stablelm-12b": (1920, 12, 3),
    "cohere-35b": (2048, 16, 16),
}
CPU = torch.device("cpu")


def matrices(raw: dict[str, Any]) -> int:
    """Weights of the matrices that a token reads."""
    return sum(prod(spec.shape) for spec in tensor_plan(raw) if spec.kind in ("linear", "head"))


def smaller(name: str) -> dict[str, Any]:
    """The config of a shape at 1B."""
    (hidden, heads, kv_heads), raw = SIZES[name], dict(SHAPES[name])
    sizes = {"num_attention_heads": heads, "n_head": heads, "num_key_value_heads": kv_heads}
    if "intermediate_size" in raw:
        sizes["intermediate_size"] = raw["intermediate_size"] * hidden // raw["hidden_size"] // 64 * 64
    raw |= {key: value for key, value in sizes.items() if key in raw} | {"hidden_size": hidden, "vocab_size": 32000}
    layers = "n_layer" if "n_layer" in raw else "num_hidden_layers"
    one, two = (matrices(raw | {layers: count}) for count in (1, 2))
    return raw | {layers: 1 + round((matrices(SHAPES[LLAMA]) - one) / (two - one))}


class Model:
    """Random weights of a config, ready to decode."""

    def __init__(self, raw: dict[str, Any], load: Load) -> None:
        dtype, kv_dtype, bits = numeric_types("auto", CPU)
        weights, module = RandomWeights(CPU, dtype, bits, 4, -1), family(raw)
        model = module.Model(weights, module.read_config(raw), load.context)
        self._runner, self._load = Runner(model, CPU, kv_dtype, load.context), load
        self.bytes = weights.streamed_bytes

    def rate(self, seconds: float) -> float:
        """GB/s of matrices while decoding."""
        self._runner = self._runner.with_capacity(self._load.context)
        speed = measure(self._runner, self._load, repeats=1, seconds=seconds, warmup=0.2)
        return self.bytes * speed.decode_tok_s[0] / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=tuple(SIZES), default=list(SIZES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement (3)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    ops.set_threads(args.threads)
    rows, load = Rows(args.json, ("shape", "threads"), threads=args.threads, commit=commit()), Load(16, 64)
    llama = Model(SHAPES[LLAMA], load)
    for name in args.shape:
        models = [llama, Model(smaller(name), load)]
        pairs = []
        for i in range(args.rounds + 1):  # the first does not count
            order = models[:: -1 if i % 2 else 1]
            rates = {id(model): model.rate(args.seconds if i else 0.1) for model in order}
            pairs.append([rates[id(model)] for model in models])
        ratios = [other / own for own, other in pairs[1:]]
        spread = {"ratio_median": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
        ours, theirs = (statistics.median(rates) for rates in zip(*pairs[1:], strict=True))
        rows.add(shape=name, bytes=models[1].bytes, gb_s=theirs, llama_bytes=llama.bytes, llama_gb_s=ours, **spread)


if __name__ == "__main__":
    main()
