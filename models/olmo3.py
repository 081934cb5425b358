"""OLMo 3 (OLMo Team 2025): OLMo 2's wiring with a sliding window on three of four layers, whose rotary positions are
not scaled."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import (
    WINDOW_KEYS,
    DecoderConfig,
    Key,
    decoder_config,
    read_keys,
    read_layer_ropes,
    window_layers,
)
from nibblelm.models import olmo2
from nibblelm.models.olmo2 import Model

__all__ = ["KEYS", "Model", "read_config"]

KEYS = {**olmo2.KEYS, "sliding_window": Key(int, 4096, minimum=1), "layer_types": WINDOW_KEYS["layer_types"]}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of an OLMo 3 -> DecoderConfig."""
    values = read_keys(raw, KEYS, strict)
    types = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(values["num_hidden_layers"])]
    windows = window_layers({**values, "use_sliding_window": True, "layer_types": values["layer_types"] or types})
    theta = Key(float, 500000.0, optional=True, minimum=1.0).read("rope_theta", raw)
    full, local = read_layer_ropes(raw, theta, theta)
    bias = values["attention_bias"]
    return decoder_config(raw, values, windows=windows, rope=full, window_rope=local, qkv_bias=bias, o_bias=bias)
