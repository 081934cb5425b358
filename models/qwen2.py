"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's wiring with a bias on q, k, v and optional windows on late layers."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import DECODER_KEYS, WINDOW_KEYS, DecoderConfig, decoder_config, read_keys, window_layers
from nibblelm.models.llama import Model

__all__ = ["KEYS", "Model", "read_config"]

KEYS = {**DECODER_KEYS, **WINDOW_KEYS}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of a Qwen2 -> DecoderConfig."""
    values = read_keys(raw, KEYS, strict)
    return decoder_config(raw, values, windows=window_layers(values), qkv_bias=True)
