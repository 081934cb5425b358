"""How much each format and method loses: perplexity and KL divergence on held-out text, and llama.cpp's formats beside.

    python scripts/bench_quality.py --data ../shared/data --json benchmarks/quality.json [--peer-site SITE]
    python scripts/bench_quality.py --data ../shared/data --checkpoint demo --only 'int4 per-row'

Text: the last 5 % of the stories, which no checkpoint was fitted to by this project except to choose between recipes of
the demo model. Each story is read by itself after BOS in windows of 512 positions. KL divergence is of the next-token
distributions from those of the source, which runs with fp32 activations. NibbleLM runs with dtype fp32 (24-bit inputs
of quantized layers), so that its figures are of the weights alone; llama.cpp computes as it always does on a CPU, with
activations rounded to 8 bits in blocks of 32, but with an fp32 cache. SITE is a folder made by

    CMAKE_ARGS=-DGGML_NATIVE=ON pip install --target SITE llama-cpp-python gguf

without which llama.cpp is left out.

bits_per_weight counts every tensor of the file, the embedding table and the head too: NibbleLM keeps the table in
16 bits and writes an int8 head; llama.cpp quantizes one table for both. linear_bits_per_weight counts the
matrices of the layers alone.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from demo_model.corpus import STORIES, read_stories
from torch import Tensor

from nibblelm import LLM, convert
from nibblelm.evaluation import score, windows

ROOT = Path(__file__).resolve().parent.parent
CTX = 512
FORMATS = {
    "int8 per-row": dict(bits=8, group_size=-1),
    "int4 per-row": dict(bits=4, group_size=-1),
    "int4 g128": dict(bits=4, group_size=128),
    "int4 g32": dict(bits=4, group_size=32),
}
METHODS = {
    "minmax": dict(method="minmax"),
    "mse": dict(method="mse"),
    "awq": dict(method="awq"),
    "gptq": dict(method="gptq"),
    "rotate mse": dict(method="mse", rotate=True),
    "rotate gptq": dict(method="gptq", rotate=True),
}
INT8_METHODS = ("minmax", "mse", "gptq")
GGUF = ("q8_0", "q4_k_m", "q4_1", "q4_0")


def checkpoints(data: Path) -> dict[str, Path]:
    return {
        "demo": ROOT / "demo" / "stories-7m",
        "stories260K": data / "checkpoints" / "stories260K",
        "tinystories656K": data / "checkpoints" / "tinystories656K_bf16",
    }


class LlamaCpp:
    """llama_decode of one window from an empty cache, with the logits of every position."""

    def __init__(self, path: Path) -> None:
        from cpu_peer_engines import quiet_llama_cpp

        self._lib = lib = quiet_llama_cpp()
        self._model = lib.llama_model_load_from_file(bytes(path), lib.llama_model_default_params())
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CTX, CTX, CTX
        params.type_k = params.type_v = 0  # fp32
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._model or not self._context:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._batch = lib.llama_batch_init(CTX, 0, 1)

    def logits(self, ids: Sequence[int]) -> Tensor:
        lib, batch = self._lib, self._batch
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        if status := lib.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with {status}")
        size = len(ids) * self._vocab
        values = (ctypes.c_float * size).from_address(ctypes.addressof(lib.llama_get_logits(self._context).contents))
        return torch.frombuffer(bytearray(values), dtype=torch.float32).view(len(ids), self._vocab)


def gguf_bits(path: Path) -> tuple[float, float]:
    """Bits per weight of all tensors of a file, and of the matrices of its layers."""
    import gguf  # type: ignore[import-not-found]

    found = [(t.name, int(t.n_bytes), int(t.n_elements), len(t.shape)) for t in gguf.GGUFReader(path).tensors]
    layers = [(size, count) for name, size, count, rank in found if name.startswith("blk.") and rank == 2]
    whole = [(size, count) for _, size, count, _ in found]
    return tuple(8 * sum(s for s, _ in part) / sum(c for _, c in part) for part in (whole, layers))  # type: ignore[return-value]


def nibblelm_rows(source: Path, work: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[dict[str, Any], Any]]:
    for name, form in FORMATS.items():
        for method, options in METHODS.items():
            if (name == "int8 per-row" and method not in INT8_METHODS) or not wanted(name):
                continue
            report = convert(source, work / "folder", overwrite=True, **form, **options)
            linear = [t for t in report.tensors if ".layers." in t.module]
            stored = sum(t.parameters * (t.bits + _overhead(t, source)) for t in linear)
            row = {"tool": "nibblelm", "format": name, "method": method, "bits_per_weight": report.bits_per_weight}
            row["linear_bits_per_weight"] = stored / sum(t.parameters for t in linear)
            yield row, LLM(work / "folder", "cpu", "fp32", max_context=CTX).logits


def _overhead(tensor: Any, source: Path) -> float:
    """Bits of scale and zero-point per weight; the columns of a matrix are found from the source's shapes."""
    from nibblelm.checkpoint import open_checkpoint

    info = open_checkpoint(source).info(f"{tensor.module}.weight")
    width = info.shape[1] if tensor.group_size == -1 else tensor.group_size
    return (8 * info.dtype.itemsize + (0 if tensor.symmetric else tensor.bits)) / width


