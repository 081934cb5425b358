"""StarCoder2 (Lozhkov et al. 2024): LayerNorm, rotary GQA, GELU, biases, and perhaps one window on every layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nibblelm.config import DECODER_KEYS, GELU_FORMS, DecoderConfig, Key, decoder_config, read_keys
from nibblelm.graph import Value
from nibblelm.layers import Attention, Decoder, PlainMlp, Rope, Step, Weights, norm

KEYS = {
    **{name: key for name, key in DECODER_KEYS.items() if name != "rms_norm_eps"},
    "num_key_value_heads": Key(int, 2, minimum=1),
    "norm_epsilon": Key(float, 1e-5, minimum=0.0),
    "norm_type": Key(str, "layer_norm", only=("layer_norm",), optional=True),
    "mlp_type": Key(str, "default", only=("default",), optional=True),
    "hidden_act": Key(str, "gelu_pytorch_tanh", only=tuple(GELU_FORMS)),
    "use_bias": Key(bool, True, optional=True),
    "sliding_window": Key(int, None, minimum=1),
    "tie_word_embeddings": Key(bool, True, optional=True),
}


@dataclass(frozen=True)
class StarCoderConfig(DecoderConfig):
    """`gelu`: the form of the feed-forward's activation."""

    gelu: Literal["tanh", "erf"] = "tanh"


def read_config(raw: Mapping[str, Any], strict: bool = False) -> StarCoderConfig:
    """config.json of a StarCoder2 -> StarCoderConfig."""
    values = read_keys(raw, KEYS, strict)
    bias = values["use_bias"]
    return decoder_config(
        raw,
        {**values, "layer_norm_eps": values["norm_epsilon"]},
        StarCoderConfig,
        norm="layer",
        windows=(values["sliding_window"] or 0,) * values["num_hidden_layers"],
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        gelu=GELU_FORMS[values["hidden_act"]],
    )


class Layer:
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: StarCoderConfig, rope: Rope, index: int) -> None:
        name = f"model.layers.{index}"
        self.norm1 = norm(weights, f"{name}.input_layernorm", config)
        self.norm2 = norm(weights, f"{name}.post_attention_layernorm", config)
        self.attention = Attention.of_projections(weights, f"{name}.self_attn", config, rope, index)
        self.mlp = PlainMlp(weights, f"{name}.mlp.c_fc", f"{name}.mlp.c_proj", config, config.gelu)

    def __call__(self, x: Value, step: Step) -> Value:
        x = x + self.attention(self.norm1(x), step)
        return x + self.mlp(self.norm2(x))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer = Layer
