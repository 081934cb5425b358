"""StableLM 2 (Bellagente et al. 2024): LayerNorm, rotary positions on a quarter of each head, perhaps LayerNorm on each
head of q and k, and perhaps attention and feed-forward side by side."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from nibblelm.config import DECODER_KEYS, DecoderConfig, Key, decoder_config, read_keys, read_rope
from nibblelm.graph import Value
from nibblelm.layers import Attention, Decoder, HeadLayerNorm, Mlp, Rope, Step, Weights, norm

KEYS = {
    **{name: key for name, key in DECODER_KEYS.items() if name not in ("rms_norm_eps", "head_dim")},
    "num_key_value_heads": Key(int, 32, minimum=1),
    "layer_norm_eps": Key(float, 1e-5, minimum=0.0),
    "use_qkv_bias": Key(bool, False, optional=True),
    "qk_layernorm": Key(bool, False, optional=True),
    "use_parallel_residual": Key(bool, False, optional=True),
    "partial_rotary_factor": Key(float, 0.25, optional=True),
}


@dataclass(frozen=True)
class StableLmConfig(DecoderConfig):
    """`parallel`: attention and feed-forward read one norm; `head_norm`: q and k have LayerNorm head by head."""

    parallel: bool = False
    head_norm: bool = False


def read_config(raw: Mapping[str, Any], strict: bool = False) -> StableLmConfig:
    """config.json of a StableLM -> StableLmConfig."""
    values = read_keys(raw, KEYS, strict)
    return decoder_config(
        raw,
        {**values, "head_dim": None},
        StableLmConfig,
        norm="layer",
        rope=read_rope(raw, default_partial=0.25),
        qkv_bias=values["use_qkv_bias"],
        parallel=values["use_parallel_residual"],
        head_norm=values["qk_layernorm"],
    )


class Layer:
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: StableLmConfig, rope: Rope, index: int) -> None:
        name = f"model.layers.{index}"

        def head_norm(part: str, heads: int) -> HeadLayerNorm:
            module = f"{name}.self_attn.{part}_layernorm.norms"
            gains = [weights.vector(f"{module}.{head}.weight", config.head_dim) for head in range(heads)]
            return HeadLayerNorm(torch.stack(gains), config)

        norms = (head_norm("q", config.heads), head_norm("k", config.kv_heads)) if config.head_norm else None
        self.attention = Attention.of_projections(weights, f"{name}.self_attn", config, rope, index, head_norms=norms)
        self.mlp = Mlp(weights, f"{name}.mlp", config)
        self.norm1 = norm(weights, f"{name}.input_layernorm", config)
        self.norm2 = None if config.parallel else norm(weights, f"{name}.post_attention_layernorm", config)

    def __call__(self, x: Value, step: Step) -> Value:
        normed = self.norm1(x)
        if self.norm2 is None:
            return x + (self.attention(normed, step) + self.mlp(normed))
        x = x + self.attention(normed, step)
        return x + self.mlp(self.norm2(x))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer = Layer
