"""Quality on real weights and text: stories260K by the protocol of the data folder's README, run by transformers."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from nibblelm import convert
from nibblelm.checkpoint import open_checkpoint
from nibblelm.ops.reference import dequantize

ROUND_TO_NEAREST = {"int8": 3.656, "int4": 4.325, "int4-32": 4.282}
FULL = 3.655


@pytest.fixture(scope="module")
def stories(data_dir):
    text = (data_dir / "text" / "tinystories_sample_2MiB.txt").read_text()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(data_dir / "checkpoints" / "stories260K" / "tokenizer.json"))
    parts = [part.strip() for part in text.split("<|endoftext|>")]
    bos = 1
    return [torch.tensor([[bos, *tokenizer.encode(part, add_special_tokens=False)][:512]]) for part in parts if part][
        :60
    ]


def perplexity(source: Path, folder: Path | None, stories) -> float:
    """exp of the mean negative log-likelihood per predicted token, with the weights of `folder` unpacked."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    total = count = 0.0
    with torch.no_grad():
        if folder is not None:
            checkpoint = open_checkpoint(folder)
            for module in checkpoint.modules_quantized:
                model.get_submodule(module).weight.copy_(dequantize(checkpoint.weight(module)))
        for ids in stories:
            logits = model(ids).logits[0, :-1]
            total += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            count += ids.shape[1] - 1
    return math.exp(total / count)


def test_perplexity_beats_round_to_nearest(data_dir, stories, tmp_path):
    source = data_dir / "checkpoints" / "stories260K"
    # the golden figures are given to three decimals
    assert perplexity(source, None, stories) == pytest.approx(FULL, abs=0.002)
    found = {}
    for name, options in {
        "int8": dict(bits=8),
        "int4": dict(bits=4, group_size=-1),
        "int4-32": dict(bits=4, group_size=32),
    }.items():
        convert(source, tmp_path / name, keep_tied=True, **options)
        found[name] = perplexity(source, tmp_path / name, stories)
    print(found)
    assert found["int4"] < ROUND_TO_NEAREST["int4"]
    assert found["int4-32"] < ROUND_TO_NEAREST["int4-32"]
    assert found["int8"] <= ROUND_TO_NEAREST["int8"] + 0.002
