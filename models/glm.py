"""GLM-4 (GLM Team 2024), as transformers has it: interleaved rotary positions on half of each head, gate and up in one
matrix."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import DECODER_KEYS, DecoderConfig, Key, decoder_config, read_keys, read_rope
from nibblelm.layers import Attention, Decoder, Mlp, Rope, Weights, norm
from nibblelm.models import llama

KEYS = {
    **DECODER_KEYS,
    "num_key_value_heads": Key(int, 2, minimum=1),
    "head_dim": Key(int, 128, minimum=1),
    "rms_norm_eps": Key(float, 1.5625e-07, minimum=0.0),
    "attention_bias": Key(bool, True, optional=True),
    "partial_rotary_factor": Key(float, 0.5, optional=True),
}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of a GLM-4 -> DecoderConfig."""
    values = read_keys(raw, KEYS, strict)
    rope = read_rope(raw, default_partial=0.5)
    return decoder_config(raw, values, rope=rope, interleaved=True, qkv_bias=values["attention_bias"])


class Layer(llama.Layer):
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: DecoderConfig, rope: Rope, index: int) -> None:
        name = f"model.layers.{index}"
        self.norm1 = norm(weights, f"{name}.input_layernorm", config)
        self.norm2 = norm(weights, f"{name}.post_attention_layernorm", config)
        self.attention = Attention.of_projections(weights, f"{name}.self_attn", config, rope, index)
        self.mlp = Mlp(weights, f"{name}.mlp", config, parts=("gate_up_proj", "down_proj"))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer = Layer
