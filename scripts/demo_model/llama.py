"""The model in plain PyTorch, its int4 form as conversion leaves it, and sampling from it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_model.corpus import BOS, EOS


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the field names are those of config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Half-split rotary embedding of x [batch, heads, time, head_dim]; rope = (cos, sin), each [time, head_dim]."""
    a, b = x.chunk(2, dim=-1)
    return (x * rope[0] + torch.cat((-b, a), dim=-1) * rope[1]).to(x.dtype)


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 matrix products on a GPU, float32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.q_proj = linear(s.hidden_size, s.num_attention_heads * s.head_dim)
        self.k_proj = linear(s.hidden_size, s.num_key_value_heads * s.head_dim)
        self.v_proj = linear(s.hidden_size, s.num_key_value_heads * s.head_dim)
        self.o_proj = linear(s.num_attention_heads * s.head_dim, s.hidden_size)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Tensor | None) -> Tensor:
        """x [batch, time, hidden]. With `cache` [2, batch, kv_heads, positions so far, head_dim] the last `time`
        positions are written first and x attends to all of them."""
        b, t, _ = x.shape
        q, k, v = (
            p(x).view(b, t, -1, self.s.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            cache[0, :, :, -t:], cache[1, :, :, -t:] = k, v
            k, v = cache[0].to(q.dtype), cache[1].to(q.dtype)
        if mask is not None:  # the fused kernels that take a mask do not share kv heads
            groups = self.s.num_attention_heads // self.s.num_key_value_heads
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        y = F.scaled_dot_product_attention(q, k, v.to(q.dtype), attn_mask=mask, enable_gqa=mask is None)
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1))


class Mlp(nn.Module):
    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = linear(s.hidden_size, s.intermediate_size)
        self.up_proj = linear(s.hidden_size, s.intermediate_size)
        self.down_proj = linear(s.intermediate_size, s.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: Shape, dropout: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.mlp = Mlp(s)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor | None, cache: Tensor | None) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), rope, mask, cache))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Llama(nn.Module):
    """Llama with tied embeddings; parameter names are those of Hugging Face without the leading `model.`"""

    def __init__(self, s: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.s = s
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(Layer(s, dropout) for _ in range(s.num_hidden_layers))
        self.norm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.dropout = nn.Dropout(dropout)
        self.head: Tensor | None = None  # an untied output table, used to simulate the int8 one
        inverse = s.rope_theta ** -(torch.arange(0, s.head_dim, 2) / s.head_dim)
        angles = torch.outer(torch.arange(s.max_position_embeddings), inverse).repeat(1, 2)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:  # the two projections that write to the residual stream start smaller
                depth = math.sqrt(2 * s.num_hidden_layers) if "o_proj" in name or "down_proj" in name else 1.0
                nn.init.normal_(p, std=0.02 / depth)

    def forward(self, ids: Tensor, mask: Tensor | None, cache: Tensor | None = None, start: int = 0) -> Tensor:
        """ids int64 [batch, time] at positions start.. -> logits [batch, time, vocab].

        cache [layers, 2, batch, kv_heads, context, head_dim] is read up to `start` and extended."""
        end = start + ids.shape[1]
        rope = (self.cos[start:end], self.sin[start:end])
        x = self.dropout(self.embed_tokens(ids))
        for i, layer in enumerate(self.layers):
            call = layer if cache is None else layer.forward  # compiled for training only: here shapes change
            x = call(x, rope, mask, None if cache is None else cache[i, :, :, :, :end])
        return F.linear(self.norm(x), self.embed_tokens.weight if self.head is None else self.head)


def story_mask(ids: Tensor) -> Tensor:
    """Causal mask inside each document (documents begin at <s>): bool [batch, 1, time, time]."""
    doc = (ids == BOS).cumsum(1)
    same = doc[:, None, :, None] == doc[:, None, None, :]
    return same & torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).tril()


def round_int4(w: Tensor, group: int = 128) -> Tensor:
    """Asymmetric int4 round-to-nearest in groups along the input dimension, with an integer zero-point."""
    g = w.view(w.shape[0], -1, group if w.shape[1] % group == 0 else w.shape[1])
    low, high = g.amin(-1, keepdim=True).clamp(max=0), g.amax(-1, keepdim=True).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-8)
    zero = (-low / scale).round()
    return (((g / scale).round() + zero).clamp(0, 15) - zero).mul(scale).view_as(w)


def quantized(model: Llama) -> Llama:
    """A copy as conversion leaves it: int4 linear layers, int8 per-row output table, embeddings as they are."""
    q = Llama(model.s).to(model.cos.device)
    q.load_state_dict(model.state_dict())
    with torch.no_grad():
        for m in q.modules():
            if isinstance(m, nn.Linear):
                m.weight.copy_(round_int4(m.weight))
        scale = q.embed_tokens.weight.abs().amax(1, keepdim=True) / 127
        q.head = (q.embed_tokens.weight / scale).round() * scale
    return q


@torch.no_grad()
def sample(model: Llama, count: int, gen: torch.Generator, temperature: float) -> list[np.ndarray]:
    """Return `count` int16 arrays <s> story </s>; a story cut by the context has no </s>."""
    model.eval()
    s, device = model.s, model.cos.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = (s.num_key_value_heads, s.max_position_embeddings, s.head_dim)
    cache = torch.zeros(s.num_hidden_layers, 2, count, *heads, device=device, dtype=dtype)
    out = torch.full((count, s.max_position_embeddings), EOS, device=device)
    out[:, 0] = BOS
    alive = torch.arange(count, device=device)
    for end in range(1, s.max_position_embeddings):
        with autocast(device):
            logits = model(out[alive, end - 1 : end], None, cache, end - 1)[:, -1].float()
        probs = torch.softmax(logits / temperature, -1)
        out[alive, end] = torch.multinomial(probs, 1, generator=gen)[:, 0]
        if end % 32 == 31:  # finished stories leave the batch
            going = out[alive, end] != EOS
            if not going.any():
                break
            alive, cache = alive[going], cache[:, :, going]
    done = out.cpu().numpy().astype(np.int16)
    stops = [np.flatnonzero(row[1:] == EOS) for row in done]
    return [row[: stop[0] + 2] if len(stop) else row for row, stop in zip(done, stops, strict=True)]
