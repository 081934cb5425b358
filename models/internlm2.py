"""InternLM2 (Cai et al. 2024): Llama's mathematics under names of its own, with q, k and v in one matrix, kv head after
kv head."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import DECODER_KEYS, DecoderConfig, Key, decoder_config, read_keys
from nibblelm.layers import Attention, Decoder, Mlp, Rope, Weights, heads_apart, norm
from nibblelm.models import llama

KEYS = {**DECODER_KEYS, "bias": Key(bool, True, optional=True)}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of an InternLM2 -> DecoderConfig."""
    values = read_keys(raw, KEYS, strict)
    return decoder_config(raw, values, qkv_bias=values["bias"], o_bias=values["bias"])


class Layer(llama.Layer):
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: DecoderConfig, rope: Rope, index: int) -> None:
        name = f"model.layers.{index}"
        self.norm1 = norm(weights, f"{name}.attention_norm", config)
        self.norm2 = norm(weights, f"{name}.ffn_norm", config)
        qkv, o = f"{name}.attention.wqkv", f"{name}.attention.wo"
        self.attention = Attention.of_fused(weights, qkv, o, config, rope, index, heads_apart(config))
        self.mlp = Mlp(weights, f"{name}.feed_forward", config, parts=("w1", "w3", "w2"))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer, table, lm_head = Layer, "model.tok_embeddings", "output"
