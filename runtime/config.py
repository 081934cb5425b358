"""The strict reader of config.json.

Each models/<type>.py declares the typed keys that it accepts; `read_keys` hands back their values. A known key with an
unsupported value is an error before any weight is read; an unknown key is one warning, an error with `strict`.
Both layouts are read: transformers 5 (`rope_parameters`, `dtype`) and 4 (`rope_theta` + `rope_scaling`, `torch_dtype`).
"""

import builtins
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from nibblelm.config_keys import MAX_POSITIONS, POSITIVE, Key, read_keys
from nibblelm.errors import ConfigError
from nibblelm.rope_config import ROPE_KEYS, RopeConfig, read_layer_ropes, read_rope

__all__ = [
    "DECODER_KEYS",
    "GELU_FORMS",
    "MAX_POSITIONS",
    "POSITIVE",
    "ROPE_KEYS",
    "WINDOW_KEYS",
    "DecoderConfig",
    "Gap",
    "Key",
    "Norm",
    "RopeConfig",
    "alibi_slopes",
    "decoder_config",
    "read_keys",
    "read_layer_ropes",
    "read_rope",
    "renamed",
    "token_ids",
    "window_layers",
]

Norm = Literal["rms", "rms_plus_one", "layer", "layer_without_bias"]
"""The norms of a decoder: RMSNorm with a gain, or with 1 + gain; LayerNorm."""

# The forms of GELU that config.json names.
GELU_FORMS: dict[str, Literal["tanh", "erf"]] = {
    "gelu": "erf",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
}

# The keys shared by decoders with rotary attention, RMSNorm and SwiGLU.
DECODER_KEYS: dict[str, Key] = {
    **ROPE_KEYS,
    "vocab_size": POSITIVE,
    "hidden_size": POSITIVE,
    "intermediate_size": POSITIVE,
    "num_hidden_layers": POSITIVE,
    "num_attention_heads": POSITIVE,
    "num_key_value_heads": Key(int, None, minimum=1),
    "head_dim": Key(int, None, minimum=1),
    "max_position_embeddings": POSITIVE,
    "rms_norm_eps": Key(float, 1e-6, minimum=0.0),
    "hidden_act": Key(str, "silu", only=("silu", "swish")),
    "tie_word_embeddings": Key(bool, False, optional=True),
}

# Qwen's sliding-window keys: layers from max_window_layers on have the window when it is in use.
WINDOW_KEYS: dict[str, Key] = {
    "use_sliding_window": Key(bool, False, optional=True),
    "sliding_window": Key(int, None, minimum=1),
    "max_window_layers": Key(int, 28, optional=True, minimum=0),
    "layer_types": Key(list, None),
}


def window_layers(values: Mapping[str, Any]) -> tuple[int, ...]:
    """The attention window of each layer from `WINDOW_KEYS`, 0 for full attention."""
    layers = values["num_hidden_layers"]
    window = values["sliding_window"] if values["use_sliding_window"] else None
    types = values["layer_types"] or [
        "sliding_attention" if window and i >= values["max_window_layers"] else "full_attention" for i in range(layers)
    ]
    supported = ("full_attention", "sliding_attention")
    if len(types) != layers or any(t not in supported for t in types):
        raise ConfigError(f"config.json: layer_types must name one of {list(supported)} for each of {layers} layers")
    if window is None and "sliding_attention" in types:
        raise ConfigError("config.json: layer_types has sliding_attention, but sliding_window is not in use")
    return tuple(int(window) if window and t == "sliding_attention" else 0 for t in types)


@dataclass(frozen=True)
class Gap:
    """How a prompt names the gap that its answer fills (ChatGLM-6B): token ids. What stands before `begin` is context,
    whose tokens all see each other; the answer is at the place of the first of `masks` that is in the prompt."""

    begin: int
    masks: tuple[int, ...]


