"""gptq on every family: its activations, walked layer by layer, make a folder nearer to the source than min/max."""

import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from nibblelm import LLM, convert
from nibblelm.errors import ConvertError

sys.path.insert(0, str(Path(__file__).parent))
from oracle import CONFIGS, relative_error, save_random

SAMPLE = {"falcon", "gpt2", "olmo2", "phi3"}
NO_WORDS = {"qwen2"}  # its folders are read as those of a tokenizer of bytes, whatever they say
REFUSED = {"chatglm_6b": "tokens see each other", "opt-after": "stand before its layers"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_gptq_is_nearer_than_minmax:
        every = metafunc.config.getoption("--every")
        names = [name for name in CONFIGS if "-" not in name and name not in REFUSED and name not in NO_WORDS]
        metafunc.parametrize("name", [name for name in names if every or name in SAMPLE])


def with_text(name: str, folder: Path) -> tuple[Path, Path, list[int]]:
    """A source with a tokenizer of words, a text for it, and the ids of its beginning."""
    source, text = save_random(name, folder / "source"), folder / "text.txt"
    ids = torch.randint(1, 331, (6000,), generator=torch.Generator().manual_seed(3)).tolist()
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(331)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    text.write_text(" ".join(f"w{i}" for i in ids))
    return source, text, ids[:200]


def test_gptq_is_nearer_than_minmax(name: str, tmp_path: Path) -> None:
    source, text, ids = with_text(name, tmp_path)
    want = LLM(source, device="cpu", dtype="fp32").logits(ids)
    errors = {}
    for method in ("minmax", "gptq"):
        calibration = dict(calibration=text, samples=16) if method == "gptq" else {}
        convert(source, tmp_path / method, bits=4, group_size=32, method=method, **calibration)
        errors[method] = relative_error(LLM(tmp_path / method, device="cpu", dtype="fp32").logits(ids), want).mean()
    print(f"{name}: relative L2 {errors['gptq']:.3f} by gptq, {errors['minmax']:.3f} by min/max")
    assert errors["gptq"] < errors["minmax"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_walked_is_refused(name: str, tmp_path: Path) -> None:
    source, text, _ = with_text(name, tmp_path)
    with pytest.raises(ConvertError, match=REFUSED[name]):
        convert(source, tmp_path / "out", bits=4, method="gptq", calibration=text, samples=4)


def test_a_target_for_a_family_with_turned_matrices(tmp_path: Path) -> None:
    """gpt2's files have (K, N): what is searched, and what is written, is of (N, K), rotated or not."""
    source, text, ids = with_text("gpt2", tmp_path)
    want = LLM(source, device="cpu", dtype="fp32").logits(ids)
    options = dict(target_kl=0.05, method="minmax", calibration=text, samples=8)
    for rotate in (False, True):
        convert(source, tmp_path / "out", overwrite=True, rotate=rotate, **options)
        got = LLM(tmp_path / "out", device="cpu", dtype="fp32").logits(ids)
        divergence = (want.log_softmax(-1).exp() * (want.log_softmax(-1) - got.log_softmax(-1))).sum(-1).mean()
        assert 0 < divergence <= 1.2 * 0.05
