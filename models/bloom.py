"""BLOOM (BigScience 2022): ALiBi, LayerNorm also over the embedding, GELU, biases."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nibblelm.config import POSITIVE, DecoderConfig, Key, alibi_slopes, decoder_config, read_keys, renamed
from nibblelm.graph import Value
from nibblelm.layers import Attention, Decoder, PlainMlp, Rope, Step, Weights, heads_apart, norm

KEYS = {
    "vocab_size": POSITIVE,
    "hidden_size": Key(int, None, minimum=1),
    "n_embed": Key(int, None, minimum=1),  # older files' name of hidden_size
    "n_layer": POSITIVE,
    "n_head": Key(int, None, minimum=1),
    "num_attention_heads": Key(int, None, minimum=1),  # older files' name of n_head
    "seq_length": Key(int, 2048, minimum=1),
    "layer_norm_epsilon": Key(float, 1e-5, minimum=0.0),
    "apply_residual_connection_post_layernorm": Key(bool, False, optional=True),
    "tie_word_embeddings": Key(bool, True, optional=True),
}


def tensor_name(name: str) -> str:
    """The published files have the names of the model without its head."""
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


@dataclass(frozen=True)
class BloomConfig(DecoderConfig):
    """`normed`: what blocks add to is their normed input."""

    normed: bool = False


def read_config(raw: Mapping[str, Any], strict: bool = False) -> BloomConfig:
    """config.json of a BLOOM -> BloomConfig."""
    values = read_keys(raw, KEYS, strict)
    hidden = POSITIVE.read("hidden_size", {"hidden_size": values["hidden_size"] or values["n_embed"]})
    heads = POSITIVE.read("n_head", {"n_head": values["n_head"] or values["num_attention_heads"]})
    common = {
        "n_layer": "num_hidden_layers",
        "seq_length": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_attention_heads": heads}
    return decoder_config(
        raw,
        {**renamed(values, common), **sizes, "num_key_value_heads": None, "head_dim": None},
        BloomConfig,
        norm="layer",
        rope=None,
        alibi=alibi_slopes(heads),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        normed=values["apply_residual_connection_post_layernorm"],
    )


class Layer:
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: BloomConfig, rope: Rope, index: int) -> None:
        name = f"transformer.h.{index}"
        self.normed = config.normed
        self.norm1 = norm(weights, f"{name}.input_layernorm", config)
        self.norm2 = norm(weights, f"{name}.post_attention_layernorm", config)
        fused, o = f"{name}.self_attention.query_key_value", f"{name}.self_attention.dense"
        self.attention = Attention.of_fused(weights, fused, o, config, rope, index, heads_apart(config))
        mlp = f"{name}.mlp.dense"
        self.mlp = PlainMlp(weights, f"{mlp}_h_to_4h", f"{mlp}_4h_to_h", config, "tanh")

    def __call__(self, x: Value, step: Step) -> Value:
        normed = self.norm1(x)
        x = (normed if self.normed else x) + self.attention(normed, step)
        normed = self.norm2(x)
        return (normed if self.normed else x) + self.mlp(normed)


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer, table, final_norm = Layer, "transformer.word_embeddings", "transformer.ln_f"

    def __init__(self, weights: Weights, config: BloomConfig, positions: int) -> None:
        super().__init__(weights, config, positions)
        self.first_norm = norm(weights, "transformer.word_embeddings_layernorm", config)

    def embed(self, step: Step) -> Value:
        """What the first layer reads."""
        return self.first_norm(self.embedding(step.ids))
