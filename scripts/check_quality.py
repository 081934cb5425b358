"""Recompute the rows of benchmarks/quality.json on which its floors stand, over transformers' logits.

    python scripts/check_quality.py --data ../shared/data

Of NibbleLM nothing but `convert` is used: the weights are unpacked by the compressed-tensors library, the models run in
transformers in fp32, tokens are those of transformers' tokenizer, and windows and divergence are computed here, by the
protocol that benchmarks/quality.json was made by. Fails where a mean KL divergence or a perplexity differs from the
record by more than 1 %. llama.cpp's rows are not recomputed: it rounds activations, which transformers does not.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from demo_model.corpus import STORIES, read_stories
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from nibblelm import convert

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "models"))
from oracle import load_reference  # type: ignore[import-not-found]  # noqa: E402

CTX = 512
TOLERANCE = 0.01
FORMATS = {"int8 per-row": (8, -1), "int4 per-row": (4, -1), "int4 g32": (4, 32)}


def floor_rows(record: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the demo model: the best method of each format that has a floor, and the rounding it is compared with."""
    ours = [row for row in record if row["checkpoint"] == "demo" and row["tool"] == "nibblelm"]
    best = [min((r for r in ours if r["format"] == name), key=lambda r: r["kl_mean"]) for name in FORMATS]
    return best + [r for r in ours if (r["format"], r["method"]) == ("int4 per-row", "minmax")]


@torch.inference_mode()
def log_probabilities(model: PreTrainedModel, window: list[int]) -> Tensor:
    """(len(window) - 1, vocab): before each token but the first."""
    return model(torch.tensor([window])).logits[0, :-1].double().log_softmax(-1)


def figures(model: PreTrainedModel, source: PreTrainedModel, windows: list[list[int]]) -> tuple[float, float, int]:
    """Mean KL divergence from the source, perplexity, and the number of tokens."""
    divergence = loss = 0.0
    tokens = 0
    for window in windows:
        p, q = log_probabilities(source, window), log_probabilities(model, window)
        divergence += float((p.exp() * (p - q)).sum())
        loss -= float(q.gather(1, torch.tensor(window[1:]).unsqueeze(1)).sum())
        tokens += len(window) - 1
    return divergence / tokens, float(torch.tensor(loss / tokens).exp()), tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of checkpoints and text")
    parser.add_argument("--record", type=Path, default=ROOT / "benchmarks" / "quality.json")
    args = parser.parse_args()
    folder = ROOT / "demo" / "stories-7m"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    windows: list[list[int]] = []
    for story in read_stories(args.data / "text" / STORIES)[1]:
        ids = tokenizer(story, add_special_tokens=False).input_ids
        windows += [[tokenizer.bos_token_id, *ids[at : at + CTX - 1]] for at in range(0, len(ids), CTX - 1)]
    source, wrong = load_reference(folder), 0
    for row in floor_rows(json.loads(args.record.read_text())):
        rotate, method = row["method"].startswith("rotate "), row["method"].removeprefix("rotate ")
        bits, group = FORMATS[row["format"]]
        with tempfile.TemporaryDirectory() as work:
            converted = Path(work) / "model"
            convert(folder, converted, bits=bits, group_size=group, method=method, rotate=rotate)  # type: ignore[arg-type]
            kl, perplexity, tokens = figures(load_reference(folder, converted), source, windows)
        off = [kl / row["kl_mean"] - 1, perplexity / row["ppl"] - 1]
        good = tokens == row["tokens"] and max(map(abs, off)) <= TOLERANCE
        wrong += not good
        print(
            f"{row['format']:<13} {row['method']:<12} KL {kl:.6f} ({off[0]:+.2%})  perplexity {perplexity:.4f} "
            f"({off[1]:+.2%})  {tokens} tokens: {'agrees' if good else 'DIFFERS'}",
            flush=True,
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
