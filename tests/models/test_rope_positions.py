"""Every kind of rotary scaling at 1k, 8k and 32k positions, its angles and a whole model, against the source's."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nibblelm import LLM, ops
from nibblelm.rope_config import ROPE_TYPES, read_rope
from nibblelm.rope_scaling import tables

sys.path.insert(0, str(Path(__file__).parent))
from oracle import relative_error

USABLE, REASON = ops.cuda_available()

KINDS = {
    "default": {},
    "linear": dict(factor=4.0),
    "dynamic": dict(factor=8.0),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192),
    "yarn": dict(factor=4.0, original_max_position_embeddings=8192),
    "longrope": dict(
        original_max_position_embeddings=4096,
        short_factor=[1.0 + 0.05 * i for i in range(32)],
        long_factor=[1.0 + 0.9 * i for i in range(32)],
    ),
}


def test_every_kind_is_here() -> None:
    assert set(KINDS) == set(ROPE_TYPES)


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("kind", KINDS)
def test_angles(kind: str, theta: float) -> None:
    """Of the last 16 of so many positions, as a request with a prompt of that length has them."""
    limit = 4096 if kind == "dynamic" else 131072
    section = dict(rope_type=kind, rope_theta=theta, **KINDS[kind])
    config = LlamaConfig(head_dim=64, max_position_embeddings=limit, rope_parameters=dict(section))
    rope = read_rope({"max_position_embeddings": limit, "rope_parameters": section})
    for length in (1024, 8192, 32768):
        places = torch.arange(length - 16, length)
        want = LlamaRotaryEmbedding(config)(torch.empty(0), places[None])
        got = tables(rope, 64, length - 16, length, rope.choice(length))
        for ours, theirs in zip(got, want, strict=True):
            # The same products in fp32, but that of `dynamic` the base and of `yarn` the ramp are made there in another
            # order: one rounding of a frequency, which its position multiplies.
            room = length * 2.0**-23 if kind in ("dynamic", "yarn") else 1e-6
            assert (ours - theirs[0, :, :32]).abs().max() <= room, length


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    """Of the kind, with 16 frequencies a head; and where it is saved."""
    torch.manual_seed(0)
    keys = {key: value[:16] if isinstance(value, list) else value for key, value in KINDS[request.param].items()}
    config = LlamaConfig(
        vocab_size=331,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        initializer_range=0.15,
        max_position_embeddings=4096 if request.param == "dynamic" else 131072,
        rope_parameters=dict(rope_type=request.param, rope_theta=10000.0, **keys),
    )
    folder = tmp_path_factory.mktemp(request.param)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("length", [1024, 8192, 32768])
@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=REASON)])],
)
def test_whole_models(
    model: tuple[LlamaForCausalLM, Path], device: str, length: int, request: pytest.FixtureRequest
) -> None:
    """Logits of every position of a prompt, and of its last four tokens one by one, within twice the error that the
    source implementation's own float32 has; the card's, as elsewhere, within 2e-4."""
    if length > 8192 and not request.config.getoption("--every"):
        pytest.skip("more than ten seconds each: with --every")
    source, folder = model
    prompt = torch.randint(0, 331, (length,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        want = source.float()(prompt[None]).logits[0]
        bound = 2e-4 if device == "cuda" else 2 * relative_error(want, source.double()(prompt[None]).logits[0]).max()
    llm = LLM(folder, device=device, dtype="fp32")
    error = relative_error(llm.logits(prompt.tolist()).cpu(), want).max()
    runner = llm.runner
    runner.set_pages(0, list(range(length // 64)))
    runner.set_prompt(0, prompt.tolist(), length)
    with torch.inference_mode():
        runner.prefill(prompt[:-4].tolist())
        steps = torch.cat([runner.decode([token], [0]).clone() for token in prompt[-4:].tolist()]).cpu()
    print(f"relative L2 at most {error:.1e}, step by step {relative_error(steps, want[-4:]).max():.1e}, {bound:.1e}")
    assert max(error, relative_error(steps, want[-4:]).max()) <= bound
