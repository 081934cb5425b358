"""Command R7B (Cohere 2024): Command R's wiring with a sliding window on three of four layers; the others see all and
are not rotated."""

from collections.abc import Mapping
from typing import Any

from nibblelm.config import WINDOW_KEYS, Key, read_keys, window_layers
from nibblelm.models import cohere
from nibblelm.models.cohere import CohereConfig, Model, cohere_config

__all__ = ["KEYS", "Model", "read_config"]

KEYS = {
    **{name: key for name, key in cohere.KEYS.items() if name != "use_qk_norm"},
    "sliding_window": Key(int, 4096, minimum=1),
    "sliding_window_pattern": Key(int, 4, minimum=1),
    "layer_types": WINDOW_KEYS["layer_types"],
    "rotary_pct": Key(float, 1.0, only=(1.0,), optional=True),
    "order_of_interleaved_layers": Key(str, "local_attn_first", only=("local_attn_first",), optional=True),
    "position_embedding_type": Key(str, "rope_gptj", only=("rope_gptj",), optional=True),
    "use_gated_activation": Key(bool, True, only=(True,), optional=True),
    "use_parallel_block": Key(bool, True, only=(True,), optional=True),
}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> CohereConfig:
    """config.json of a Command R7B -> CohereConfig."""
    values = read_keys(raw, KEYS, strict)
    pattern, layers = values["sliding_window_pattern"], values["num_hidden_layers"]
    types = ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)]
    windows = window_layers({**values, "use_sliding_window": True, "layer_types": values["layer_types"] or types})
    unrotated = tuple(i for i in range(layers) if not windows[i])
    return cohere_config(raw, values, windows=windows, unrotated=unrotated)
