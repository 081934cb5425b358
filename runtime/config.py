"""The strict reader of config.json.

Each models/<type>.py declares the typed keys that it accepts; `read_keys` hands back their values. A known key with an
unsupported value is an error before any weight is read; an unknown key is one warning, an error with `strict`.
Both layouts are read: transformers 5 (`rope_parameters`, `dtype`) and 4 (`rope_theta` + `rope_scaling`, `torch_dtype`).
"""

import builtins
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from nibblelm.checkpoint.json_object import listed
from nibblelm.errors import ConfigError

REQUIRED: Any = object()


@dataclass(frozen=True)
class Key:
    """One accepted key: its type, its default, and the values that are implemented (None: all of that type).

    A float key takes integers too; `optional` lets null stand for the default.
    """

    type: builtins.type
    default: Any = REQUIRED
    only: tuple[Any, ...] | None = None
    optional: bool = False
    minimum: float | None = None

    def read(self, name: str, raw: Mapping[str, Any]) -> Any:
        """The value of `name` in `raw`, checked."""
        value: Any = raw.get(name, REQUIRED)
        if value is REQUIRED or (value is None and (self.optional or self.default is None)):
            if self.default is REQUIRED:
                raise ConfigError(f"config.json has no {name!r}, which this model_type needs")
            return self.default
        if self.type is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if type(value) is not self.type:
            raise ConfigError(f"config.json: {name} must be {self.type.__name__}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"config.json: {name} must be finite, got {value!r}")
        if self.only is not None and value not in self.only:
            raise ConfigError(f"config.json: {name} = {value!r} is not supported; supported: {list(self.only)}")
        if isinstance(value, int) and abs(value) >= 2**31:
            raise ConfigError(f"config.json: {name} = {value!r} is out of range")
        if isinstance(value, int | float) and self.minimum is not None and value < self.minimum:
            raise ConfigError(f"config.json: {name} must be at least {self.minimum:g}, got {value!r}")
        return value


MAX_POSITIONS = 1 << 24
"""fp32, in which the angles of rotary embedding are computed, counts no further."""

POSITIVE = Key(int, minimum=1)

# Keys that change nothing in inference, or that other readers own (the quantization scheme, tokens, generation).
_INERT = frozenset(
    """
    _attn_implementation _from_model_config _name_or_path _sliding_window_pattern activation_dropout
    apply_query_key_layer_scaling architectures attention_dropout attention_softmax_in_fp32 attn_implementation
    attn_pdrop auto_map bias_dropout_fusion bos_token_id cache_implementation chunk_size_feed_forward
    classifier_dropout decoder_start_token_id dropout dtype emb_init_std emb_pdrop embd_pdrop embedding_dropout
    eos_token_id finetuning_task fp32_residual_connection gradient_checkpointing hidden_dropout id2label
    init_config init_device init_std initializer_range is_decoder is_encoder_decoder keys_to_ignore_at_inference
    label2id layer_switch layerdrop masked_softmax_fusion model_type n_ctx offset_alibi output_attentions
    output_hidden_states pad_token_id prefix prefix_projection pretraining_tp problem_type quantization_config
    reorder_and_upcast_attn resid_pdrop residual_dropout return_dict skip_bias_add skip_bias_add_qkv
    slow_but_exact summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params tokenizer_class tokenizer_name torch_dtype torchscript transformers_version
    unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache use_embedding_sharing
    use_parallel_embedding use_return_dict verbose
    """.split()
)


def read_keys(raw: Mapping[str, Any], keys: Mapping[str, Key], strict: bool = False) -> dict[str, Any]:
    """The values of `keys`, checked; names unknown to both `keys` and the inert list are reported.

    Raises ConfigError for a missing, mistyped or unsupported value, and for unknown keys when `strict`.
    """
    values = {name: key.read(name, raw) for name, key in keys.items()}
    unknown = sorted(set(raw) - set(keys) - _INERT)
    if unknown:
        message = f"config.json has keys unknown to model_type {raw.get('model_type')!r}: {listed(unknown, 20)}"
        if strict:
            raise ConfigError(message + "; run without --strict to ignore them")
        warnings.warn(message + " (ignored)", stacklevel=2)
    return values


Norm = Literal["rms", "rms_plus_one", "layer", "layer_without_bias"]
"""The norms of a decoder: RMSNorm with a gain, or with 1 + gain; LayerNorm."""

# The forms of GELU that config.json names.
GELU_FORMS: dict[str, Literal["tanh", "erf"]] = {
    "gelu": "erf",
    "gelu_new": "tanh",
    "gelu_fast": "tanh",
    "gelu_pytorch_tanh": "tanh",
}

# What `read_rope` reads.
ROPE_KEYS: dict[str, Key] = {
    "rope_parameters": Key(dict, None),
    "rope_scaling": Key(dict, None),
    "rope_theta": Key(float, None),
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
    "max_window_layers": Key(int, 0, optional=True, minimum=0),
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
        return read_rope({**raw, "rope_parameters": section.get(kind) or {}, "rope_theta": None}, default)

    return of("full_attention", theta), of("sliding_attention", window_theta)


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
    embedding_multiplier: float = 1.0
    unit_head: bool = False  # the head's rows are divided by their length
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # 0: none

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
