"""Gemma 3, its text model (Gemma Team 2025): Gemma 2's wiring with RMSNorm on each head of q and k, and rotary
positions of another base in the layers with a window."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import WINDOW_KEYS, DecoderConfig, Key, read_keys, read_layer_ropes, window_layers
from nibblelm.models import gemma2
from nibblelm.models.gemma2 import Model

__all__ = ["KEYS", "Model", "read_config"]

KEYS = {
    **gemma2.KEYS,
    # What the published files leave out.
    "vocab_size": Key(int, 262208, minimum=1),
    "num_attention_heads": Key(int, 8, minimum=1),
    "max_position_embeddings": Key(int, 131072, minimum=1),
    "sliding_window_pattern": Key(int, 6, minimum=1),
    "attn_logit_softcapping": Key(float, None, only=(None,)),  # transformers reads it and does not apply it
    "layer_types": WINDOW_KEYS["layer_types"],
    "rope_local_base_freq": Key(float, 10000.0, minimum=1.0),
}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of a Gemma 3 text model -> DecoderConfig."""
    values = read_keys(raw, KEYS, strict)
    pattern, layers = values["sliding_window_pattern"], values["num_hidden_layers"]
    types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    windows = window_layers({**values, "use_sliding_window": True, "layer_types": values["layer_types"] or types})
    full, local = read_layer_ropes(raw, 1e6, values["rope_local_base_freq"])
    return gemma2.gemma_config(raw, values, windows=windows, rope=full, window_rope=local, qk_norm=True)
