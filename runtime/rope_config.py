"""What config.json says of rotary embedding, in either layout."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nibblelm.config_keys import POSITIVE, Key
from nibblelm.errors import ConfigError

# What `read_rope` reads.
ROPE_KEYS: dict[str, Key] = {
    "rope_parameters": Key(dict, None),
    "rope_scaling": Key(dict, None),
    "rope_theta": Key(float, None),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and scaling. `parameters` holds the numbers of its type (factor, beta_fast ...), `partial`
    the share of a head's elements, from the first on, that is rotated."""

    type: str
    theta: float
    parameters: Mapping[str, Any]
    partial: float = 1.0

    @property
    def chooses(self) -> bool:
        """Whether the angles depend on the length of a request's prompt."""
        return self.type in ("dynamic", "longrope")

    def choice(self, prompt: int) -> int:
        """What a prompt of that many tokens chooses: 0 up to the original context, as in training; beyond it 1, or for
        `dynamic`, whose base grows with the prompt, its length."""
        if not self.chooses or prompt <= self.parameters["original_max_position_embeddings"]:
            return 0
        return prompt if self.type == "dynamic" else 1

    def width(self, head_dim: int) -> int:
        """Elements of a head that are rotated: cut to whole ones, but not below r of a share that was r / head_dim."""
        return int(head_dim * self.partial + 1e-6)


_ROPE_NUMBERS: dict[str, dict[str, Key]] = {
    "default": {},
    "linear": {"factor": Key(float, minimum=1.0)},
    "llama3": {
        "factor": Key(float, minimum=1.0),
        "low_freq_factor": Key(float),
        "high_freq_factor": Key(float),
        "original_max_position_embeddings": Key(float, minimum=1.0),
    },
    "dynamic": {
        "factor": Key(float, minimum=1.0),
        "original_max_position_embeddings": Key(float, minimum=1.0),
    },
    "longrope": {
        "factor": Key(float, None, minimum=1.0),
        "original_max_position_embeddings": Key(float, minimum=2.0),
        "short_factor": Key(list),
        "long_factor": Key(list),
        "attention_factor": Key(float, None),
    },
    "yarn": {
        "factor": Key(float, minimum=1.0),
        "original_max_position_embeddings": Key(float, minimum=1.0),
        "attention_factor": Key(float, None),
        "beta_fast": Key(float, None),
        "beta_slow": Key(float, None),
        "mscale": Key(float, None),
        "mscale_all_dim": Key(float, None),
        "truncate": Key(bool, True, optional=True),
    },
}


ROPE_TYPES = tuple(sorted(_ROPE_NUMBERS))
"""The kinds of rotary positions that `read_rope` takes."""


def read_rope(
    raw: Mapping[str, Any], default_theta: float = 10000.0, default_partial: float | None = None
) -> RopeConfig:
    """The rotary parameters of either layout. Unknown `rope_type` or unknown keys of one are errors.

    default_partial  what a family that may rotate a part of each head rotates where nothing is said; None: all, always
    """
    section = raw.get("rope_parameters")
    if section is None:
        section = raw.get("rope_scaling") or {}
    if not isinstance(section, dict):
        raise ConfigError(f"config.json: rope_parameters / rope_scaling must be an object, got {section!r}")
    section = dict(section)
    kind = section.pop("rope_type", None)
    legacy = section.pop("type", None)
    kind = kind or legacy or "default"
    if not isinstance(kind, str) or kind not in _ROPE_NUMBERS:
        raise ConfigError(f"config.json: rope_type {kind!r} is not supported; supported: {sorted(_ROPE_NUMBERS)}")
    theta = Key(float, None).read("rope_theta", section)
    section.pop("rope_theta", None)
    if theta is None:
        theta = Key(float, default_theta, optional=True).read("rope_theta", raw)
    stated = section if default_partial is None or "partial_rotary_factor" in section else raw
    partial = Key(float, default_partial or 1.0, optional=True).read("partial_rotary_factor", stated)
    if default_partial is None and partial != 1.0:
        raise ConfigError("config.json: partial_rotary_factor other than 1.0 is not supported for this model_type")
    if not 0 < partial <= 1:
        raise ConfigError(f"config.json: partial_rotary_factor must be above 0 and at most 1, got {partial}")
    section.pop("partial_rotary_factor", None)
    if theta <= 0:
        raise ConfigError(f"config.json: rope_theta must be positive, got {theta}")
    return RopeConfig(kind, theta, _rope_numbers(kind, section, raw), partial)


def _rope_numbers(kind: str, section: dict[str, Any], raw: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a kind of scaling, those that are left out from the rest of config.json."""
    original, limit = "original_max_position_embeddings", raw.get("max_position_embeddings")
    if kind == "longrope" and raw.get(original) is not None:
        section[original] = raw[original]
    if kind == "dynamic" or (kind in ("yarn", "longrope") and section.get(original) is None):
        section[original] = limit
    if kind == "linear":
        section.pop(original, None)  # does not depend on it
    section.pop("finetuned", None)  # says how the file was made
    keys = _ROPE_NUMBERS[kind]
    unknown = sorted(set(section) - set(keys)) if kind != "default" else []
    if unknown:
        raise ConfigError(f"config.json: {kind} rope has unknown keys {unknown}; known: {sorted(keys)}")
    numbers = {name: key.read(name, section) for name, key in keys.items()}
    for name in ("short_factor", "long_factor") if kind == "longrope" else ():
        if not all(type(x) in (int, float) and 0 < x < math.inf for x in numbers[name]):
            raise ConfigError(f"config.json: {name} must be positive numbers, got {numbers[name]!r}")
    if kind == "longrope" and numbers["factor"] is None:
        numbers["factor"] = POSITIVE.read("max_position_embeddings", raw) / numbers[original]
    return numbers


def read_layer_ropes(raw: Mapping[str, Any], theta: float, window_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """The rotary parameters of layers that see everything, and of those with a window, which older files do not scale.

    theta, window_theta  their bases where nothing is said
    """
    section = raw.get("rope_parameters")
    if not isinstance(section, dict) or not {"full_attention", "sliding_attention"} & set(section):
        return read_rope(raw, theta), RopeConfig("default", window_theta, {})

    def of(kind: str, default: float) -> RopeConfig:
        own = section.get(kind) or {}
        if isinstance(own, dict) and False in (own.get("truncate"), section.get("truncate")):
            raise ConfigError("config.json: truncate false is not supported where kinds of layers rotate differently")
        return read_rope({**raw, "rope_parameters": own, "rope_theta": None}, default)

    return of("full_attention", theta), of("sliding_attention", window_theta)