def gguf_rows(source: Path, work: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[dict[str, Any], Any]]:
    from cpu_peer_engines import make_gguf

    names = tuple(name for name in GGUF if wanted(name.upper()))
    make_gguf(source, work, names)
    for name in names:
        whole, layers = gguf_bits(work / f"{name}.gguf")
        row = {"tool": "llama.cpp", "format": name.upper(), "method": "default", "bits_per_weight": whole}
        yield row | {"linear_bits_per_weight": layers}, LlamaCpp(work / f"{name}.gguf").logits


def measure(name: str, source: Path, args: argparse.Namespace, commit: str) -> Iterator[dict[str, Any]]:
    """One row per format and method, the source's own first."""
    llm = LLM(source, "cpu", "fp32", max_context=CTX)
    assert llm.tokenizer is not None
    stories = read_stories(args.data / "text" / STORIES)[1][: args.stories]
    documents = [llm.tokenizer.encode(story, add_special_tokens=False) for story in stories]
    parts = windows(llm.tokenizer.opening, documents, CTX, None)
    kept = {tuple(part.ids): llm.logits(part.ids) for part in parts}  # at most 0.5 GB for the demo's vocabulary
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        rows = []
        if args.tool in (None, "nibblelm"):
            rows.append(nibblelm_rows(source, Path(folder), lambda form: args.only in (None, form)))
        if args.tool in (None, "llama.cpp") and args.peer_site is not None:
            rows.append(gguf_rows(source, Path(folder), lambda form: args.only in (None, form)))
        for row, logits in (pair for some in rows for pair in some):
            figures = score(parts, logits, lambda ids: kept[tuple(ids)])
            yield {
                "checkpoint": name,
                **row,
                **{key: figures[key] for key in ("ppl", "ppl_stderr", "kl_mean", "kl_p99", "top1_agreement")},
                "source_ppl": figures["against_ppl"],
                "tokens": figures["tokens"],
                "commit": commit,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of checkpoints and text")
    parser.add_argument("--peer-site", type=Path, help="folder with llama_cpp and gguf")
    parser.add_argument("--checkpoint", action="append", help="demo, stories260K, tinystories656K (default: all)")
    parser.add_argument("--only", metavar="FORMAT", help="one format, as 'int4 per-row' or Q4_0")
    parser.add_argument("--stories", type=int, help="how many of the held-out stories (default: all)")
    parser.add_argument("--work", type=Path, help="where temporary folders go")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--tool", choices=("nibblelm", "llama.cpp"), help="one of the two")
    parser.add_argument("--threads", type=int, help="threads of torch, which calibrates (default: its own choice)")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.peer_site is not None:
        sys.path.append(str(args.peer_site))
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    results = []
    for name, source in checkpoints(args.data).items():
        if args.checkpoint and name not in args.checkpoint:
            continue
        for row in measure(name, source, args, head.stdout.strip()):
            results.append(row)
            print(
                f"{name:<16} {row['tool']:<10} {row['format']:<13} {row['method']:<12} {row['bits_per_weight']:5.2f} "
                f"({row['linear_bits_per_weight']:.2f}) bits  perplexity {row['ppl']:.4f} ± {row['ppl_stderr']:.4f}  "
                f"KL {row['kl_mean']:.6f}  99 % {row['kl_p99']:.5f}  same first {100 * row['top1_agreement']:.2f} %",
                flush=True,
            )
            if args.json is not None:
                args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
