"""Dynamic and longrope scaling choose by the length of a request's prompt, once, and share no pages across choices."""

import json
import sys
from pathlib import Path

import pytest
import torch

from nibblelm import LLM

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from oracle import load_reference, relative_error, save_random

IDS = torch.randint(0, 331, (150,), generator=torch.Generator().manual_seed(5)).tolist()


def with_original(folder: Path, name: str, positions: int) -> Path:
    """A checkpoint whose original context is that many positions."""
    save_random(name, folder)
    config = json.loads((folder / "config.json").read_text())
    if name.endswith("dynamic"):
        config["max_position_embeddings"] = positions
    else:
        config["rope_parameters"]["original_max_position_embeddings"] = positions
        config["rope_parameters"].pop("factor", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope"])
def test_requests_of_both_choices_share_a_batch_but_no_pages(name: str, tmp_path: Path) -> None:
    folder = with_original(tmp_path / "m", name, 100)
    prompts = [IDS[:90], IDS[:150], IDS[:100], IDS[:101], IDS[:70], IDS[:149]]
    options = dict(temperature=0, max_tokens=20, ignore_eos=True)
    alone = [LLM(folder, device="cpu", dtype="fp32").generate([ids], **options)[0].token_ids for ids in prompts]
    llm = LLM(folder, device="cpu", dtype="fp32")
    assert [output.token_ids for output in llm.generate(prompts, **options)] == alone
    assert [llm.generate([ids], **options)[0].token_ids for ids in prompts] == alone  # pages of all are there now
    choices = [llm.runner.root(ids) for ids in prompts]
    assert len(set(choices)) == (4 if name.endswith("dynamic") else 2)


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope"])
def test_the_choice_is_that_of_the_source(name: str, tmp_path: Path) -> None:
    """At both sides of the original context, and for a slot that another choice had before."""
    folder = with_original(tmp_path / "m", name, 100)
    llm = LLM(folder, device="cpu", dtype="fp32", max_sequences=1)
    for length in (100, 101, 150, 99, 120):
        with torch.inference_mode():
            want = load_reference(folder)(torch.tensor([IDS[:length]])).logits[0]
        assert relative_error(llm.logits(IDS[:length]), want).max() <= 2e-4, length
