"""SmolLM3 (Bakouch et al. 2025): Llama's wiring, in which every fourth layer is not rotated."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import WINDOW_KEYS, DecoderConfig, Key, decoder_config, read_keys, read_rope, window_layers
from nibblelm.errors import ConfigError
from nibblelm.models import llama
from nibblelm.models.llama import Model

__all__ = ["KEYS", "Model", "read_config"]

KEYS = {
    **llama.KEYS,
    "num_key_value_heads": Key(int, 4, minimum=1),
    "tie_word_embeddings": Key(bool, True, optional=True),
    "no_rope_layers": Key(list, None),
    "no_rope_layer_interval": Key(int, 4, minimum=1),
    "use_sliding_window": WINDOW_KEYS["use_sliding_window"],
    "sliding_window": WINDOW_KEYS["sliding_window"],
    "layer_types": WINDOW_KEYS["layer_types"],
    "max_window_layers": WINDOW_KEYS["max_window_layers"],  # not read by anybody
}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of a SmolLM3 -> DecoderConfig."""
    values = read_keys(raw, KEYS, strict)
    layers, interval = values["num_hidden_layers"], values["no_rope_layer_interval"]
    rotated = values["no_rope_layers"] or [int((i + 1) % interval != 0) for i in range(layers)]  # 1: with rope
    if len(rotated) != layers or any(flag not in (0, 1) for flag in rotated):
        raise ConfigError(f"config.json: no_rope_layers must be 0 or 1 for each of {layers} layers, got {rotated!r}")
    sliding = values["use_sliding_window"] and values["sliding_window"] is not None
    types = ["sliding_attention" if sliding and not flag else "full_attention" for flag in rotated]
    bias = values["attention_bias"]
    return decoder_config(
        raw,
        values,
        windows=window_layers({**values, "layer_types": values["layer_types"] or types}),
        rope=read_rope(raw, 2000000.0),
        unrotated=tuple(i for i, flag in enumerate(rotated) if not flag),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=values["mlp_bias"],
    )
