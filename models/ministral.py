"""Ministral (Mistral AI 2024): Mistral's wiring with windows that `layer_types` gives to each layer."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import DECODER_KEYS, WINDOW_KEYS, DecoderConfig, Key, decoder_config, read_keys, window_layers
from nibblelm.models.llama import Model

__all__ = ["KEYS", "Model", "read_config"]

KEYS = {
    **DECODER_KEYS,
    "num_key_value_heads": Key(int, 8, minimum=1),
    "sliding_window": Key(int, None, minimum=1),
    "layer_types": WINDOW_KEYS["layer_types"],
}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of a Ministral -> DecoderConfig."""
    values = read_keys({"sliding_window": 4096, **raw}, KEYS, strict)  # where the key is absent; null is none
    in_use = {"use_sliding_window": True, "max_window_layers": 0}
    return decoder_config(raw, values, windows=window_layers({**values, **in_use}))
