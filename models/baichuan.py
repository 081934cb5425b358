"""Baichuan and Baichuan 2 (Yang et al. 2023): Llama's wiring with q, k and v in one matrix; rotary positions in the 7B
models, ALiBi in the 13B ones, whose config.json has no max_position_embeddings; in Baichuan 2, whose config.json has
z_loss_weight, a head of rows of length 1."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import DECODER_KEYS, DecoderConfig, Key, alibi_slopes, decoder_config, read_keys
from nibblelm.layers import Attention, Decoder, Mlp, Rope, Weights, norm
from nibblelm.models import llama

KEYS = {
    **{name: key for name, key in DECODER_KEYS.items() if name not in ("num_key_value_heads", "head_dim")},
    "max_position_embeddings": Key(int, None, minimum=1),
    "model_max_length": Key(int, 4096, minimum=1),
    "z_loss_weight": Key(float, None),
    "tie_word_embeddings": Key(bool, False, only=(False,), optional=True),
}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of a Baichuan -> DecoderConfig."""
    values = read_keys(raw, KEYS, strict)
    alibi = values["max_position_embeddings"] is None
    limit = values["model_max_length"] if alibi else values["max_position_embeddings"]
    sizes = {"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": limit}
    features = {"rope": None, "alibi": alibi_slopes(values["num_attention_heads"])} if alibi else {}
    unit_head = values["z_loss_weight"] is not None
    return decoder_config(raw, {**values, **sizes}, unit_head=unit_head, **features)


class Layer(llama.Layer):
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: DecoderConfig, rope: Rope, index: int) -> None:
        name = f"model.layers.{index}"
        self.norm1 = norm(weights, f"{name}.input_layernorm", config)
        self.norm2 = norm(weights, f"{name}.post_attention_layernorm", config)
        qkv, o = f"{name}.self_attn.W_pack", f"{name}.self_attn.o_proj"
        self.attention = Attention.of_fused(weights, qkv, o, config, rope, index)
        self.mlp = Mlp(weights, f"{name}.mlp", config)


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer = Layer
