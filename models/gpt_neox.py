"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): attention and feed-forward side by side, LayerNorm,
rotary positions on the first part of each head, GELU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nibblelm.config import GELU_FORMS, POSITIVE, ROPE_KEYS, DecoderConfig, Key, decoder_config, read_keys, read_rope
from nibblelm.graph import Value
from nibblelm.layers import Attention, Decoder, PlainMlp, Rope, Step, Weights, heads_apart, norm

KEYS = {
    **ROPE_KEYS,
    "vocab_size": POSITIVE,
    "hidden_size": POSITIVE,
    "intermediate_size": POSITIVE,
    "num_hidden_layers": POSITIVE,
    "num_attention_heads": POSITIVE,
    "max_position_embeddings": POSITIVE,
    "layer_norm_eps": Key(float, 1e-5, minimum=0.0),
    "hidden_act": Key(str, "gelu", only=tuple(GELU_FORMS)),
    "use_parallel_residual": Key(bool, True, optional=True),
    "attention_bias": Key(bool, True, optional=True),
    "rotary_pct": Key(float, 0.25, optional=True),
    "rotary_emb_base": Key(float, 10000.0, optional=True),
    "tie_word_embeddings": Key(bool, False, optional=True),
}


@dataclass(frozen=True)
class NeoXConfig(DecoderConfig):
    """`parallel`: attention and feed-forward read the same residual stream."""

    parallel: bool = True
    gelu: Literal["tanh", "erf"] = "erf"


def read_config(raw: Mapping[str, Any], strict: bool = False) -> NeoXConfig:
    """config.json of a GPT-NeoX -> NeoXConfig."""
    values = read_keys(raw, KEYS, strict)
    return decoder_config(
        raw,
        {**values, "num_key_value_heads": None, "head_dim": None},
        NeoXConfig,
        norm="layer",
        rope=read_rope({**raw, "rope_theta": None}, values["rotary_emb_base"], values["rotary_pct"]),
        parallel=values["use_parallel_residual"],
        gelu=GELU_FORMS[values["hidden_act"]],
        qkv_bias=values["attention_bias"],
        o_bias=values["attention_bias"],
        mlp_bias=True,
    )


class Layer:
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: NeoXConfig, rope: Rope, index: int) -> None:
        name = f"gpt_neox.layers.{index}"
        self.parallel = config.parallel
        self.norm1 = norm(weights, f"{name}.input_layernorm", config)
        self.norm2 = norm(weights, f"{name}.post_attention_layernorm", config)
        fused, o = f"{name}.attention.query_key_value", f"{name}.attention.dense"
        order = heads_apart(config)  # in the file q, k and v of a head follow each other
        self.attention = Attention.of_fused(weights, fused, o, config, rope, index, order)
        mlp = f"{name}.mlp.dense"
        self.mlp = PlainMlp(weights, f"{mlp}_h_to_4h", f"{mlp}_4h_to_h", config, config.gelu)

    def __call__(self, x: Value, step: Step) -> Value:
        if self.parallel:
            return x + (self.attention(self.norm1(x), step) + self.mlp(self.norm2(x)))
        x = x + self.attention(self.norm1(x), step)
        return x + self.mlp(self.norm2(x))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer, table, final_norm, lm_head = Layer, "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out"
