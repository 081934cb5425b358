"""Converted folders of every family that transformers knows open there, and give the same logits; or convert says why
they do not."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from nibblelm import LLM, convert
from nibblelm.models import families, unopened

sys.path.insert(0, str(Path(__file__).parent))
from oracle import CONFIGS, PROMPT, relative_error, save_random

REFERENCES = {path.stem.removeprefix("reference_") for path in Path(__file__).parent.glob("reference_*.py")}
KNOWN = [name for name in families() if name in CONFIG_MAPPING and name not in REFERENCES]
SAMPLE = {"bloom", "cohere", "gptj", "phi3"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With --every all, else those whose modules or heads are named otherwise than Llama's."""
    if metafunc.function is test_a_folder_opens:
        every = metafunc.config.getoption("--every")
        opened = [name for name in KNOWN if not unopened({"model_type": name}) and (every or name in SAMPLE)]
        metafunc.parametrize("name", opened)


def test_a_folder_opens(name: str, tmp_path: Path) -> None:
    source = save_random(name, tmp_path / "source")
    convert(source, tmp_path / "int4", bits=4, group_size=32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "int4", dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        want = model.eval()(torch.tensor([PROMPT])).logits[0]
    assert relative_error(LLM(tmp_path / "int4", device="cpu", dtype="fp32").logits(PROMPT), want).max() <= 2e-4


@pytest.mark.parametrize("name", [name for name in KNOWN if unopened({"model_type": name})])
def test_what_does_not_open_is_said(name: str, tmp_path: Path) -> None:
    assert name in CONFIGS
    with pytest.warns(UserWarning, match="transformers cannot open the folder: its (matrices|projections) are"):
        convert(save_random(name, tmp_path / "source"), tmp_path / "int4", bits=4)
