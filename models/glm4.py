"""GLM-4-0414 (GLM Team 2025): GLM-4's wiring with norms after attention and feed-forward too."""

from nibblelm.config import DecoderConfig
from nibblelm.graph import Value
from nibblelm.layers import Decoder, Rope, Step, Weights, norm
from nibblelm.models import glm
from nibblelm.models.glm import KEYS, read_config

__all__ = ["KEYS", "Model", "read_config"]


class Layer(glm.Layer):
    """One decoder layer on the residual stream, (M, hidden)."""

    def __init__(self, weights: Weights, config: DecoderConfig, rope: Rope, index: int) -> None:
        super().__init__(weights, config, rope, index)
        self.norm3 = norm(weights, f"model.layers.{index}.post_self_attn_layernorm", config)
        self.norm4 = norm(weights, f"model.layers.{index}.post_mlp_layernorm", config)

    def __call__(self, x: Value, step: Step) -> Value:
        x = x + self.norm3(self.attention(self.norm1(x), step))
        return x + self.norm4(self.mlp(self.norm2(x)))


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer = Layer
