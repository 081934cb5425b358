"""ChatGLM-6B in plain PyTorch, from GLM (Du et al. 2022, section 2: blank infilling, two-dimensional positions),
GLM-130B (Zeng et al. 2022: DeepNorm's residuals) and the published modeling of chatglm-6b."""

import math

import torch
from published import Reference, attend, causal, rotate
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig


class ChatGLM6BConfig(PretrainedConfig):
    model_type = "chatglm_6b"


class Attention(nn.Module):
    def __init__(self, c: ChatGLM6BConfig) -> None:
        super().__init__()
        self.count, self.size = c.num_attention_heads, c.hidden_size // c.num_attention_heads
        self.query_key_value = nn.Linear(c.hidden_size, 3 * c.hidden_size)
        self.dense = nn.Linear(c.hidden_size, c.hidden_size)

    def forward(self, x: Tensor, places: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        mixed = self.query_key_value(x).unflatten(1, (self.count, 3 * self.size))
        q, k, v = (part.transpose(0, 1) for part in mixed.chunk(3, -1))

        def turned(t: Tensor) -> Tensor:
            """The first half of a head by where the gap is, the second by the place in it."""
            halves = zip(t.chunk(2, -1), places, strict=True)
            return torch.cat([rotate(half, at, 10000.0, self.size // 2, neighbours=False) for half, at in halves], -1)

        return self.dense(attend(turned(q), turned(k), v, seen))


class Mlp(nn.Module):
    def __init__(self, c: ChatGLM6BConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(c.hidden_size, c.inner_hidden_size)
        self.dense_4h_to_h = nn.Linear(c.inner_hidden_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(nn.functional.gelu(self.dense_h_to_4h(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, c: ChatGLM6BConfig) -> None:
        super().__init__()
        self.attention, self.mlp, self.alpha = Attention(c), Mlp(c), math.sqrt(2 * c.num_layers)
        self.input_layernorm, self.post_attention_layernorm = (
            nn.LayerNorm(c.hidden_size, c.layernorm_epsilon) for _ in range(2)
        )

    def forward(self, x: Tensor, places: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        x = self.input_layernorm(x)
        x = self.post_attention_layernorm(self.alpha * x + self.attention(x, places, seen))
        return self.alpha * x + self.mlp(x)


class Body(nn.Module):
    def __init__(self, c: ChatGLM6BConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_layers))
        self.final_layernorm = nn.LayerNorm(c.hidden_size, c.layernorm_epsilon)


class ChatGLM6B(Reference):
    config_class = ChatGLM6BConfig

    def __init__(self, config: ChatGLM6BConfig) -> None:
        super().__init__(config)
        self.transformer = Body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def logits(self, ids: Tensor) -> Tensor:
        c, listed = self.config, ids.tolist()
        context = listed.index(c.bos_token_id)
        mask = listed.index(c.gmask_token_id if c.gmask_token_id in listed else c.mask_token_id)
        place, within = torch.arange(len(ids)), torch.zeros(len(ids), dtype=torch.long)
        place[context:] = mask
        within[context:] = torch.arange(len(ids) - context) + 1
        seen = causal(len(ids))
        seen[:, :context] = True
        x = self.transformer.word_embeddings(ids)
        for layer in self.transformer.layers:
            x = layer(x, (place, within), seen)
        return self.lm_head(self.transformer.final_layernorm(x))


AutoConfig.register("chatglm_6b", ChatGLM6BConfig)
AutoModelForCausalLM.register(ChatGLM6BConfig, ChatGLM6B)
