"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): attention and feed-forward side by side, LayerNorm,
rotary positions on the first part of each head, GELU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nibblelm.config import POSITIVE, DecoderConfig, Key, decoder_config, read_keys, read_rope
from nibblelm.graph import Value
from nibblelm.layers import Attention, Embedding, Head, LayerNorm, Linear, Rope, Step, Weights
from nibblelm.ops import Gelu

_FORMS: dict[str, Gelu] = {"gelu": "erf", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}
KEYS = {
    "vocab_size": POSITIVE,
    "hidden_size": POSITIVE,
    "intermediate_size": POSITIVE,
    "num_hidden_layers": POSITIVE,
    "num_attention_heads": POSITIVE,
    "max_position_embeddings": POSITIVE,
    "layer_norm_eps": Key(float, 1e-5, minimum=0.0),
    "hidden_act": Key(str, "gelu", only=tuple(_FORMS)),
    "use_parallel_residual": Key(bool, True, optional=True),
    "attention_bias": Key(bool, True, optional=True),
    "rotary_pct": Key(float, 0.25, optional=True),
    "rotary_emb_base": Key(float, 10000.0, optional=True),
    "tie_word_embeddings": Key(bool, False, only=(False,), optional=True),
    "classifier_dropout": Key(float, 0.1, optional=True),  # of a head that is not a language model's
}


@dataclass(frozen=True)
class NeoXConfig(DecoderConfig):
    """`parallel`: attention and feed-forward read the same residual stream."""

    parallel: bool = True
    gelu: Gelu = "erf"


def read_config(raw: Mapping[str, Any], strict: bool = False) -> NeoXConfig:
    """config.json of a GPT-NeoX -> NeoXConfig."""
    values = read_keys(raw, KEYS, strict)
    return decoder_config(
        raw,
        {**values, "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": values["layer_norm_eps"]},
        NeoXConfig,
        rope=read_rope(raw, values["rotary_emb_base"], values["rotary_pct"]),
        parallel=values["use_parallel_residual"],
        gelu=_FORMS[values["hidden_act"]],
        qkv_bias=values["attention_bias"],
        o_bias=values["attention_bias"],
    )


class Mlp:
    """The feed-forward down(gelu(up(x)))."""

    def __init__(self, weights: Weights, name: str, config: NeoXConfig) -> None:
        size, hidden = config.intermediate_size, config.hidden_size
        self.up = Linear(weights, [(f"{name}.dense_h_to_4h", size)], hidden, bias=True)
        self.down = Linear(weights, [(f"{name}.dense_4h_to_h", hidden)], size, bias=True)
        self.gelu: Gelu = config.gelu

    def __call__(self, x: Value) -> Value:
        return self.down(self.up(x).gelu(self.gelu))


class Layer:
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: NeoXConfig, rope: Rope, index: int) -> None:
        name, hidden = f"gpt_neox.layers.{index}", config.hidden_size
        self.parallel = config.parallel
        self.norm1 = LayerNorm(weights, f"{name}.input_layernorm", hidden, config.norm_eps)
        self.norm2 = LayerNorm(weights, f"{name}.post_attention_layernorm", hidden, config.norm_eps)
        # In the file q, k and v of a head follow each other, then those of the next head.
        order = torch.arange(3 * hidden).view(config.heads, 3, config.head_dim).transpose(0, 1).flatten()
        fused = [(f"{name}.attention.query_key_value", 3 * hidden)]
        qkv = Linear(weights, fused, hidden, config.qkv_bias, order=order)
        o = Linear(weights, [(f"{name}.attention.dense", hidden)], hidden, config.o_bias)
        self.attention = Attention(qkv, o, config, rope, index)
        self.mlp = Mlp(weights, f"{name}.mlp", config)

    def __call__(self, x: Value, step: Step) -> Value:
        if self.parallel:
            return x + (self.attention(self.norm1(x), step) + self.mlp(self.norm2(x)))
        x = x + self.attention(self.norm1(x), step)
        return x + self.mlp(self.norm2(x))


class Model:
    """Token ids to hidden states to logits."""

    def __init__(self, weights: Weights, config: NeoXConfig, positions: int) -> None:
        self.config = config
        self.embedding = Embedding(weights, "gpt_neox.embed_in", config)
        self.rope = Rope(config, positions, weights.device)
        self.layers = [Layer(weights, config, self.rope, i) for i in range(config.layers)]
        self.norm = LayerNorm(weights, "gpt_neox.final_layer_norm", config.hidden_size, config.norm_eps)
        self.head = Head(weights, config, "embed_out", "gpt_neox.embed_in")

    def forward(self, step: Step) -> Value:
        """Logits (R, vocab) in fp32 of a step's wanted tokens; the step's keys and values enter its cache."""
        x = self.embedding(step.ids)
        for layer in self.layers:
            x = layer(x, step)
        return self.head(self.norm(x.rows(step.wanted)))
