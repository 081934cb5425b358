"""Gemma 2 (Gemma Team 2024): norms before and after each block, soft-capped scores and logits, GeGLU, and a sliding
window on every other layer."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import (
    DECODER_KEYS,
    WINDOW_KEYS,
    DecoderConfig,
    Key,
    decoder_config,
    read_keys,
    window_layers,
)
from nibblelm.graph import Value
from nibblelm.layers import Attention, Decoder, Mlp, Rope, Step, Weights, norm

_GELU = Key(str, "gelu_pytorch_tanh", only=("gelu_pytorch_tanh",), optional=True)
KEYS = {
    **DECODER_KEYS,
    "num_key_value_heads": Key(int, 4, minimum=1),
    "head_dim": Key(int, 256, minimum=1),
    "hidden_act": Key(str, None),  # not read by anybody
    "hidden_activation": _GELU,
    "tie_word_embeddings": Key(bool, True, optional=True),
    "attention_bias": Key(bool, False, optional=True),
    "query_pre_attn_scalar": Key(float, 256.0, minimum=1e-6),
    "sliding_window": Key(int, 4096, minimum=1),
    "layer_types": WINDOW_KEYS["layer_types"],
    "attn_logit_softcapping": Key(float, None, minimum=1e-6),
    "final_logit_softcapping": Key(float, None, minimum=1e-6),
    "use_bidirectional_attention": Key(bool, False, only=(False,), optional=True),
}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of a Gemma 2 -> DecoderConfig."""
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # where the key is absent; null is none
    values = read_keys({**caps, **raw}, KEYS, strict)
    alternating = ["full_attention" if i % 2 else "sliding_attention" for i in range(values["num_hidden_layers"])]
    layer_types = values["layer_types"] or alternating
    windows = window_layers({**values, "use_sliding_window": True, "layer_types": layer_types})
    return gemma_config(raw, values, windows=windows)


def gemma_config(raw: Mapping[str, Any], values: Mapping[str, Any], **features: Any) -> DecoderConfig:
    """What Gemma 2 and Gemma 3 have in common."""
    bias = values["attention_bias"]
    return decoder_config(
        raw,
        values,
        norm="rms_plus_one",
        embedding_multiplier=values["hidden_size"] ** 0.5,
        attention_scale=values["query_pre_attn_scalar"] ** -0.5,
        attention_softcap=values["attn_logit_softcapping"] or 0.0,
        logit_softcap=values["final_logit_softcapping"] or 0.0,
        qkv_bias=bias,
        o_bias=bias,
        **features,
    )


class Layer:
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: DecoderConfig, rope: Rope, index: int) -> None:
        name = f"model.layers.{index}"
        self.norm1, self.norm2, self.norm3, self.norm4 = (
            norm(weights, f"{name}.{place}_layernorm", config)
            for place in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        self.attention = Attention.of_projections(weights, f"{name}.self_attn", config, rope, index)
        self.mlp = Mlp(weights, f"{name}.mlp", config, "tanh")

    def __call__(self, x: Value, step: Step) -> Value:
        x = x + self.norm2(self.attention(self.norm1(x), step))
        return x + self.norm4(self.mlp(self.norm3(x)))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer = Layer