@dataclass(frozen=True)
class DecoderConfig:
    """What the layers of a decoder need to know. Sizes are in elements."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig | None  # None: no layer is rotated
    tied: bool
    windows: tuple[int, ...]  # of each layer; 0: none
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm: Norm = "rms"
    attention_scale: float | None = None  # of q . k; None: head_dim^-0.5
    attention_softcap: float = 0.0  # 0: none
    alibi: tuple[float, ...] = ()  # slope of each head; empty: none
    interleaved: bool = False  # pairs that rotate together are neighbours, not half a head apart
    window_rope: RopeConfig | None = None  # of the layers with a window, where it is not `rope`
    unrotated: tuple[int, ...] = ()  # layers without rotary positions
    gap: Gap | None = None  # prompts are bidirectional, positions are two streams
    query_growth: tuple[float, float] = (0.0, 1.0)  # (b, n): q is times 1 + b log(1 + floor(position / n))
    transposed: bool = False  # the checkpoint has the layers' matrices as (K, N)
    embedding_size: int | None = None  # of the token table, where it is not the hidden size
    embedding_multiplier: float = 1.0
    unit_head: bool = False  # the head's rows are divided by their length
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # 0: none

    @property
    def window(self) -> int:
        """How many positions a token sees in the layer where it sees most, its own among them; 0: all before it."""
        return max(self.windows) if all(self.windows) else 0

    def rope_of(self, layer: int) -> RopeConfig | None:
        """How a layer's q and k are rotated."""
        if layer in self.unrotated:
            return None
        return self.window_rope if self.windows[layer] and self.window_rope is not None else self.rope


Config = TypeVar("Config", bound=DecoderConfig)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each head (Press et al. 2022): a geometric series from 2^(-8/n) down, n heads, a power of two; else
    that of the next smaller one, then every other of the next larger one's."""
    below = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8.0 * (i + 1) / below) for i in range(below)]
    between = [2.0 ** (-4.0 * (2 * i + 1) / below) for i in range(heads - below)]
    return tuple(first + between)


def renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """`values` with those of a family's own key names also under the names of `DECODER_KEYS`: {own: common}."""
    return {**values, **{common: values[own] for own, common in names.items()}}


def decoder_config(
    raw: Mapping[str, Any], values: Mapping[str, Any], kind: builtins.type[Config] = DecoderConfig, **features: Any
) -> Config:
    """Build a DecoderConfig, or a family's own `kind` of it, from the values of `DECODER_KEYS`, checking that the sizes
    fit together; `features` are further fields."""
    heads, hidden, layers = values["num_attention_heads"], values["hidden_size"], values["num_hidden_layers"]
    kv_heads = values["num_key_value_heads"] or heads
    head_dim = values["head_dim"]
    if head_dim is None:
        if hidden % heads:
            raise ConfigError(f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
        head_dim = hidden // heads
    if layers > 4096:
        raise ConfigError(f"config.json: num_hidden_layers {layers} is more than the supported 4096")
    if values["max_position_embeddings"] > MAX_POSITIONS:
        raise ConfigError(
            f"config.json: max_position_embeddings {values['max_position_embeddings']} is more than the supported "
            f"{MAX_POSITIONS}; set it to the context the model was trained for"
        )
    if heads % kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if head_dim % 2 or head_dim > 256:
        raise ConfigError(f"config.json: head_dim {head_dim} is not supported; it must be even and at most 256")
    if "rope" not in features:
        features["rope"] = read_rope(raw)
    rope: RopeConfig | None = features["rope"]
    if rope is not None and ((rotary := rope.width(head_dim)) % 2 or not rotary):
        raise ConfigError(f"config.json: {rotary} rotated elements of heads of {head_dim}; they must be even and not 0")
    scaled = [scaling for scaling in (rope, features.get("window_rope")) if scaling is not None]
    for scaling in scaled:
        wrong = [
            n
            for n in ("short_factor", "long_factor")
            if len(scaling.parameters.get(n, ())) * 2 != scaling.width(head_dim)
        ]
        if scaling.type == "longrope" and wrong:
            raise ConfigError(f"config.json: {', '.join(wrong)} must have {scaling.width(head_dim) // 2} numbers")
    if sum(scaling.chooses for scaling in scaled) > 1:
        raise ConfigError("config.json: dynamic and longrope scaling are supported for layers of one kind, not of two")
    positions = values["max_position_embeddings"]
    if rope is not None and rope.type == "dynamic":  # which goes on from there
        positions = min(int(positions * rope.parameters["factor"]), MAX_POSITIONS)
    return kind(
        model_type=str(raw["model_type"]),
        vocab_size=values["vocab_size"],
        hidden_size=hidden,
        intermediate_size=values["intermediate_size"],
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=positions,
        norm_eps=values["rms_norm_eps" if features.get("norm", "rms").startswith("rms") else "layer_norm_eps"],
        tied=values["tie_word_embeddings"],
        **{"windows": (0,) * layers, **features},
    )


def token_ids(raw: Mapping[str, Any], name: str) -> list[int]:
    """`eos_token_id` and its like: absent, null, a number or a list of numbers -> list of ids."""
    value = raw.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(i) is not int or i < 0 for i in ids):
        raise ConfigError(f"{name} must be a token id or a list of token ids, got {value!r}")
    return ids
