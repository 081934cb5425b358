"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm, GELU, biases; its files have matrices as (K, N)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from nibblelm.config import GELU_FORMS, DecoderConfig, Key, decoder_config, read_keys, renamed
from nibblelm.graph import Value
from nibblelm.layers import Attention, Decoder, PlainMlp, Rope, Step, Weights, norm
from nibblelm.models import gptj

KEYS = {
    **{name: key for name, key in gptj.KEYS.items() if name not in ("rotary", "rotary_dim")},
    "tie_word_embeddings": Key(bool, True, optional=True),
    "scale_attn_weights": Key(bool, True, optional=True),
    "scale_attn_by_inverse_layer_idx": Key(bool, False, optional=True),
    "add_cross_attention": Key(bool, False, only=(False,), optional=True),
}
UNOPENED = "its matrices are modules of a class Conv1D, which compressed-tensors does not know"


@dataclass(frozen=True)
class GPT2Config(DecoderConfig):
    """`scales`: of q . k in each layer."""

    scales: tuple[float, ...] = ()
    gelu: Literal["tanh", "erf"] = "tanh"


def tensor_name(name: str) -> str:
    """The published files have the names of the model without its head."""
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def read_config(raw: Mapping[str, Any], strict: bool = False) -> GPT2Config:
    """config.json of a GPT-2 -> GPT2Config."""
    values = read_keys(raw, KEYS, strict)
    hidden, layers = values["n_embd"], values["n_layer"]
    common = {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    }
    sizes = {"intermediate_size": values["n_inner"] or 4 * hidden, "num_key_value_heads": None, "head_dim": None}
    scale = (hidden / values["n_head"]) ** -0.5 if values["scale_attn_weights"] else 1.0
    by_layer = values["scale_attn_by_inverse_layer_idx"]
    return decoder_config(
        raw,
        {**renamed(values, common), **sizes},
        GPT2Config,
        norm="layer",
        rope=None,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        transposed=True,
        scales=tuple(scale / (i + 1) if by_layer else scale for i in range(layers)),
        gelu=GELU_FORMS[values["activation_function"]],
    )


class Layer:
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: GPT2Config, rope: Rope, index: int) -> None:
        name, scale = f"transformer.h.{index}", config.scales[index]
        self.norm1 = norm(weights, f"{name}.ln_1", config)
        self.norm2 = norm(weights, f"{name}.ln_2", config)
        qkv, o = f"{name}.attn.c_attn", f"{name}.attn.c_proj"
        self.attention = Attention.of_fused(weights, qkv, o, config, rope, index, scale=scale)
        self.mlp = PlainMlp(weights, f"{name}.mlp.c_fc", f"{name}.mlp.c_proj", config, config.gelu)

    def __call__(self, x: Value, step: Step) -> Value:
        x = x + self.attention(self.norm1(x), step)
        return x + self.mlp(self.norm2(x))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer, table, final_norm = Layer, "transformer.wte", "transformer.ln_f"

    def __init__(self, weights: Weights, config: GPT2Config, positions: int) -> None:
        super().__init__(weights, config, positions)
        self.positions = weights.vector("transformer.wpe.weight", config.max_positions, config.hidden_size)
        self.dtype = weights.dtype

    def embed(self, step: Step) -> Value:
        """What the first layer reads."""
        return self.embedding(step.ids) + step.positions.embedding(self.positions, self.dtype)
