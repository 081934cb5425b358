"""Gemma (Gemma Team 2024): Llama's wiring with a gain of 1 + weight, a scaled embedding and GeGLU."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import DECODER_KEYS, DecoderConfig, Key, decoder_config, read_keys
from nibblelm.layers import Attention, Decoder, Mlp, Rope, Weights, norm
from nibblelm.models import llama

_GELU = ("gelu_pytorch_tanh", "gelu")  # the first files say gelu and mean its tanh form
KEYS = {
    **DECODER_KEYS,
    "num_key_value_heads": Key(int, 16, minimum=1),
    "head_dim": Key(int, 256, minimum=1),
    "hidden_act": Key(str, "gelu_pytorch_tanh", only=_GELU, optional=True),
    "hidden_activation": Key(str, "gelu_pytorch_tanh", only=_GELU[:1], optional=True),
    "tie_word_embeddings": Key(bool, True, optional=True),
    "attention_bias": Key(bool, False, optional=True),
    "use_bidirectional_attention": Key(bool, False, only=(False,), optional=True),
}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of a Gemma -> DecoderConfig."""
    values = read_keys(raw, KEYS, strict)
    multiplier, bias = values["hidden_size"] ** 0.5, values["attention_bias"]
    return decoder_config(raw, values, norm="rms_plus_one", embedding_multiplier=multiplier, qkv_bias=bias, o_bias=bias)


class Layer(llama.Layer):
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: DecoderConfig, rope: Rope, index: int) -> None:
        name = f"model.layers.{index}"
        self.norm1 = norm(weights, f"{name}.input_layernorm", config)
        self.norm2 = norm(weights, f"{name}.post_attention_layernorm", config)
        self.attention = Attention.of_projections(weights, f"{name}.self_attn", config, rope, index)
        self.mlp = Mlp(weights, f"{name}.mlp", config, "tanh")


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer = Layer
