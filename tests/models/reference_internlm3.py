"""InternLM3 (InternLM Team 2025): Llama's block with biases on switches of its own, in plain PyTorch."""

import torch
from published import Reference, RMSNorm, attend, causal, heads, rotate
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig


class InternLM3Config(PretrainedConfig):
    model_type = "internlm3"


class Attention(nn.Module):
    def __init__(self, c: InternLM3Config) -> None:
        super().__init__()
        self.q, self.kv, self.size, self.theta = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rope_theta
        self.q_proj = nn.Linear(c.hidden_size, self.q * self.size, bias=c.qkv_bias)
        self.k_proj, self.v_proj = (nn.Linear(c.hidden_size, self.kv * self.size, bias=c.qkv_bias) for _ in range(2))
        self.o_proj = nn.Linear(self.q * self.size, c.hidden_size, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = heads(self.q_proj(x), self.q), heads(self.k_proj(x), self.kv), heads(self.v_proj(x), self.kv)
        q, k = (rotate(t, torch.arange(len(x)), self.theta, self.size, neighbours=False) for t in (q, k))
        return self.o_proj(attend(q, k, v, causal(len(x))))


class Mlp(nn.Module):
    def __init__(self, c: InternLM3Config) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(c.hidden_size, c.intermediate_size, bias=c.bias) for _ in range(2))
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: InternLM3Config) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c: InternLM3Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class InternLM3(Reference):
    config_class = InternLM3Config

    def __init__(self, config: InternLM3Config) -> None:
        super().__init__(config)
        self.model = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def logits(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


AutoConfig.register("internlm3", InternLM3Config)
AutoModelForCausalLM.register(InternLM3Config, InternLM3)
