"""ChatGLM2, ChatGLM3 and GLM-4 in their own layout (GLM Team 2024): few kv heads, interleaved rotary positions on half
of each head, gate and up in one matrix, a bias on q, k and v."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nibblelm.config import POSITIVE, DecoderConfig, Key, RopeConfig, decoder_config, read_keys, renamed
from nibblelm.errors import ConfigError
from nibblelm.layers import Attention, Decoder, Mlp, Rope, Weights, heads_apart, norm
from nibblelm.models import llama

KEYS = {
    "padded_vocab_size": POSITIVE,
    "vocab_size": Key(int, None),  # what padded_vocab_size says
    "hidden_size": POSITIVE,
    "ffn_hidden_size": POSITIVE,
    "num_layers": POSITIVE,
    "num_attention_heads": POSITIVE,
    "kv_channels": POSITIVE,
    "multi_query_attention": Key(bool, False, optional=True),
    "multi_query_group_num": Key(int, 1, minimum=1),
    "seq_length": POSITIVE,
    "layernorm_epsilon": Key(float, 1e-5, minimum=0.0),
    "rope_ratio": Key(float, 1.0, minimum=1e-6),
    "add_bias_linear": Key(bool, False, optional=True),
    "add_qkv_bias": Key(bool, False, optional=True),
    "rmsnorm": Key(bool, True, only=(True,), optional=True),
    "post_layer_norm": Key(bool, True, only=(True,), optional=True),
    "apply_residual_connection_post_layernorm": Key(bool, False, only=(False,), optional=True),
    "original_rope": Key(bool, True, only=(True,), optional=True),
    "interleaved_qkv": Key(bool, False, only=(False,), optional=True),
    "pre_seq_len": Key(int, None, only=(None,)),
    "quantization_bit": Key(int, 0, only=(0,), optional=True),
    "tie_word_embeddings": Key(bool, False, only=(False,), optional=True),
    "num_hidden_layers": Key(int, None),  # what num_layers says
}


@dataclass(frozen=True)
class ChatGLMConfig(DecoderConfig):
    """`grouped`: in the file q, k and v of a head follow each other."""

    grouped: bool = False


def variant(raw: Mapping[str, Any]) -> str:
    """The first ChatGLM-6B has this model_type too."""
    return "chatglm_6b" if "position_encoding_2d" in raw else "chatglm"


def _rope(raw: Mapping[str, Any], ratio: float) -> RopeConfig:
    """Contexts longer than in training: ChatGLM2 divides positions by rope_ratio, later ones multiply their base.

    Which one a file is, its name alone says where both have the same vocabulary.
    """
    name = str(raw.get("_name_or_path", "")).lower()
    if ratio != 1 and raw["padded_vocab_size"] == 65024 and "chatglm" not in name:
        raise ConfigError(
            f"config.json: rope_ratio {ratio} means one thing in ChatGLM2 and another in ChatGLM3, and _name_or_path "
            f"{name!r} names neither; write 'chatglm2-6b-32k' or 'chatglm3-6b-32k', say, there"
        )
    if "chatglm2" in name and ratio > 1:
        return RopeConfig("linear", 10000.0, {"factor": ratio}, 0.5)
    return RopeConfig("default", 10000.0 * ratio, {}, 0.5)


def read_config(raw: Mapping[str, Any], strict: bool = False) -> ChatGLMConfig:
    """config.json of a ChatGLM2 or later -> ChatGLMConfig."""
    values = read_keys(raw, KEYS, strict)
    common = {
        "padded_vocab_size": "vocab_size",
        "ffn_hidden_size": "intermediate_size",
        "num_layers": "num_hidden_layers",
        "kv_channels": "head_dim",
        "seq_length": "max_position_embeddings",
        "layernorm_epsilon": "rms_norm_eps",
    }
    several = values["multi_query_attention"]
    bias = values["add_bias_linear"]
    return decoder_config(
        raw,
        {**renamed(values, common), "num_key_value_heads": values["multi_query_group_num"] if several else None},
        ChatGLMConfig,
        rope=_rope(raw, values["rope_ratio"]),
        interleaved=True,
        grouped=not several,
        qkv_bias=values["add_qkv_bias"] or bias,
        o_bias=bias,
        mlp_bias=bias,
    )


class Layer(llama.Layer):
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: ChatGLMConfig, rope: Rope, index: int) -> None:
        name = f"transformer.encoder.layers.{index}"
        self.norm1 = norm(weights, f"{name}.input_layernorm", config)
        self.norm2 = norm(weights, f"{name}.post_attention_layernorm", config)
        qkv, o = f"{name}.self_attention.query_key_value", f"{name}.self_attention.dense"
        order = heads_apart(config) if config.grouped else None
        self.attention = Attention.of_fused(weights, qkv, o, config, rope, index, order)
        self.mlp = Mlp(weights, f"{name}.mlp", config, parts=("dense_h_to_4h", "dense_4h_to_h"))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer, table = Layer, "transformer.embedding.word_embeddings"
    final_norm, lm_head = "transformer.encoder.final_layernorm", "transformer.output_layer"
