"""ChatGLM2 and later (GLM Team 2024; the published modeling of chatglm2-6b, chatglm3-6b and glm-4-9b) in plain PyTorch:
grouped queries, rotary positions of neighbours on half of a head, SwiGLU from one matrix, RMSNorm."""

import torch
from published import Reference, RMSNorm, attend, causal, heads, rotate
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig


class ChatGLMConfig(PretrainedConfig):
    model_type = "chatglm"


class Attention(nn.Module):
    def __init__(self, c: ChatGLMConfig) -> None:
        super().__init__()
        self.q, self.size = c.num_attention_heads, c.kv_channels
        divided = getattr(c, "divided", False)  # by the ratio: positions, ChatGLM2's; or the base multiplied
        self.theta, self.apart = (10000.0, 1 / c.rope_ratio) if divided else (10000.0 * c.rope_ratio, 1.0)
        self.kv = c.multi_query_group_num if c.multi_query_attention else self.q
        self.several = c.multi_query_attention
        rows, bias = (self.q + 2 * self.kv) * self.size, c.add_qkv_bias or c.add_bias_linear
        self.query_key_value = nn.Linear(c.hidden_size, rows, bias=bias)
        self.dense = nn.Linear(self.q * self.size, c.hidden_size, bias=c.add_bias_linear)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.query_key_value(x)
        if self.several:
            parts = mixed.split([n * self.size for n in (self.q, self.kv, self.kv)], -1)
            q, k, v = (heads(part, n) for part, n in zip(parts, (self.q, self.kv, self.kv), strict=True))
        else:
            q, k, v = (t.transpose(0, 1) for t in mixed.unflatten(1, (self.q, 3 * self.size)).split(self.size, -1))
        positions = torch.arange(len(x)) * self.apart
        q, k = (rotate(t, positions, self.theta, self.size // 2, neighbours=True) for t in (q, k))
        return self.dense(attend(q, k, v, causal(len(x))))


class Mlp(nn.Module):
    def __init__(self, c: ChatGLMConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(c.hidden_size, 2 * c.ffn_hidden_size, bias=c.add_bias_linear)
        self.dense_4h_to_h = nn.Linear(c.ffn_hidden_size, c.hidden_size, bias=c.add_bias_linear)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.dense_h_to_4h(x).chunk(2, -1)
        return self.dense_4h_to_h(nn.functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, c: ChatGLMConfig) -> None:
        super().__init__()
        self.self_attention, self.mlp = Attention(c), Mlp(c)
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(c.hidden_size, c.layernorm_epsilon) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Encoder(nn.Module):
    def __init__(self, c: ChatGLMConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.final_layernorm = RMSNorm(c.hidden_size, c.layernorm_epsilon)


class Embedding(nn.Module):
    def __init__(self, c: ChatGLMConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(c.padded_vocab_size, c.hidden_size)


class Body(nn.Module):
    def __init__(self, c: ChatGLMConfig) -> None:
        super().__init__()
        self.embedding, self.encoder = Embedding(c), Encoder(c)
        self.output_layer = nn.Linear(c.hidden_size, c.padded_vocab_size, bias=False)


class ChatGLM(Reference):
    config_class = ChatGLMConfig

    def __init__(self, config: ChatGLMConfig) -> None:
        super().__init__(config)
        self.transformer = Body(config)
        self.post_init()

    def logits(self, ids: Tensor) -> Tensor:
        x = self.transformer.embedding.word_embeddings(ids)
        for layer in self.transformer.encoder.layers:
            x = layer(x)
        return self.transformer.output_layer(self.transformer.encoder.final_layernorm(x))


AutoConfig.register("chatglm", ChatGLMConfig)
AutoModelForCausalLM.register(ChatGLMConfig, ChatGLM)
