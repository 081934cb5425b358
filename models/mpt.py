"""MPT (MosaicML 2023): ALiBi, LayerNorm without bias, GELU, no biases."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import POSITIVE, DecoderConfig, Key, decoder_config, read_keys, renamed
from nibblelm.errors import ConfigError
from nibblelm.graph import Value
from nibblelm.layers import Attention, Decoder, PlainMlp, Rope, Step, Weights, norm

KEYS = {
    "vocab_size": POSITIVE,
    "d_model": POSITIVE,
    "n_layers": POSITIVE,
    "n_heads": POSITIVE,
    "max_seq_len": POSITIVE,
    "expansion_ratio": Key(int, 4, only=(4,)),
    "layer_norm_epsilon": Key(float, 1e-5, minimum=0.0),
    "norm_type": Key(str, "low_precision_layernorm", only=("low_precision_layernorm", "layernorm"), optional=True),
    "no_bias": Key(bool, True, only=(True,), optional=True),
    "attn_config": Key(dict, {}, optional=True),
    "logit_scale": Key(float, None, only=(None,)),
    "embedding_fraction": Key(float, 1.0, only=(1.0,), optional=True),
    "learned_pos_emb": Key(bool, True, optional=True),  # not with ALiBi
    "tie_word_embeddings": Key(bool, True, optional=True),
}
ATTENTION_KEYS = {
    "attn_type": Key(str, "multihead_attention", only=("multihead_attention",)),
    "alibi": Key(bool, True, only=(True,)),
    "alibi_bias_max": Key(int, 8, only=(8,)),
    "clip_qkv": Key(float, None, only=(None,)),
    "softmax_scale": Key(float, None, minimum=1e-9),
    "qk_ln": Key(bool, False, only=(False,)),
    "prefix_lm": Key(bool, False, only=(False,)),
    "attn_uses_sequence_id": Key(bool, False, only=(False,)),
    "attn_impl": Key(str, "torch"),
    "attn_pdrop": Key(float, 0.0),
}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of an MPT -> DecoderConfig. Raises ConfigError also for keys of its attn_config."""
    values = read_keys(raw, KEYS, strict)
    section: Mapping[str, Any] = values["attn_config"]
    try:
        attention = read_keys({"model_type": "mpt", **section}, ATTENTION_KEYS, strict)
    except ConfigError as error:
        raise ConfigError(f"{error} (in attn_config)") from error
    common = {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    sizes = {"intermediate_size": 4 * values["d_model"], "num_key_value_heads": None, "head_dim": None}
    return decoder_config(
        raw,
        {**renamed(values, common), **sizes},
        norm="layer_without_bias",
        rope=None,
        alibi=_slopes(values["n_heads"]),
        attention_scale=attention["softmax_scale"],
    )


def _slopes(heads: int) -> tuple[float, ...]:
    """MPT's own ALiBi slopes: of the next larger power of two of heads, its even ones first if there are too many."""
    above = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-8.0 * (i + 1) / above) for i in range(above)]
    return tuple(slopes if above == heads else (slopes[1::2] + slopes[::2])[:heads])


class Layer:
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: DecoderConfig, rope: Rope, index: int) -> None:
        name = f"transformer.blocks.{index}"
        self.norm1 = norm(weights, f"{name}.norm_1", config)
        self.norm2 = norm(weights, f"{name}.norm_2", config)
        qkv, o = f"{name}.attn.Wqkv", f"{name}.attn.out_proj"
        self.attention = Attention.of_fused(weights, qkv, o, config, rope, index)
        self.mlp = PlainMlp(weights, f"{name}.ffn.up_proj", f"{name}.ffn.down_proj", config, "erf")

    def __call__(self, x: Value, step: Step) -> Value:
        x = x + self.attention(self.norm1(x), step)
        return x + self.mlp(self.norm2(x))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer, table, final_norm = Layer, "transformer.wte", "transformer.norm_f"
