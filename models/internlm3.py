"""InternLM3 (InternLM Team 2025): Llama's wiring with biases of q, k, v on their own switch."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import DECODER_KEYS, DecoderConfig, Key, decoder_config, read_keys
from nibblelm.models.llama import Model

__all__ = ["KEYS", "Model", "read_config"]

KEYS = {
    **DECODER_KEYS,
    "qkv_bias": Key(bool, False, optional=True),
    "bias": Key(bool, False, optional=True),
}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of an InternLM3 -> DecoderConfig."""
    values = read_keys(raw, KEYS, strict)
    return decoder_config(raw, values, qkv_bias=values["qkv_bias"], o_bias=values["bias"], mlp_bias=values["bias"])
