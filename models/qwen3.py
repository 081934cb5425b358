"""Qwen3 (Yang et al. 2025): Llama's wiring with RMSNorm on each head of q and k."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import (
    DECODER_KEYS,
    WINDOW_KEYS,
    DecoderConfig,
    Key,
    decoder_config,
    read_keys,
    window_layers,
)
from nibblelm.models.llama import Model

__all__ = ["KEYS", "Model", "read_config"]

KEYS = {**DECODER_KEYS, **WINDOW_KEYS, "attention_bias": Key(bool, False, optional=True)}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of a Qwen3 -> DecoderConfig."""
    values = read_keys(raw, KEYS, strict)
    bias = values["attention_bias"]
    return decoder_config(raw, values, windows=window_layers(values), qk_norm=True, qkv_bias=bias, o_bias=bias)
