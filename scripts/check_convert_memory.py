"""Convert a synthetic sharded checkpoint in a process of its own and measure its peak memory.

    python scripts/check_convert_memory.py --size 4GB --shards 4 --limit 1GB

Exits with 1 when the peak of anonymous memory (RssAnon: what cannot be dropped, unlike pages of mapped files) is over
the limit. `import torch` alone is part of it and is printed beside it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from nibblelm.checkpoint.writer import FolderWriter, OutputTensor, plan_files
from nibblelm.models import TensorSpec, tensor_plan
from nibblelm.sizes import parse_size

CONVERT = Path(__file__).with_name("convert.py")
HIDDEN, FFN, HEADS, KV_HEADS, VOCABULARY = 4096, 14336, 32, 8, 32000
SMALL_HIDDEN, SMALL_FFN, SMALL_HEADS, SMALL_KV_HEADS = 1024, 2816, 16, 4


def make_config(size: int) -> dict[str, object]:
    """A Llama with Llama-3-8B's layers (or smaller ones below 2 GB), as many as give about `size` bytes in bf16."""
    large = size >= 2 * 10**9
    hidden, ffn = (HIDDEN, FFN) if large else (SMALL_HIDDEN, SMALL_FFN)
    heads, kv_heads = (HEADS, KV_HEADS) if large else (SMALL_HEADS, SMALL_KV_HEADS)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    layer = 2 * (2 * hidden * hidden * (1 + kv_heads / heads) + 3 * hidden * ffn)
    layers = max(1, round((size - 4 * VOCABULARY * hidden) / layer))
    return {**config, "num_hidden_layers": layers}


def make_checkpoint(folder: Path, size: int, shards: int) -> int:
    """Write a Gaussian checkpoint in about `shards` files; returns its bytes."""
    config = make_config(size)
    (folder / "config.json").write_text(json.dumps(config))
    specs = tensor_plan(config)
    outputs = [[OutputTensor(spec.name, torch.bfloat16, spec.shape)] for spec in specs]
    total = sum(unit[0].nbytes for unit in outputs)
    largest = max(unit[0].nbytes for unit in outputs)
    generator = torch.Generator().manual_seed(0)
    pool = torch.empty(1 << 24).normal_(std=0.02, generator=generator).bfloat16()
    with FolderWriter(folder, plan_files(outputs, total // shards + largest // 2)) as writer:
        for spec in specs:
            _write_gaussian(writer, spec, pool, generator)
        writer.finish()
    return total


def _write_gaussian(writer: FolderWriter, spec: TensorSpec, pool: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a tensor from a pool of random numbers, each piece beginning somewhere else in it."""
    elements, position = torch.Size(spec.shape).numel(), 0
    while position < elements:
        start = int(torch.randint(0, len(pool) // 2, (1,), generator=generator))
        piece = pool[start : start + min(len(pool) // 2, elements - position)]
        writer.write(spec.name, 2 * position, piece)
        position += len(piece)


def memory_of(process: int) -> dict[str, int]:
    """Resident memory of a running process and its parts in bytes, {} once it is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return {
        key: int(fields[key].split()[0]) * 1024 for key in ("VmRSS", "RssAnon", "RssFile", "RssShmem") if key in fields
    }


def run_measured(command: list[str]) -> tuple[dict[str, int], float]:
    """Peak of each kind of memory over a command's life, and its seconds. Raises when it fails."""
    peaks: dict[str, int] = {}
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            for key, value in memory_of(process.pid).items():
                peaks[key] = max(peaks.get(key, 0), value)
            time.sleep(0.005)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}")
    return peaks, time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default="4GB")
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--limit", type=parse_size, default="1GB", help="of anonymous memory")
    parser.add_argument("--folder", type=Path, help="where to work (default: the system's temporary folder)")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="flags for nibblelm convert, after --")
    args = parser.parse_args()
    if not Path("/proc/self/status").exists():
        raise SystemExit("this needs /proc: run it on Linux")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        source, out = Path(name) / "source", Path(name) / "out"
        source.mkdir()
        total = make_checkpoint(source, args.size, args.shards)
        shards = len(list(source.glob("*.safetensors")))
        baseline, _ = run_measured([sys.executable, "-c", "import torch, time; time.sleep(0.2)"])
        command = [sys.executable, str(CONVERT), str(source), str(out), "--json", *args.flags]
        peaks, seconds = run_measured(command)
    print(
        f"{total / 1e9:.2f} GB in {shards} shards, {seconds:.1f} s ({total / 2 / seconds / 1e6:.0f} M weights/s with "
        f"start-up): peak anonymous {peaks['RssAnon'] / 1e6:.0f} MB, resident {peaks['VmRSS'] / 1e6:.0f} MB; "
        f"import torch alone {baseline['RssAnon'] / 1e6:.0f} MB and {baseline['VmRSS'] / 1e6:.0f} MB"
    )
    if peaks["RssAnon"] > args.limit:
        print(f"over the limit of {args.limit / 1e6:.0f} MB of anonymous memory", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
