"""ChatGLM-6B's prompts, whose tokens see each other, through the engine: neither cut nor shared."""

import json
import sys
from pathlib import Path

import pytest
import torch

from nibblelm import LLM
from nibblelm.errors import RequestError
from nibblelm.models import family

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from oracle import load_reference, relative_error, save_random

BEGIN, GMASK, MASK = 5, 6, 7


def prompt(length: int, mask_at: int, begin_at: int, mask: int = GMASK) -> list[int]:
    ids = torch.randint(8, 331, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    ids[mask_at], ids[begin_at] = mask, BEGIN
    return ids


PROMPTS = [prompt(200, 80, 150), prompt(200, 80, 199), prompt(70, 68, 69), prompt(300, 3, 280, MASK), prompt(9, 0, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_random("chatglm_6b", tmp_path_factory.mktemp("gap") / "m")
    config = json.loads((folder / "config.json").read_text())
    config |= dict(bos_token_id=BEGIN, gmask_token_id=GMASK, mask_token_id=MASK)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_answers_are_the_reference_s(folder: Path) -> None:
    """Together, twice over, and in steps that would cut a prompt: greedy answers of the reference, token by token."""
    reference = load_reference(folder)
    options = dict(temperature=0, max_tokens=12, ignore_eos=True)
    llm = LLM(folder, device="cpu", dtype="fp32")
    llm.engine._core._scheduler._budget = (64, 32)
    for _ in range(2):
        for ids, output in zip(PROMPTS, llm.generate(PROMPTS, **options), strict=True):
            whole = torch.tensor([ids + output.token_ids])
            with torch.inference_mode():
                logits = reference(whole).logits[0]
            assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == output.token_ids
    for ids in PROMPTS:
        with torch.inference_mode():
            want = reference(torch.tensor([ids])).logits[0]
        assert relative_error(llm.logits(ids), want).max() <= 2e-4


def test_a_prompt_without_a_gap_is_refused(folder: Path) -> None:
    llm = LLM(folder, device="cpu")
    for ids in ([1, 2, 3], [GMASK, 2, 3], [1, BEGIN]):
        with pytest.raises(RequestError, match=r"no gap to fill: this model needs the token 5 .* \[6, 7\]"):
            llm.generate([ids], max_tokens=2)


def test_both_families_have_one_model_type() -> None:
    assert family({"model_type": "chatglm"}).__name__.endswith(".chatglm")
    assert family({"model_type": "chatglm", "position_encoding_2d": True}).__name__.endswith(".chatglm_6b")
