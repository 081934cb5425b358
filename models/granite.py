"""Granite 3 (Granite Team 2024): Llama's wiring with multipliers on the embedding, the residual branches, the scores
and the logits."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nibblelm.config import DecoderConfig, Key, decoder_config, read_keys
from nibblelm.graph import Value
from nibblelm.layers import Decoder, Rope, Step, Weights
from nibblelm.models import llama

KEYS = {
    **llama.KEYS,
    "embedding_multiplier": Key(float, 1.0),
    "residual_multiplier": Key(float, 1.0),
    "attention_multiplier": Key(float, 1.0, minimum=1e-9),
    "logits_scaling": Key(float, 1.0, minimum=1e-9),
}


@dataclass(frozen=True)
class GraniteConfig(DecoderConfig):
    """`residual_multiplier`: of what attention and the feed-forward add."""

    residual_multiplier: float = 1.0


def read_config(raw: Mapping[str, Any], strict: bool = False) -> GraniteConfig:
    """config.json of a Granite -> GraniteConfig."""
    values = read_keys(raw, KEYS, strict)
    bias = values["attention_bias"]
    return decoder_config(
        raw,
        values,
        GraniteConfig,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=values["mlp_bias"],
        embedding_multiplier=values["embedding_multiplier"],
        residual_multiplier=values["residual_multiplier"],
        attention_scale=values["attention_multiplier"],
        logit_scale=1.0 / values["logits_scaling"],
    )


class Layer(llama.Layer):
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: GraniteConfig, rope: Rope, index: int) -> None:
        super().__init__(weights, config, rope, index)
        self.multiplier = config.residual_multiplier

    def __call__(self, x: Value, step: Step) -> Value:
        x = x + self.attention(self.norm1(x), step).scale(self.multiplier)
        return x + self.mlp(self.norm2(x)).scale(self.multiplier)


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer = Layer
