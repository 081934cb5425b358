"""InternLM2 (Cai et al. 2024, section 2: Llama's architecture with interleaved Wk, Wq, Wv), in plain PyTorch."""

import torch
from published import Reference, RMSNorm, attend, causal, rotate
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig


class InternLM2Config(PretrainedConfig):
    model_type = "internlm2"


class Attention(nn.Module):
    def __init__(self, c: InternLM2Config) -> None:
        super().__init__()
        self.kv, self.group = c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads
        size = c.hidden_size // c.num_attention_heads
        self.theta, self.size = c.rope_theta, size
        self.wqkv = nn.Linear(c.hidden_size, (self.group + 2) * self.kv * size, bias=c.bias)
        self.wo = nn.Linear(c.hidden_size, c.hidden_size, bias=c.bias)

    def forward(self, x: Tensor) -> Tensor:
        grouped = self.wqkv(x).unflatten(1, (self.kv, self.group + 2, self.size))
        q, k, v = (t.flatten(1, 2).transpose(0, 1) for t in grouped.split((self.group, 1, 1), 2))
        places = torch.arange(len(x))
        q, k = (rotate(t, places, self.theta, self.size, neighbours=False) for t in (q, k))
        return self.wo(attend(q, k, v, causal(len(x))))


class FeedForward(nn.Module):
    def __init__(self, c: InternLM2Config) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2))
        self.w2 = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, c: InternLM2Config) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(c), FeedForward(c)
        self.attention_norm, self.ffn_norm = (RMSNorm(c.hidden_size, c.rms_norm_eps) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Body(nn.Module):
    def __init__(self, c: InternLM2Config) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class InternLM2(Reference):
    config_class = InternLM2Config

    def __init__(self, config: InternLM2Config) -> None:
        super().__init__(config)
        self.model = Body(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def logits(self, ids: Tensor) -> Tensor:
        x = self.model.tok_embeddings(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.output(self.model.norm(x))


AutoConfig.register("internlm2", InternLM2Config)
AutoModelForCausalLM.register(InternLM2Config, InternLM2)
