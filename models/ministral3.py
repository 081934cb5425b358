"""Ministral 3 (Mistral AI 2025): Mistral's wiring with YaRN, and queries that grow with the logarithm of their position
beyond the original context."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import DECODER_KEYS, DecoderConfig, Key, decoder_config, read_keys, read_rope
from nibblelm.models.llama import Model

__all__ = ["KEYS", "Model", "read_config"]

KEYS = {
    **DECODER_KEYS,
    "num_key_value_heads": Key(int, 8, minimum=1),
    "head_dim": Key(int, 128, minimum=1),
    "rms_norm_eps": Key(float, 1e-5, minimum=0.0),
    "sliding_window": Key(int, None, minimum=1),
}
_ABSENT = {  # what transformers takes where a file says nothing of its rotation
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of a Ministral 3 -> DecoderConfig."""
    values = read_keys(raw, KEYS, strict)
    section = raw.get("rope_scaling") or raw.get("rope_parameters")
    section = dict(_ABSENT if section is None else section)
    beta = Key(float, 0.0, optional=True, minimum=0.0).read("llama_4_scaling_beta", section)
    for own in ("llama_4_scaling_beta", "max_position_embeddings"):
        section.pop(own, None)
    rope = read_rope({**raw, "rope_parameters": section})
    period = Key(float, None, minimum=1.0).read("original_max_position_embeddings", section)
    growth = beta, period or float(values["max_position_embeddings"])
    windows = (values["sliding_window"] or 0,) * values["num_hidden_layers"]
    return decoder_config(raw, values, windows=windows, rope=rope, query_growth=growth)
