"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama's wiring with q, k, v in one matrix, gate and up in another, and perhaps a
part of each head rotated."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import DECODER_KEYS, DecoderConfig, Key, decoder_config, read_keys, read_rope
from nibblelm.layers import Attention, Decoder, Mlp, Rope, Weights, norm
from nibblelm.models import llama

KEYS = {
    **DECODER_KEYS,
    "rms_norm_eps": Key(float, 1e-5, minimum=0.0),
    "sliding_window": Key(int, None, minimum=1),
    "original_max_position_embeddings": Key(int, 4096, minimum=1),
    "partial_rotary_factor": Key(float, 1.0, optional=True),
    "attention_bias": Key(bool, False, only=(False,), optional=True),
}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of a Phi-3 -> DecoderConfig."""
    values = read_keys(raw, KEYS, strict)
    windows = (values["sliding_window"] or 0,) * values["num_hidden_layers"]
    section = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    for name in ("rope_type", "type"):
        if section.get(name) in ("su", "yarn"):  # what the first files call longrope
            section[name] = "longrope"
    original = {"original_max_position_embeddings": values["original_max_position_embeddings"]}
    rope = read_rope({**raw, **original, "rope_parameters": section}, default_partial=1.0)
    return decoder_config(raw, values, windows=windows, rope=rope)


class Layer(llama.Layer):
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: DecoderConfig, rope: Rope, index: int) -> None:
        name = f"model.layers.{index}"
        self.norm1 = norm(weights, f"{name}.input_layernorm", config)
        self.norm2 = norm(weights, f"{name}.post_attention_layernorm", config)
        qkv, o = f"{name}.self_attn.qkv_proj", f"{name}.self_attn.o_proj"
        self.attention = Attention.of_fused(weights, qkv, o, config, rope, index)
        self.mlp = Mlp(weights, f"{name}.mlp", config, parts=("gate_up_proj", "down_proj"))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer = Layer
