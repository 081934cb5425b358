"""Folders of several parts: the text model loads, from the layout of transformers 5 and of 4, the rest is named."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from nibblelm import LLM, convert
from nibblelm.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))
from oracle import CONFIGS, PROMPT, SMALL, relative_error, unpacked

VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
)
NONE = dict(final_logit_softcapping=None)  # of which transformers' model of several parts takes no notice
PARTS = {
    "gemma3": ("gemma3_text", "siglip_vision_model", dict(mm_tokens_per_image=4)),
    "mistral3": ("mistral", "pixtral", {}),
}


@pytest.fixture(params=PARTS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    text, vision, options = PARTS[request.param]
    inner = AutoConfig.for_model(text, **{**SMALL, **CONFIGS[text], **NONE}).to_dict()
    outer = AutoConfig.for_model(vision, **VISION).to_dict()
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, text_config=inner, vision_config=outer, **options)
    AutoModelForImageTextToText.from_config(config).float().save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def older(folder: Path) -> None:
    """The names of transformers 4: the language model is a model of its own."""
    tensors = load_file(folder / "model.safetensors")
    names = {name: name.replace("model.language_model.", "language_model.model.") for name in tensors}
    names |= {name: name.removeprefix("model.") for name in tensors if names[name] == name}
    names |= {name: f"language_model.{name}" for name in tensors if name.startswith("lm_head.")}
    save_file({names[name]: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("layout", [5, 4])
def test_the_text_model_runs(folder: Path, layout: int, tmp_path: Path) -> None:
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        want = reference.eval()(torch.tensor([PROMPT])).logits[0]
    if layout == 4:
        older(folder)
    with pytest.warns(UserWarning, match=r"\d+ tensors do not belong to the text model and are skipped: .*vision"):
        llm = LLM(folder, device="cpu", dtype="fp32")
    assert relative_error(llm.logits(PROMPT), want).max() <= 2e-4
    with pytest.warns(UserWarning, match="skipped"):
        convert(folder, tmp_path / "int4", bits=4, group_size=32)
    converted = LLM(tmp_path / "int4", device="cpu", dtype="fp32").logits(PROMPT)
    text = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "int4")).float().eval()
    text.config.tie_word_embeddings = False
    text.lm_head.weight = torch.nn.Parameter(text.lm_head.weight.detach().clone())
    text.load_state_dict(unpacked(tmp_path / "int4"))
    with torch.inference_mode():
        assert relative_error(converted, text(torch.tensor([PROMPT])).logits[0]).max() <= 2e-4


def test_a_text_config_that_is_missing_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "text_config": None}))
    with pytest.raises(ConfigError, match=r"text_config of a '\w+' must be an object"):
        LLM(folder, device="cpu")
