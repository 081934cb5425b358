"""Formulae that several published models share, in plain float32 PyTorch: for references that transformers lacks."""

import math
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


def rotate(x: Tensor, positions: Tensor, theta: float, width: int, neighbours: bool) -> Tensor:
    """Rotary embedding of the first `width` elements of (..., T, D) as complex numbers: pairs are half of the width
    apart, or neighbours (Su et al. 2021)."""
    turned, rest = x[..., :width].float(), x[..., width:]
    angles = positions[:, None].float() * theta ** (-torch.arange(0, width, 2).float() / width)
    turn = torch.polar(torch.ones_like(angles), angles)
    if neighbours:
        pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous())
        return torch.cat((torch.view_as_real(pairs * turn).flatten(-2), rest.float()), -1).to(x.dtype)
    pairs = torch.complex(turned[..., : width // 2], turned[..., width // 2 :]) * turn
    return torch.cat((pairs.real, pairs.imag, rest.float()), -1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, bias: Tensor | None = None) -> Tensor:
    """Softmax attention of (H, T, D) on (Hkv, T, D): `seen` (T, T) says who may look where -> (T, H * D)."""
    shared = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(shared, 0), v.repeat_interleave(shared, 0)
    scores = (q @ k.transpose(1, 2)).float() / math.sqrt(q.shape[-1])
    scores = scores if bias is None else scores + bias
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(0, 1).flatten(1)


def heads(x: Tensor, count: int) -> Tensor:
    """(T, H * D) -> (H, T, D)."""
    return x.unflatten(1, (count, -1)).transpose(0, 1)


def causal(length: int) -> Tensor:
    """(T, T): each token sees itself and those before it."""
    return torch.ones(length, length, dtype=torch.bool).tril()


class RMSNorm(torch.nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide / (wide.square().mean(-1, keepdim=True) + self.eps).sqrt()).to(x.dtype)


class Reference(PreTrainedModel):
    """A causal model of one sequence: `logits(ids (T,)) -> (T, vocab)` is the subclass's."""

    all_tied_weights_keys: ClassVar[dict[str, str]] = {}

    def forward(self, input_ids: Tensor, **_: object) -> CausalLMOutput:
        return CausalLMOutput(logits=torch.stack([self.logits(ids) for ids in input_ids]))

    def _init_weights(self, module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            module.weight.data.normal_(0, getattr(self.config, "initializer_range", 0.02))
