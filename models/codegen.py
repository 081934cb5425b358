"""CodeGen (Nijkamp et al. 2022): GPT-J's wiring with q, v and k in one matrix, cut in four for the machines that
trained it."""

import torch

from nibblelm.config import Key
from nibblelm.layers import Attention, Decoder, Rope, Weights
from nibblelm.models import gptj
from nibblelm.models.gptj import GPTJConfig, read_config

__all__ = ["KEYS", "Model", "read_config"]

KEYS = {**gptj.KEYS, "rotary_dim": Key(int, 64, minimum=2)}
_PARTS = 4


class Layer(gptj.Layer):
    """One decoder layer on the residual stream, (M, hidden)."""

    def attend(self, weights: Weights, name: str, config: GPTJConfig, rope: Rope, index: int) -> Attention:
        """The attention: in each quarter of the rows of one matrix, q, v and k of a quarter of the heads."""
        rows = torch.arange(3 * config.hidden_size).view(_PARTS, 3, -1)
        order = torch.cat([rows[:, part].flatten() for part in (0, 2, 1)])
        return Attention.of_fused(weights, f"{name}.qkv_proj", f"{name}.out_proj", config, rope, index, order)


class Model(Decoder):
    """Token ids to hidden states to logits."""

    layer, table, final_norm, head_bias = Layer, "transformer.wte", "transformer.ln_f", True
