"""ChatGLM-6B (Du et al. 2022; Zeng et al. 2022): two streams of positions, the place of the gap that is filled and the
place in it; tokens before the gap's begin see each other; LayerNorm, GELU, and residuals of the normed input times
sqrt(2 x layers)."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import POSITIVE, DecoderConfig, Gap, Key, RopeConfig, decoder_config, read_keys, renamed
from nibblelm.graph import Value
from nibblelm.layers import Attention, Decoder, PlainMlp, Rope, Step, Weights, heads_apart, norm

KEYS = {
    "vocab_size": POSITIVE,
    "hidden_size": POSITIVE,
    "inner_hidden_size": POSITIVE,
    "num_layers": POSITIVE,
    "num_attention_heads": POSITIVE,
    "max_sequence_length": POSITIVE,
    "layernorm_epsilon": Key(float, 1e-5, minimum=0.0),
    "position_encoding_2d": Key(bool, True, only=(True,)),
    "bos_token_id": Key(int),
    "gmask_token_id": Key(int),
    "mask_token_id": Key(int),
    "pre_seq_len": Key(int, None, only=(None,)),
    "quantization_bit": Key(int, 0, only=(0,), optional=True),
    "tie_word_embeddings": Key(bool, False, only=(False,), optional=True),
    "prefix_projection": Key(bool, False, optional=True),
}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of a ChatGLM-6B -> DecoderConfig."""
    values = read_keys(raw, KEYS, strict)
    common = {
        "inner_hidden_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "max_sequence_length": "max_position_embeddings",
        "layernorm_epsilon": "layer_norm_eps",
    }
    return decoder_config(
        raw,
        {**renamed(values, common), "num_key_value_heads": None, "head_dim": None},
        norm="layer",
        rope=RopeConfig("default", 10000.0, {}, 0.5),  # each stream rotates half of a head
        gap=Gap(values["bos_token_id"], (values["gmask_token_id"], values["mask_token_id"])),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )


class Layer:
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: DecoderConfig, rope: Rope, index: int) -> None:
        name = f"transformer.layers.{index}"
        self.alpha = (2 * config.layers) ** 0.5
        self.norm1 = norm(weights, f"{name}.input_layernorm", config)
        self.norm2 = norm(weights, f"{name}.post_attention_layernorm", config)
        fused, o = f"{name}.attention.query_key_value", f"{name}.attention.dense"
        self.attention = Attention.of_fused(weights, fused, o, config, rope, index, heads_apart(config))
        mlp = f"{name}.mlp.dense"
        self.mlp = PlainMlp(weights, f"{mlp}_h_to_4h", f"{mlp}_4h_to_h", config, "tanh")

    def __call__(self, x: Value, step: Step) -> Value:
        x = self.norm1(x)
        x = self.norm2(x.scale(self.alpha) + self.attention(x, step))
        return x.scale(self.alpha) + self.mlp(x)


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer, table, final_norm = Layer, "transformer.word_embeddings", "transformer.final_layernorm"
