"""Every family rotated: the source's function in fp32 by its reference, or refused by name."""

import sys
from pathlib import Path

import pytest
import torch

from nibblelm import convert
from nibblelm.errors import ConvertError

sys.path.insert(0, str(Path(__file__).parent))
from oracle import CONFIGS, PROMPT, load_reference, save_random, unpacked

# Norms that stand behind blocks or behind the table, and a head of rows of length 1.
REFUSED = {"baichuan-13b", "bloom", "chatglm_6b", "gemma2", "gemma3_text", "glm4", "olmo2", "olmo3", "opt-after"}
SAMPLE = {"cohere", "falcon", "gemma", "gpt2", "gptj", "opt", "phi3", "stablelm"}


def refused(name: str) -> bool:
    return name in REFUSED or name.partition("-")[0] in REFUSED


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--every")
    names = [name for name in CONFIGS if refused(name) == (metafunc.function is test_what_cannot_be_rotated_is_refused)]
    metafunc.parametrize("name", [name for name in names if every or name in SAMPLE | REFUSED])


def test_a_rotated_folder_has_the_sources_logits(name: str, tmp_path: Path) -> None:
    source = save_random(name, tmp_path / "source")
    convert(source, tmp_path / "out", rotate=True, keep=[".=16"], dtype="fp32")
    before, after = load_reference(source), load_reference(source, tmp_path / "out")
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        want, got = (model(ids).logits[0].double() for model in (before, after))
    assert (got - want).norm() / want.norm() <= 1e-5
    old, new = unpacked(source), unpacked(tmp_path / "out")
    still = [key for key in old if key in new and torch.allclose(old[key], new[key], atol=0.01)]
    assert not [key for key in still if old[key].dim() == 2 and "_norm." not in key]


def test_what_cannot_be_rotated_is_refused(name: str, tmp_path: Path) -> None:
    source = save_random(name, tmp_path / "source")
    with pytest.raises(ConvertError, match=rf"{name.partition('-')[0]}.* cannot be rotated"):
        convert(source, tmp_path / "out", rotate=True)
