"""What published files have, or leave out, that transformers does not write today."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MistralConfig, Phi3Config, Qwen2Config, Qwen3Config
from transformers.models.falcon import modeling_falcon

from nibblelm import LLM
from nibblelm.config import RopeConfig, read_rope
from nibblelm.errors import ConfigError
from nibblelm.models import family

sys.path.insert(0, str(Path(__file__).parent))
from oracle import CONFIGS, PROMPT, load_reference, relative_error, save_random

SIZES = dict(
    vocab_size=64, hidden_size=1024, intermediate_size=64, num_hidden_layers=30, num_attention_heads=16,
    max_position_embeddings=8192,
)  # fmt: skip


def edit(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def read(model_type: str, **keys: Any) -> Any:
    return family({"model_type": model_type}).read_config({"model_type": model_type, **SIZES, **keys})


def test_absent_keys_are_what_transformers_takes_for_them() -> None:
    mistral = read("mistral")
    assert (mistral.kv_heads, mistral.window) == (MistralConfig().num_key_value_heads, MistralConfig().sliding_window)
    null = read("mistral", sliding_window=None, num_key_value_heads=None)
    assert (null.kv_heads, null.window) == (16, 0)
    for kind, config in (("qwen2", Qwen2Config()), ("qwen3", Qwen3Config())):
        windows = read(kind, use_sliding_window=True, sliding_window=7).windows
        assert windows == tuple(7 if i >= config.max_window_layers else 0 for i in range(30)), kind
    factors = [1.0] * 32
    rope = read("phi3", rope_scaling=dict(type="longrope", short_factor=factors, long_factor=factors)).rope
    assert rope.parameters["original_max_position_embeddings"] == Phi3Config().original_max_position_embeddings


def test_what_scaled_ropes_say_of_their_making() -> None:
    original = dict(original_max_position_embeddings=4096)
    raw = dict(max_position_embeddings=8192)
    linear = read_rope({**raw, "rope_scaling": dict(type="linear", factor=2.0, **original)})
    assert linear == RopeConfig("linear", 10000.0, {"factor": 2.0})
    yarn = dict(type="yarn", factor=2.0, **original)
    assert read_rope({**raw, "rope_scaling": {**yarn, "finetuned": True}}) == read_rope({**raw, "rope_scaling": yarn})


def test_a_cap_that_transformers_does_not_apply_is_refused() -> None:
    with pytest.raises(ConfigError, match="attn_logit_softcapping"):
        read("gemma3_text", attn_logit_softcapping=50.0)


_BETA = dict(llama_4_scaling_beta=0.1, original_max_position_embeddings=32)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("ministral3", dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, **_BETA))),
        ("ministral3", dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4, **_BETA))),
        ("ministral3", dict(rope_parameters=None)),
        ("ministral3", dict(rope_parameters=None, rope_theta=5e5, rope_scaling=None)),
        ("gpt_neox", dict(rope_parameters=None, rope_theta=500.0, rotary_pct=0.5)),
        ("gpt_neox", dict(rope_parameters=None, rope_theta=500.0, rotary_emb_base=900, rotary_pct=0.5)),
    ],
)
def test_rotation_by_whatever_keys(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    folder = save_random(name, tmp_path / "source", torch.float32)
    edit(folder, **keys)
    with torch.inference_mode():
        want = load_reference(folder)(torch.tensor([PROMPT])).logits[0]
    assert relative_error(LLM(folder, device="cpu", dtype="fp32").logits(PROMPT), want).max() < 2e-5


def test_a_switch_that_transformers_reads_from_elsewhere_is_refused() -> None:
    yarn = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128, truncate=False)
    sliding, outside = dict(rope_type="default"), {key: value for key, value in yarn.items() if key != "truncate"}
    for parameters in (dict(full_attention=yarn), dict(full_attention=outside, truncate=False)):
        with pytest.raises(ConfigError, match="truncate false is not supported"):
            read("olmo3", rope_parameters=dict(sliding_attention=sliding, **parameters))


def test_opt_without_the_models_prefix(tmp_path: Path) -> None:
    """As facebook/opt-6.7b has it."""
    source = save_random("opt", tmp_path / "source")
    want = load_reference(source)(torch.tensor([PROMPT])).logits[0].detach()
    tensors = load_file(source / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, source / "model.safetensors")
    assert relative_error(LLM(source, device="cpu", dtype="fp32").logits(PROMPT), want).max() <= 2e-4


def test_rope_ratio_of_chatglm2_and_of_later_ones(tmp_path: Path) -> None:
    """chatglm2-6b-32k divides positions by it, chatglm3-6b-32k and GLM-4 multiply the base."""
    CONFIGS["chatglm-divided"] = {**CONFIGS["chatglm"], "rope_ratio": 4, "divided": True}
    try:
        source = save_random("chatglm-divided", tmp_path / "source")
    finally:
        del CONFIGS["chatglm-divided"]
    want = load_reference(source)(torch.tensor([PROMPT])).logits[0].detach()
    config = json.loads((source / "config.json").read_text())
    del config["divided"]
    (source / "config.json").write_text(json.dumps({**config, "_name_or_path": "THUDM/chatglm2-6b-32k"}))
    assert relative_error(LLM(source, device="cpu", dtype="fp32").logits(PROMPT), want).max() <= 2e-4
    edit(source, _name_or_path="THUDM/chatglm3-6b-32k")
    assert relative_error(LLM(source, device="cpu", dtype="fp32").logits(PROMPT), want).max() > 0.01
    config = {**config, "padded_vocab_size": 65024}
    assert family(config).read_config({**config, "rope_ratio": 1}).rope.theta == 10000.0
    with pytest.raises(ConfigError, match="'chatglm2-6b-32k' or 'chatglm3-6b-32k'"):
        family(config).read_config(config)


def test_falcons_alibi_is_not_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers rounds slope times position to bf16; here it is exact, as README says."""
    CONFIGS["falcon-rw32"] = {**CONFIGS["falcon-rw"], "hidden_size": 256, "num_attention_heads": 32}
    try:
        source = save_random("falcon-rw32", tmp_path / "source")
    finally:
        del CONFIGS["falcon-rw32"]
    prompt = (PROMPT * 8)[:300]
    assert len(prompt) == 300
    rounded = modeling_falcon.build_alibi_tensor

    def exact(mask: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
        slopes = rounded(torch.ones(1, 2), heads, torch.float32).view(heads, 1, 2)[..., 1:]  # at position 1
        return slopes * ((mask.cumsum(-1) - 1) * mask)[:, None, :]

    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", exact)
    want = load_reference(source)(torch.tensor([prompt])).logits[0].detach()
    assert relative_error(LLM(source, device="cpu", dtype="fp32").logits(prompt), want).max() <= 2e-4
