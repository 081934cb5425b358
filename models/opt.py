"""OPT (Zhang et al. 2022): learned positions, LayerNorm before each block (in the 350M model after it), ReLU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nibblelm.config import GELU_FORMS, POSITIVE, DecoderConfig, Key, decoder_config, read_keys, renamed
from nibblelm.errors import ConfigError
from nibblelm.graph import Value
from nibblelm.layers import Attention, Embedding, Head, LayerNorm, Linear, PlainMlp, Rope, Step, Weights

_FORMS: dict[str, Literal["tanh", "erf", "relu"]] = {"relu": "relu", **GELU_FORMS}
_OFFSET = 2
"""The rows of the table of positions before the first position's: its ids began after the padding's."""

KEYS = {
    "vocab_size": POSITIVE,
    "hidden_size": POSITIVE,
    "ffn_dim": POSITIVE,
    "num_hidden_layers": POSITIVE,
    "num_attention_heads": POSITIVE,
    "max_position_embeddings": POSITIVE,
    "word_embed_proj_dim": Key(int, None, minimum=1),
    "do_layer_norm_before": Key(bool, True, optional=True),
    "_remove_final_layer_norm": Key(bool, False, optional=True),
    "activation_function": Key(str, "relu", only=tuple(_FORMS)),
    "enable_bias": Key(bool, True, optional=True),
    "layer_norm_elementwise_affine": Key(bool, True, only=(True,), optional=True),
    "tie_word_embeddings": Key(bool, True, optional=True),
}


def tensor_name(name: str) -> str:
    """Some published files have the names of the model without its head."""
    return f"model.{name}" if name.startswith("decoder.") else name


@dataclass(frozen=True)
class OPTConfig(DecoderConfig):
    """`before`: norms stand before the blocks; `last`: and after the layers."""

    before: bool = True
    last: bool = True
    form: Literal["tanh", "erf", "relu"] = "relu"


def read_config(raw: Mapping[str, Any], strict: bool = False) -> OPTConfig:
    """config.json of an OPT -> OPTConfig."""
    values = read_keys(raw, KEYS, strict)
    bias, before = values["enable_bias"], values["do_layer_norm_before"]
    sizes = {"num_key_value_heads": None, "head_dim": None, "layer_norm_eps": 1e-5}
    return decoder_config(
        raw,
        {**renamed(values, {"ffn_dim": "intermediate_size"}), **sizes},
        OPTConfig,
        norm="layer",
        rope=None,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        embedding_size=values["word_embed_proj_dim"],
        before=before,
        last=before and not values["_remove_final_layer_norm"],
        form=_FORMS[values["activation_function"]],
    )


class Layer:
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: OPTConfig, rope: Rope, index: int) -> None:
        name = f"model.decoder.layers.{index}"
        self.before = config.before
        self.norm1 = LayerNorm(weights, f"{name}.self_attn_layer_norm", config.hidden_size, config.norm_eps)
        self.norm2 = LayerNorm(weights, f"{name}.final_layer_norm", config.hidden_size, config.norm_eps)
        self.attention = Attention.of_projections(weights, f"{name}.self_attn", config, rope, index, "out_proj")
        self.mlp = PlainMlp(weights, f"{name}.fc1", f"{name}.fc2", config, config.form)

    def __call__(self, x: Value, step: Step) -> Value:
        if self.before:
            x = x + self.attention(self.norm1(x), step)
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x, step))
        return self.norm2(x + self.mlp(x))


class Model:
    """Token ids to hidden states to logits."""

    def __init__(self, weights: Weights, config: OPTConfig, positions: int) -> None:
        name, hidden, size = "model.decoder", config.hidden_size, config.embedding_size or config.hidden_size
        if positions > config.max_positions:
            raise ConfigError(f"{positions} positions were asked for; the table has {config.max_positions}")
        self.config, self.dtype = config, weights.dtype
        self.embedding = Embedding(weights, f"{name}.embed_tokens", config, size)
        self.positions = weights.vector(f"{name}.embed_positions.weight", config.max_positions + _OFFSET, hidden)
        self.positions = self.positions[_OFFSET:]
        narrow = size != hidden
        self.project_in = Linear(weights, [(f"{name}.project_in", hidden)], size) if narrow else None
        self.project_out = Linear(weights, [(f"{name}.project_out", size)], hidden) if narrow else None
        self.rope = Rope(config, positions, weights.device)
        self.layers = [Layer(weights, config, self.rope, i) for i in range(config.layers)]
        self.norm = LayerNorm(weights, f"{name}.final_layer_norm", hidden, config.norm_eps) if config.last else None
        self.head = Head(weights, config, "lm_head", f"{name}.embed_tokens", columns=size)

    def forward(self, step: Step) -> Value:
        """Logits (R, vocab) in fp32 of a step's wanted tokens; the step's keys and values enter its cache."""
        x = self.embedding(step.ids)
        if self.project_in is not None:
            x = self.project_in(x)
        x = x + step.positions.embedding(self.positions, self.dtype)
        for layer in self.layers:
            x = layer(x, step)
        x = x.rows(step.wanted)
        if self.norm is not None:
            x = self.norm(x)
        return self.head(x if self.project_out is None else self.project_out(x))
