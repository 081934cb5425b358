"""Falcon (Almazrouei et al. 2023): in the 7B layout attention with one kv head and feed-forward side by side on one
LayerNorm, in the 40B layout with a LayerNorm each and several kv heads; the RW layout is sequential, with ALiBi."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from nibblelm.config import (
    GELU_FORMS,
    POSITIVE,
    ROPE_KEYS,
    DecoderConfig,
    Key,
    alibi_slopes,
    decoder_config,
    read_keys,
    read_rope,
    renamed,
)
from nibblelm.errors import ConfigError
from nibblelm.graph import Value
from nibblelm.layers import Attention, Decoder, PlainMlp, Rope, Step, Weights, heads_apart, norm

KEYS = {
    **ROPE_KEYS,
    "vocab_size": POSITIVE,
    "hidden_size": POSITIVE,
    "num_hidden_layers": POSITIVE,
    "num_attention_heads": POSITIVE,
    "num_kv_heads": Key(int, None, minimum=1),
    "ffn_hidden_size": Key(int, None, minimum=1),
    "max_position_embeddings": Key(int, 2048, minimum=1),
    "layer_norm_epsilon": Key(float, 1e-5, minimum=0.0),
    "activation": Key(str, "gelu", only=tuple(GELU_FORMS), optional=True),
    "alibi": Key(bool, False, optional=True),
    "bias": Key(bool, False, optional=True),
    "multi_query": Key(bool, True, optional=True),
    "parallel_attn": Key(bool, True, optional=True),
    "new_decoder_architecture": Key(bool, False, optional=True),
    "num_ln_in_parallel_attn": Key(int, None, only=(None, 1, 2)),
    "tie_word_embeddings": Key(bool, True, optional=True),
    "apply_residual_connection_post_layernorm": Key(bool, False, only=(False,), optional=True),
}
UNOPENED = "its projections are a class of their own, which compressed-tensors does not know"


@dataclass(frozen=True)
class FalconConfig(DecoderConfig):
    """`parallel`: attention and feed-forward read the same residual stream; `norms`: of it, 1 or 2."""

    parallel: bool = True
    norms: int = 1
    gelu: Literal["tanh", "erf"] = "erf"


def read_config(raw: Mapping[str, Any], strict: bool = False) -> FalconConfig:
    """config.json of a Falcon -> FalconConfig."""
    values = read_keys(raw, KEYS, strict)
    hidden, heads, new = values["hidden_size"], values["num_attention_heads"], values["new_decoder_architecture"]
    one = values["multi_query"] and not new
    kv_heads = 1 if one else (values["num_kv_heads"] or heads) if new else heads
    sizes = {
        "intermediate_size": values["ffn_hidden_size"] or 4 * hidden,
        "num_key_value_heads": kv_heads,
        "head_dim": None,
    }
    parallel, alibi, bias = values["parallel_attn"], values["alibi"], values["bias"]
    both = new and values["num_ln_in_parallel_attn"] != 1
    if (new and not parallel) or (not new and values["num_ln_in_parallel_attn"] == 2):
        raise ConfigError(
            "config.json: new_decoder_architecture is supported with parallel_attn alone, and two norms "
            "(num_ln_in_parallel_attn) with new_decoder_architecture alone"
        )
    size = hidden // heads
    # Scores are divided by sqrt(head_dim) after the slopes were added; these are in bf16.
    slopes = torch.tensor(alibi_slopes(heads)).bfloat16().float() * size**-0.5
    return decoder_config(
        raw,
        {**renamed(values, {"layer_norm_epsilon": "layer_norm_eps"}), **sizes},
        FalconConfig,
        norm="layer",
        rope=None if alibi else read_rope(raw),
        alibi=tuple(slopes.tolist()) if alibi else (),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        parallel=parallel,
        norms=2 if both or not parallel else 1,
        gelu=GELU_FORMS[values["activation"]],
    )


class Layer:
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: FalconConfig, rope: Rope, index: int) -> None:
        name = f"transformer.h.{index}"
        self.parallel = config.parallel
        modules = ["input_layernorm", "post_attention_layernorm"]
        if config.parallel:
            modules = ["ln_attn", "ln_mlp"] if config.norms == 2 else ["input_layernorm"]
        self.norms = [norm(weights, f"{name}.{module}", config) for module in modules]
        fused, o = f"{name}.self_attention.query_key_value", f"{name}.self_attention.dense"
        self.attention = Attention.of_fused(weights, fused, o, config, rope, index, heads_apart(config))
        mlp = f"{name}.mlp.dense"
        self.mlp = PlainMlp(weights, f"{mlp}_h_to_4h", f"{mlp}_4h_to_h", config, config.gelu)

    def __call__(self, x: Value, step: Step) -> Value:
        normed = self.norms[0](x)
        if self.parallel:
            return x + (self.attention(normed, step) + self.mlp(self.norms[1](x) if self.norms[1:] else normed))
        x = x + self.attention(normed, step)
        return x + self.mlp(self.norms[1](x))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer, table, final_norm = Layer, "transformer.word_embeddings", "transformer.ln_f"
