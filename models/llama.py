"""Llama 1, 2 and 3.x (Touvron et al. 2023; Grattafiori et al. 2024): pre-norm decoder, rotary GQA, SwiGLU."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import DECODER_KEYS, DecoderConfig, Key, decoder_config, read_keys
from nibblelm.graph import Value
from nibblelm.layers import Attention, Decoder, Mlp, Rope, Step, Weights, norm

KEYS = {
    **DECODER_KEYS,
    "attention_bias": Key(bool, False, optional=True),
    "mlp_bias": Key(bool, False, optional=True),
}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of a Llama -> DecoderConfig."""
    values = read_keys(raw, KEYS, strict)
    bias = values["attention_bias"]
    return decoder_config(raw, values, qkv_bias=bias, o_bias=bias, mlp_bias=values["mlp_bias"])


class Layer:
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: DecoderConfig, rope: Rope, index: int) -> None:
        name = f"model.layers.{index}"
        self.norm1 = norm(weights, f"{name}.input_layernorm", config)
        self.norm2 = norm(weights, f"{name}.post_attention_layernorm", config)
        self.attention = Attention.of_projections(weights, f"{name}.self_attn", config, rope, index)
        self.mlp = Mlp(weights, f"{name}.mlp", config)

    def __call__(self, x: Value, step: Step) -> Value:
        x = x + self.attention(self.norm1(x), step)
        return x + self.mlp(self.norm2(x))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer = Layer
