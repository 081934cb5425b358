"""What is not quantized is stored in 16 bits, or in the dtype that is asked for."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from nibblelm import LLM, convert
from nibblelm.errors import ConvertError

TABLE, NORM, SCALE = "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight_scale"
KEPT = "model.layers.0.self_attn.v_proj.weight"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def dtypes(folder):
    tensors = load_file(folder / "model.safetensors")
    return tuple(tensors[name].dtype for name in (TABLE, KEPT, NORM, SCALE))


@pytest.mark.parametrize(
    ("source", "dtype", "expected"),
    [
        (F32, "auto", (BF16, BF16, F32, F32)),
        (F32, "fp32", (F32,) * 4),
        (F32, "bf16", (BF16,) * 4),
        (F32, "fp16", (F16,) * 4),
        (BF16, "auto", (BF16,) * 4),
        (F16, "auto", (F16,) * 4),
        (BF16, "fp32", (F32,) * 4),
    ],
)
def test_dtypes(source, dtype, expected, save, tmp_path):
    folder = save("llama", source, tie_word_embeddings=False)
    before, named = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())["dtype"]
    report = convert(folder, tmp_path / "out", dtype=dtype, keep=["v_proj=16"])
    assert dtypes(tmp_path / "out") == expected
    after = load_file(tmp_path / "out" / "model.safetensors")
    for name in (TABLE, KEPT, NORM):
        assert torch.equal(after[name], before[name].to(after[name].dtype))
    stored = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(dtype, named)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == stored
    assert report.output_bytes == sum(tensor.nbytes for tensor in after.values())
    assert LLM(tmp_path / "out", device="cpu").logits([1, 2, 3]).isfinite().all()


def test_a_cast_source_converts_as_one_saved_in_that_dtype(save, tmp_path):
    """By transformers, from the same random numbers."""
    convert(save("qwen2", F32, name="wide"), tmp_path / "cast", dtype="bf16")
    folder = save("qwen2", F32, name="narrow")
    state = load_file(folder / "model.safetensors")
    save_file({name: value.bfloat16() for name, value in state.items()}, folder / "model.safetensors")
    convert(folder, tmp_path / "saved")
    same = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("cast", "saved")]
    assert same[0] == same[1]


def test_values_that_do_not_fit_are_refused(save, tmp_path):
    folder = save("llama", F32)
    state = load_file(folder / "model.safetensors")
    state[TABLE][7, 1] = 1e5
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ConvertError, match=r"embed_tokens.weight in torch.float16: row 7 .*do not fit the dtype"):
        convert(folder, tmp_path / "out", dtype="fp16")
    with pytest.raises(ConvertError, match="dtype must be one of auto, fp32, bf16, fp16"):
        convert(folder, tmp_path / "out", dtype="int8")
