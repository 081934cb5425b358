"""Keys of config.json: their types, their defaults and the values that are implemented."""

import builtins
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
