"""Baichuan 1 and 2 (Yang et al. 2023, section 2) in plain PyTorch: Llama's block on one projection W_pack; rotary
positions (7B) or ALiBi (13B, Press et al. 2022); the second version divides the rows of its head by their length."""

import math

import torch
from published import Reference, RMSNorm, attend, causal, heads, rotate
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig


class BaichuanConfig(PretrainedConfig):
    model_type = "baichuan"


def slopes(count: int) -> list[float]:
    """Of the paper's own code: a power of two of heads has a geometric series that starts at its ratio."""
    if math.log2(count).is_integer():
        ratio = 2 ** -(2 ** -(math.log2(count) - 3))
        return [ratio ** (i + 1) for i in range(count)]
    fewer = 2 ** math.floor(math.log2(count))
    return slopes(fewer) + slopes(2 * fewer)[0::2][: count - fewer]


class Attention(nn.Module):
    def __init__(self, c: BaichuanConfig) -> None:
        super().__init__()
        self.count, self.alibi = c.num_attention_heads, getattr(c, "max_position_embeddings", None) is None
        self.size = c.hidden_size // self.count
        self.W_pack = nn.Linear(c.hidden_size, 3 * c.hidden_size, bias=False)
        self.o_proj = nn.Linear(c.hidden_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads(part, self.count) for part in self.W_pack(x).chunk(3, -1))
        places, bias = torch.arange(len(x)), None
        if self.alibi:
            bias = torch.tensor(slopes(self.count))[:, None, None] * (places[None, :] - places[:, None])
        else:
            q, k = (rotate(t, places, 10000.0, self.size, neighbours=False) for t in (q, k))
        return self.o_proj(attend(q, k, v, causal(len(x)), bias))


class Mlp(nn.Module):
    def __init__(self, c: BaichuanConfig) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: BaichuanConfig) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c: BaichuanConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Baichuan(Reference):
    config_class = BaichuanConfig

    def __init__(self, config: BaichuanConfig) -> None:
        super().__init__(config)
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def logits(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        x, head = self.model.norm(x), self.lm_head.weight
        if getattr(self.config, "z_loss_weight", None) is None:
            return self.lm_head(x)
        return x @ (head / head.norm(dim=1, keepdim=True)).T


AutoConfig.register("baichuan", BaichuanConfig)
AutoModelForCausalLM.register(BaichuanConfig, Baichuan)
