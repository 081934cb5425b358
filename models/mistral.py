"""Mistral (Jiang et al. 2023): Llama's wiring with one sliding attention window on every layer."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import DECODER_KEYS, DecoderConfig, Key, decoder_config, read_keys
from nibblelm.models.llama import Model

__all__ = ["KEYS", "Model", "read_config"]

KEYS = {**DECODER_KEYS, "sliding_window": Key(int, None, minimum=1)}
_ABSENT = {"num_key_value_heads": 8, "sliding_window": 4096}  # null is something else


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of a Mistral -> DecoderConfig."""
    values = read_keys({**_ABSENT, **raw}, KEYS, strict)
    windows = (values["sliding_window"] or 0,) * values["num_hidden_layers"]
    return decoder_config(raw, values, windows=windows)
