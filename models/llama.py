"""Llama 1, 2 and 3.x (Touvron et al. 2023; Grattafiori et al. 2024): pre-norm decoder, rotary GQA, SwiGLU."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from nibblelm.config import DECODER_KEYS, DecoderConfig, Key, decoder_config, read_keys
from nibblelm.layers import Attention, Embedding, Head, Mlp, RMSNorm, Rope, Step, Weights, run

KEYS = {
    **DECODER_KEYS,
    "attention_bias": Key(bool, False, optional=True),
    "mlp_bias": Key(bool, False, optional=True),
}


def read_config(raw: Mapping[str, Any], strict: bool = False) -> DecoderConfig:
    """config.json of a Llama -> DecoderConfig."""
    values = read_keys(raw, KEYS, strict)
    bias = values["attention_bias"]
    return decoder_config(raw, values, qkv_bias=bias, o_bias=bias, mlp_bias=values["mlp_bias"])


class Layer:
    """One decoder layer: what reads the residual stream, (M, hidden), and writes to it."""

    def __init__(self, weights: Weights, config: DecoderConfig, rope: Rope, index: int) -> None:
        name = f"model.layers.{index}"
        before_attention, before_mlp = (
            RMSNorm(weights, f"{name}.{norm}", config.hidden_size, config.norm_eps)
            for norm in ("input_layernorm", "post_attention_layernorm")
        )
        self.attention = Attention(weights, f"{name}.self_attn", config, rope, index, before_attention)
        self.mlp = Mlp(weights, f"{name}.mlp", config, before_mlp)


class Model:
    """Token ids to hidden states to logits."""

    def __init__(self, weights: Weights, config: DecoderConfig, positions: int) -> None:
        self.config = config
        self.embedding = Embedding(weights, "model.embed_tokens", config)
        self.rope = Rope(config, positions, weights.device)
        self.layers = [Layer(weights, config, self.rope, i) for i in range(config.layers)]
        self.norm = RMSNorm(weights, "model.norm", config.hidden_size, config.norm_eps)
        self.head = Head(weights, config)

    def forward(self, step: Step, rows: slice = slice(None)) -> Tensor:
        """Logits (rows, vocab) in fp32 of the chosen rows of a step; the step's keys and values enter its cache."""
        x, residual = run([self.layers[0].attention.before], self.embedding(step.ids), None)
        for layer, following in zip(self.layers, [*self.layers[1:], None], strict=True):
            # From one attention to the next in one run, which a device may take as one kernel.
            links = [layer.attention.after, *layer.mlp.links, *([following.attention.before] if following else [])]
            x, residual = run(links, layer.attention(x, step), residual)
        if residual is not None and rows != slice(None):
            x, residual = x[rows], residual[rows]
        return self.head(self.norm, x, residual)
