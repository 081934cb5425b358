"""Command R (Cohere 2024): attention and feed-forward side by side on one LayerNorm without bias, interleaved rotary
positions, scaled logits and, in the plus model, LayerNorm on each head of q and k."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nibblelm.config import DECODER_KEYS, DecoderConfig, Key, decoder_config, read_keys, read_rope
from nibblelm.graph import Value
from nibblelm.layers import Attention, Decoder, HeadLayerNorm, Mlp, Rope, Step, Weights, norm

KEYS = {
    **{name: key for name, key in DECODER_KEYS.items() if name != "rms_norm_eps"},
    "layer_norm_eps": Key(float, 1e-5, minimum=0.0),
    "logit_scale": Key(float, 0.0625),
    "tie_word_embeddings": Key(bool, True, optional=True),
    "attention_bias": Key(bool, False, optional=True),
    "use_qk_norm": Key(bool, False, optional=True),
}


@dataclass(frozen=True)
class CohereConfig(DecoderConfig):
    """`head_norm`: LayerNorm on each head of q and k."""

    head_norm: bool = False


def read_config(raw: Mapping[str, Any], strict: bool = False) -> CohereConfig:
    """config.json of a Command R -> CohereConfig."""
    values = read_keys(raw, KEYS, strict)
    return cohere_config(raw, values, rope=read_rope(raw, 500000.0), head_norm=values["use_qk_norm"])


def cohere_config(raw: Mapping[str, Any], values: Mapping[str, Any], **features: Any) -> CohereConfig:
    """What Command R and Command R7B have in common."""
    bias = values["attention_bias"]
    return decoder_config(
        raw,
        values,
        CohereConfig,
        norm="layer_without_bias",
        interleaved=True,
        logit_scale=values["logit_scale"],
        qkv_bias=bias,
        o_bias=bias,
        **features,
    )


class Layer:
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: CohereConfig, rope: Rope, index: int) -> None:
        name, size = f"model.layers.{index}", config.head_dim

        def head_norm(part: str, heads: int) -> HeadLayerNorm:
            return HeadLayerNorm(weights.vector(f"{name}.self_attn.{part}_norm.weight", heads, size), config)

        norms = (head_norm("q", config.heads), head_norm("k", config.kv_heads)) if config.head_norm else None
        self.norm = norm(weights, f"{name}.input_layernorm", config)
        self.attention = Attention.of_projections(weights, f"{name}.self_attn", config, rope, index, head_norms=norms)
        self.mlp = Mlp(weights, f"{name}.mlp", config)

    def __call__(self, x: Value, step: Step) -> Value:
        normed = self.norm(x)
        return x + (self.attention(normed, step) + self.mlp(normed))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer = Layer
