"""OLMo 2 (OLMo Team 2024): norms after each block, not before, and RMSNorm over all of q and all of k."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import DECODER_KEYS, DecoderConfig, Key, decoder_config, read_keys
from nibblelm.graph import Value
from nibblelm.layers import Attention, Decoder, Mlp, ProjectionNorm, Rope, Step, Weights, norm

KEYS = {
    **DECODER_KEYS,
    "rms_norm_eps": Key(float, 1e-5, minimum=0.0),
    "attention_bias": Key(bool, False, optional=True),
}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of an OLMo 2 -> DecoderConfig."""
    values = read_keys(raw, KEYS, strict)
    bias = values["attention_bias"]
    return decoder_config(raw, values, qkv_bias=bias, o_bias=bias)


class Layer:
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: DecoderConfig, rope: Rope, index: int) -> None:
        name = f"model.layers.{index}"
        attention = f"{name}.self_attn"
        norms = (
            ProjectionNorm(weights, f"{attention}.q_norm", config.heads, config),
            ProjectionNorm(weights, f"{attention}.k_norm", config.kv_heads, config),
        )
        self.attention = Attention.of_projections(weights, attention, config, rope, index, head_norms=norms)
        self.norm1 = norm(weights, f"{name}.post_attention_layernorm", config)
        self.norm2 = norm(weights, f"{name}.post_feedforward_layernorm", config)
        self.mlp = Mlp(weights, f"{name}.mlp", config)

    def __call__(self, x: Value, step: Step) -> Value:
        x = x + self.norm1(self.attention(x, step))
        return x + self.norm2(self.mlp(x))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer = Layer
