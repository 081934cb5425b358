"""A rotated model is the source's function: exactly for fp32 folders, and by name refused where it cannot be."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nibblelm import convert
from nibblelm.converter.rotate import rotated
from nibblelm.errors import ConvertError
from nibblelm.models import family
from nibblelm.quant.rotation import Rotation

# Sizes that are not powers of two, grouped queries, biases, norms on heads, tied tables.
VARIANTS = {
    "llama": dict(attention_bias=True, mlp_bias=True),
    "llama-tied": dict(hidden_size=208, num_attention_heads=13, num_key_value_heads=1, tie_word_embeddings=True),
    "mistral": dict(head_dim=24, sliding_window=5),
    "qwen2": {},
    "qwen3": dict(tie_word_embeddings=True),
}


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(torch.arange(1, 40).unsqueeze(0)).logits[0].double()


def randomise(folder):
    """Norm gains and biases that are not trivial."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.dim() == 1:
                value.normal_(0, 0.3) if name.endswith("bias") else value.uniform_(-1.5, 1.5)
            else:
                value.mul_(4)
    model.save_pretrained(folder)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 24, 64, 80, 208, 896])
def test_rotations_are_orthogonal_and_flat(size):
    rotation = Rotation(size, seed=3)
    matrix = rotation(torch.eye(size))
    assert np.abs(matrix.numpy() @ matrix.numpy().T - np.eye(size)).max() < 1e-12
    assert matrix.abs().max() * size**0.5 <= 2**0.5 + 1e-12
    x = torch.randn(5, size, dtype=torch.float64)
    assert torch.allclose(rotation(x), x @ matrix, atol=1e-12)
    assert torch.allclose(rotation.rows(x.T), matrix.T @ x.T, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 24, 64, 208, 896])
def test_rotations_that_keep_the_mean(size):
    rotation = Rotation(size, seed=3, keeps_mean=True)
    matrix = rotation(torch.eye(size))
    assert np.abs(matrix.numpy() @ matrix.numpy().T - np.eye(size)).max() < 1e-12
    x = torch.randn(5, size, dtype=torch.float64)
    assert torch.allclose(rotation(x).mean(-1), x.mean(-1), atol=1e-12)
    ones = matrix.new_ones(size)  # the reflection adds as much as sums of columns differ from 1
    assert matrix.abs().max() * size**0.5 <= 2**0.5 + (Rotation(size, seed=3)(ones) - ones).abs().max() + 1e-9


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_rotated_fp32_folder_has_the_sources_logits(variant, save, tmp_path):
    source = save(variant.partition("-")[0], torch.float32, **VARIANTS[variant])
    randomise(source)
    convert(source, tmp_path / "out", rotate=True, keep=[".=16"], dtype="fp32")
    expected, found = logits(source), logits(tmp_path / "out")
    assert ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max() <= 1e-5
    before = AutoModelForCausalLM.from_pretrained(source).model.layers[0].mlp.down_proj.weight
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").model.layers[0].mlp.down_proj.weight
    assert not torch.allclose(before, after, atol=0.01)


def test_the_seed_decides(save, tmp_path):
    source = save("llama")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        convert(source, tmp_path / name, rotate=True, seed=seed)
    first, second, third = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert first == second != third


def test_what_cannot_be_rotated_is_refused(save, tmp_path):
    source = save("llama", tie_word_embeddings=True)
    with pytest.raises(ConvertError, match="tied"):
        convert(source, tmp_path / "out", rotate=True, keep_tied=True)
    neox = save("gpt_neox", name="neox")
    model = AutoModelForCausalLM.from_pretrained(neox)
    with torch.no_grad():
        model.gpt_neox.layers[1].input_layernorm.weight[3] = 0
    model.save_pretrained(neox)
    with pytest.raises(ConvertError, match=r"gpt_neox\.layers\.1\.input_layernorm\.weight has a gain of 0"):
        convert(neox, tmp_path / "out", rotate=True)


def test_a_source_in_fp64_stays_as_it_is(save):
    """Its tensors may be views of the file, and be read twice."""
    model = AutoModelForCausalLM.from_pretrained(save("llama"), dtype=torch.float64)
    state, raw = dict(model.state_dict()), json.loads((save("llama") / "config.json").read_text())
    before = {name: value.clone() for name, value in state.items()}
    read = rotated(state.__getitem__, raw, family(raw).read_config(raw), 0)
    for name, value in state.items():
        assert torch.equal(read(name), read(name))
        assert torch.equal(value, before[name])
