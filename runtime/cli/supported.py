"""The families that run here and the switches of config.json that each understands, as README's table has them."""

import re

from nibblelm.config import ROPE_KEYS, Key
from nibblelm.models import NESTED, families, family
from nibblelm.rope_config import ROPE_TYPES

_SIZE = re.compile(r"eps$|epsilon$|(hidden|intermediate|vocab|inner|head_dim|ffn|n_embe?d|n_layers?|n_heads?|d_model)")
_COUNT = re.compile(r"num_.*(layers|heads)|kv_channels|positions|seq_len|max_position|group_num|max_length|ratio$")


def table() -> str:
    """Markdown: a row for each family, then what all have in common."""
    lines = ["| model_type | switches |", "| --- | --- |"]
    lines += [f"| {name} | {', '.join(switches(name)) or 'none'} |" for name in families()]
    inside = ", ".join(f"{whole} ({text})" for whole, text in NESTED.items())
    types = ", ".join(ROPE_TYPES)
    nested = f"Inside {inside} the text model runs, of the family that text_config names, if it names one."
    return "\n".join([*lines, "", f"`rope`: rotary positions {types}. {nested}"])


def switches(model_type: str) -> list[str]:
    """Keys that change what is computed, beyond sizes; with their values where not all are supported."""
    keys: dict[str, Key] = family({"model_type": model_type}).KEYS
    hidden = {"hidden_act", "activation_function", *ROPE_KEYS}  # which of these a family has, its paper says
    found = [_shown(name, key) for name, key in keys.items() if not (name in hidden or _is_size(name, key))]
    return sorted(found) + (["`rope`"] if "rope_parameters" in keys else [])


def _is_size(name: str, key: Key) -> bool:
    return key.type in (int, float) and key.only is None and bool(_SIZE.search(name) or _COUNT.search(name))


def _shown(name: str, key: Key) -> str:
    if key.only is None:
        return f"`{name}`"
    values = " or ".join("null" if value is None else str(value).lower() for value in key.only)
    return f"`{name}` {values}"
