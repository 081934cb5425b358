"""Phi-1.5 and Phi-2 (Li et al. 2023): attention and feed-forward side by side on one LayerNorm, rotary positions on a
part of each head, GELU, a bias everywhere."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nibblelm.config import DECODER_KEYS, GELU_FORMS, DecoderConfig, Key, decoder_config, read_keys, read_rope
from nibblelm.graph import Value
from nibblelm.layers import Attention, Decoder, HeadLayerNorm, PlainMlp, Rope, Step, Weights, norm

KEYS = {
    **{name: key for name, key in DECODER_KEYS.items() if name not in ("rms_norm_eps", "head_dim")},
    "layer_norm_eps": Key(float, 1e-5, minimum=0.0),
    "hidden_act": Key(str, "gelu_new", only=tuple(GELU_FORMS)),
    "qk_layernorm": Key(bool, False, optional=True),
    "partial_rotary_factor": Key(float, 0.5, optional=True),
    "tie_word_embeddings": Key(bool, False, optional=True),
}


@dataclass(frozen=True)
class PhiConfig(DecoderConfig):
    """`head_norm`: LayerNorm on each head of q and k."""

    gelu: Literal["tanh", "erf"] = "tanh"
    head_norm: bool = False


def read_config(raw: Mapping[str, Any], strict: bool = False) -> PhiConfig:
    """config.json of a Phi -> PhiConfig."""
    values = read_keys(raw, KEYS, strict)
    return decoder_config(
        raw,
        {**values, "head_dim": None},
        PhiConfig,
        norm="layer",
        rope=read_rope(raw, default_partial=0.5),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        gelu=GELU_FORMS[values["hidden_act"]],
        head_norm=values["qk_layernorm"],
    )


class Layer:
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: PhiConfig, rope: Rope, index: int) -> None:
        name, size = f"model.layers.{index}", config.head_dim

        def head_norm(part: str) -> HeadLayerNorm:
            module = f"{name}.self_attn.{part}_layernorm"
            gain, bias = (weights.vector(f"{module}.{kind}", size) for kind in ("weight", "bias"))
            return HeadLayerNorm(gain, config, bias)

        norms = (head_norm("q"), head_norm("k")) if config.head_norm else None
        attention = f"{name}.self_attn"
        self.attention = Attention.of_projections(weights, attention, config, rope, index, "dense", head_norms=norms)
        self.mlp = PlainMlp(weights, f"{name}.mlp.fc1", f"{name}.mlp.fc2", config, config.gelu)
        self.norm = norm(weights, f"{name}.input_layernorm", config)

    def __call__(self, x: Value, step: Step) -> Value:
        normed = self.norm(x)
        return x + (self.attention(normed, step) + self.mlp(normed))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer, final_norm, head_bias = Layer, "model.final_layernorm", True
