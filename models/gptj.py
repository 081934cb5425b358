"""GPT-J (Wang & Komatsuzaki 2021): attention and feed-forward side by side on one LayerNorm, interleaved rotary
positions on the first part of each head, GELU, a head with a bias."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nibblelm.config import GELU_FORMS, POSITIVE, DecoderConfig, Key, RopeConfig, decoder_config, read_keys, renamed
from nibblelm.graph import Value
from nibblelm.layers import Attention, Decoder, PlainMlp, Rope, Step, Weights, norm

KEYS = {
    "vocab_size": POSITIVE,
    "n_embd": POSITIVE,
    "n_layer": POSITIVE,
    "n_head": POSITIVE,
    "n_positions": POSITIVE,
    "n_inner": Key(int, None, minimum=1),
    "rotary_dim": Key(int, None, minimum=2),
    "rotary": Key(bool, True, only=(True,), optional=True),
    "activation_function": Key(str, "gelu_new", only=tuple(GELU_FORMS)),
    "layer_norm_epsilon": Key(float, 1e-5, minimum=0.0),
    "scale_attn_weights": Key(bool, True, only=(True,), optional=True),
    "tie_word_embeddings": Key(bool, False, optional=True),
}


@dataclass(frozen=True)
class GPTJConfig(DecoderConfig):
    """`gelu`: the form of the feed-forward's activation."""

    gelu: Literal["tanh", "erf"] = "tanh"


def read_config(raw: Mapping[str, Any], strict: bool = False) -> GPTJConfig:
    """config.json of a GPT-J -> GPTJConfig."""
    values = read_keys(raw, KEYS, strict)
    hidden, heads = values["n_embd"], values["n_head"]
    common = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    sizes = {"intermediate_size": values["n_inner"] or 4 * hidden, "num_key_value_heads": None, "head_dim": None}
    part = (values["rotary_dim"] or hidden // heads) / (hidden // heads)
    return decoder_config(
        raw,
        {**renamed(values, common), **sizes},
        GPTJConfig,
        norm="layer",
        rope=RopeConfig("default", 10000.0, {}, part),
        interleaved=True,
        mlp_bias=True,
        gelu=GELU_FORMS[values["activation_function"]],
    )


class Layer:
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: GPTJConfig, rope: Rope, index: int) -> None:
        name = f"transformer.h.{index}"
        self.norm = norm(weights, f"{name}.ln_1", config)
        self.attention = self.attend(weights, f"{name}.attn", config, rope, index)
        self.mlp = PlainMlp(weights, f"{name}.mlp.fc_in", f"{name}.mlp.fc_out", config, config.gelu)

    def attend(self, weights: Weights, name: str, config: GPTJConfig, rope: Rope, index: int) -> Attention:
        """The attention, from projections of their own."""
        return Attention.of_projections(weights, name, config, rope, index, "out_proj")

    def __call__(self, x: Value, step: Step) -> Value:
        normed = self.norm(x)
        return x + (self.attention(normed, step) + self.mlp(normed))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer, table, final_norm, head_bias = Layer, "transformer.wte", "transformer.ln_f", True
