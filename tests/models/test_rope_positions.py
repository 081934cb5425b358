"""Angles of every kind of rotary scaling at 1k, 8k and 32k positions, against the source implementation's."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nibblelm.rope_config import ROPE_TYPES, read_rope
from nibblelm.rope_scaling import tables

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
