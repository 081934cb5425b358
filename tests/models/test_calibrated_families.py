"""gptq and awq on every family, whose activations are walked layer by layer: nearer to the source than min/max."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from nibblelm import LLM, convert
from nibblelm.converter.calibration import layer_of
from nibblelm.errors import ConvertError
from nibblelm.quant import awq

sys.path.insert(0, str(Path(__file__).parent))
from oracle import CONFIGS, PROMPT, load_reference, relative_error, save_random, unpacked

SAMPLE = {"falcon", "gpt2", "olmo2", "phi3"}
NO_WORDS = {"qwen2"}  # its folders are read as those of a tokenizer of bytes, whatever they say
REFUSED = {"chatglm_6b": "tokens see each other", "opt-after": "stand before its layers"}


# Matrices whose input nothing makes that could be scaled: behind a GELU, a norm whose output is the residual stream, or
# that stream itself.
ONLY_ROUNDED = {
    **{name: {"dense_4h_to_h"} for name in ("gpt_neox", "falcon", "bloom")},
    "bloom-normed": {"dense_h_to_4h", "dense_4h_to_h"},  # of query_key_value those of the values are
    **{name: {"fc_out"} for name in ("gptj", "codegen")},
    "phi": {"fc2"},
    "gpt2": {"mlp.c_proj"},
    "starcoder2": {"mlp.c_proj"},
    "mpt": {"ffn.down_proj"},
    **{name: {"q_proj", "k_proj", "gate_proj"} for name in ("olmo2", "olmo3")},  # of v_proj and up_proj the rows are
}
FOLDED = SAMPLE | {"bloom-normed", "gemma2", "glm4", "internlm2", "llama-bias-linear", "opt", "stablelm-parallel"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--every")
    without = {"chatglm_6b", "chatglm_6b-mask", "opt-after"} | NO_WORDS
    names = [name for name in CONFIGS if name not in without]
    if metafunc.function is test_awq_changes_no_function:
        metafunc.parametrize("name", [name for name in names if every or name in FOLDED])
    elif "method" in metafunc.fixturenames:
        names = [name for name in names if "-" not in name]
        metafunc.parametrize("name", [name for name in names if every or name in SAMPLE])
        metafunc.parametrize("method", ["gptq", "awq"])


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


def with_outliers(source: Path) -> None:
    """Gains of norms as trained models have them: some columns are many times larger than others. What awq is for; with
    all columns alike it can be a hundredth further from the source than min/max (olmo2, mpt)."""
    (file,) = source.glob("*.safetensors")
    tensors, generator = load_file(file), torch.Generator().manual_seed(5)
    for key, tensor in tensors.items():
        if tensor.dim() == 1 and key.endswith("weight"):
            tensors[key] = tensor * torch.randn(tensor.shape, generator=generator).exp().to(tensor.dtype)
    save_file(tensors, file, {"format": "pt"})


def test_it_is_nearer_than_minmax(name: str, method: str, tmp_path: Path) -> None:
    source, text, ids = with_text(name, tmp_path)
    if method == "awq":
        with_outliers(source)
    want = LLM(source, device="cpu", dtype="fp32").logits(ids)
    errors = {}
    for made in ("minmax", method):
        calibration = dict(calibration=text, samples=16) if made == method else {}
        convert(source, tmp_path / made, bits=4, group_size=32, method=made, **calibration)
        errors[made] = relative_error(LLM(tmp_path / made, device="cpu", dtype="fp32").logits(ids), want).mean()
    print(f"{name}: relative L2 {errors[method]:.3f} by {method}, {errors['minmax']:.3f} by min/max")
    assert errors[method] < errors["minmax"]


def test_awq_changes_no_function(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any factors, equal where the magnitudes are, and nothing rounded: the source's logits, by its reference."""

    def factors(weights: Any, moment: Any, magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return 0.5 + (magnitude.double() * 1e5) % 1

    monkeypatch.setattr(awq, "search", factors)
    source, text, _ = with_text(name, tmp_path)
    convert(source, tmp_path / "out", method="awq", calibration=text, samples=2, keep=[".=16"], dtype="fp32")
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        want, got = (
            load_reference(*folders)(ids).logits[0].double() for folders in ((source,), (source, tmp_path / "out"))
        )
    assert (got - want).norm() / want.norm() <= 1e-5
    only = tuple(ONLY_ROUNDED.get(name, ONLY_ROUNDED.get(name.partition("-")[0], ())))
    old, new = unpacked(source), unpacked(tmp_path / "out")
    for key in (key for key in old if old[key].dim() == 2 and "_norm." not in key and layer_of(key) is not None):
        assert torch.equal(old[key], new[key]) == key.removesuffix(".weight").endswith(only), key


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_walked_is_refused(name: str, tmp_path: Path) -> None:
    source, text, _ = with_text(name, tmp_path)
    with pytest.raises(ConvertError, match=REFUSED[name]):
        convert(source, tmp_path / "out", bits=4, method="gptq", calibration=text, samples=4)


def test_a_target_for_a_family_with_turned_matrices(tmp_path: Path) -> None:
    """gpt2's files have (K, N): what is searched, and what is written, is of (N, K), rotated or not."""
    source, text, ids = with_text("gpt2", tmp_path)
    want = LLM(source, device="cpu", dtype="fp32").logits(ids)
    options = dict(target_kl=0.05, method="minmax", calibration=text)
    for rotate in (False, True):
        convert(source, tmp_path / "out", overwrite=True, rotate=rotate, **options)
        got = LLM(tmp_path / "out", device="cpu", dtype="fp32").logits(ids)
        divergence = (want.log_softmax(-1).exp() * (want.log_softmax(-1) - got.log_softmax(-1))).sum(-1).mean()
        assert 0 < divergence <= 1.2 * 0.05
