"""Every folder the converter writes opens in transformers with compressed-tensors, to exactly our weights."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nibblelm import convert
from nibblelm.checkpoint import open_checkpoint
from nibblelm.ops.reference import dequantize

VARIANTS = {
    "int4": dict(bits=4),
    "int4-row": dict(bits=4, group_size=-1),
    "int4-32": dict(bits=4, group_size=32),
    "int4-64-symmetric": dict(bits=4, group_size=64, symmetric=True),
    "int4-row-minmax": dict(bits=4, group_size=-1, method="minmax"),
    "int8": dict(bits=8),
    "int8-128": dict(bits=8, group_size=128),
    "int8-symmetric": dict(bits=8, symmetric=True),
    "mixed": dict(bits=4, keep=["down_proj=8", "v_proj=16", r"layers\.1\.self_attn=8"]),
    "mixed-head": dict(bits=8, group_size=32, keep=["lm_head=4", "layers.0.=4"], symmetric=True),
    "full-head": dict(bits=4, keep=["lm_head=16"]),
    "sharded": dict(bits=4, max_shard_size=20_000),
}
# Every family with every dtype, tied or not; the variants go round.
MODELS = [
    (family, dtype, tied)
    for family in ("llama", "mistral", "qwen2", "qwen3")
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for tied in (False, True)
]
# The variants that name no module of Llama's.
OTHER_MODELS = [
    (family, dtype, tied, variant)
    for family, dtype, tied in (
        ("gpt_neox", torch.bfloat16, False),
        ("gpt_neox", torch.float32, False),
        ("gpt_neox", torch.bfloat16, True),
        ("gemma2", torch.bfloat16, True),
        ("gemma2", torch.float32, False),
    )
    for variant in ("int4", "int8", "int4-64-symmetric", "mixed-head", "full-head", "sharded")
]


def check_opens_exactly(source, folder, dtype):
    """transformers' weights equal ours bit for bit, and what is not quantized equals the source,
    tables of an fp32 source in bf16. In its memory every head is called lm_head."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager").eval()
    assert model.dtype == dtype
    ids = torch.arange(1, 8).unsqueeze(0)
    with torch.no_grad():
        logits = model(ids).logits  # the library unpacks the weights at the first forward pass
    state = model.state_dict()
    checkpoint = open_checkpoint(folder)
    quantized = {module.replace("embed_out", "lm_head"): module for module in checkpoint.modules_quantized}
    assert quantized
    for module, stored in quantized.items():
        ours = dequantize(checkpoint.weight(stored)).to(dtype)
        assert torch.equal(state[f"{module}.weight"], ours), module
    original = AutoModelForCausalLM.from_pretrained(source, dtype="auto", attn_implementation="eager").eval()
    for name, value in original.state_dict().items():
        if name.removesuffix(".weight") not in quantized:
            renamed = name == "lm_head.weight" and "embed_out.weight" in checkpoint
            if value.dim() == 2 and not renamed:
                value.copy_(value if dtype == torch.float16 else value.bfloat16())  # in the model too
            assert torch.equal(state[name], value), name
    if model.config.tie_word_embeddings != original.config.tie_word_embeddings:
        original.lm_head.weight = torch.nn.Parameter(original.lm_head.weight.detach().clone())
    with torch.no_grad():
        for module, stored in quantized.items():
            original.get_submodule(module).weight.copy_(dequantize(checkpoint.weight(stored)))
        assert torch.equal(original(ids).logits, logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_opens(variant, save, tmp_path):
    names = list(VARIANTS)
    family, dtype, tied = MODELS[names.index(variant) * 5 % len(MODELS)]
    source = save(family, dtype, tie_word_embeddings=tied)
    convert(source, tmp_path / "out", **VARIANTS[variant])
    check_opens_exactly(source, tmp_path / "out", dtype)


@pytest.mark.parametrize(("family", "dtype", "tied"), MODELS)
def test_every_family_and_dtype_opens(family, dtype, tied, save, tmp_path):
    names = list(VARIANTS)
    variant = VARIANTS[names[MODELS.index((family, dtype, tied)) % len(names)]]
    source = save(family, dtype, tie_word_embeddings=tied)
    convert(source, tmp_path / "out", **variant)
    check_opens_exactly(source, tmp_path / "out", dtype)


@pytest.mark.parametrize(("family", "dtype", "tied", "variant"), OTHER_MODELS)
def test_families_with_wiring_of_their_own_open(family, dtype, tied, variant, save, tmp_path):
    source = save(family, dtype, tie_word_embeddings=tied)
    convert(source, tmp_path / "out", **VARIANTS[variant])
    check_opens_exactly(source, tmp_path / "out", dtype)


@pytest.mark.parametrize(("family", "symmetric"), [("llama", False), ("llama", True), ("gpt_neox", False)])
def test_keep_tied_opens(family, symmetric, save, tmp_path):
    source = save(family, tie_word_embeddings=True)
    convert(source, tmp_path / "out", keep_tied=True, symmetric=symmetric)
    check_opens_exactly(source, tmp_path / "out", torch.bfloat16)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True
    assert not {"lm_head.weight", "embed_out.weight"} & load_file(tmp_path / "out" / "model.safetensors").keys()


def test_attention_and_mlp_biases_are_kept(save, tmp_path):
    source = save("llama", attention_bias=True, mlp_bias=True)
    convert(source, tmp_path / "out", bits=8)
    check_opens_exactly(source, tmp_path / "out", torch.bfloat16)
