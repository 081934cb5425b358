"""The layers of a decoder: from checkpoint names to ops. No layer knows bits; that is a property of its weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.config import DecoderConfig
from nibblelm.kv_cache import KVCache
from nibblelm.memory import reserved
from nibblelm.ops.types import PAGE, ActivationBits
from nibblelm.pages import page_count
from nibblelm.rope_scaling import tables
from nibblelm.weights import PlanWeights, TensorSpec, Weights

_ROPE_BLOCK = 1024
"""Positions whose rows are made together."""

__all__ = [
    "Attention",
    "Embedding",
    "Head",
    "Linear",
    "Link",
    "Mlp",
    "PlanWeights",
    "RMSNorm",
    "Rope",
    "Step",
    "TensorSpec",
    "Weights",
    "rope_bytes",
    "run",
]


@dataclass(frozen=True)
class Step:
    """M new tokens: ids, positions and cache slots, (M,) int32 each, and the cache they enter."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    cache: KVCache
    one_sequence: bool = False  # all tokens follow each other in one slot: a prompt


class Linear:
    """One projection, or several of one input side by side: (M, K) -> (M, N)."""

    def __init__(
        self,
        weights: Weights,
        modules: Sequence[tuple[str, int]],
        columns: int,
        bias: bool = False,
        pairs: bool = False,
    ) -> None:
        self.packed = weights.matrices(modules, columns, pairs=pairs)
        self.rows = sum(rows for _, rows in modules)
        self.bias = torch.cat([weights.vector(f"{name}.bias", rows) for name, rows in modules]) if bias else None
        self.activation_bits: ActivationBits = weights.activation_bits

    def __call__(self, x: Tensor) -> Tensor:
        if len(self.packed) == 1:
            return ops.linear(x, self.packed[0], self.bias, self.activation_bits)
        out, first = x.new_empty(x.shape[0], self.rows), 0
        for packed in self.packed:  # parts of different schemes run apart, each into its own columns
            last = first + packed.shape[0]
            bias = None if self.bias is None else self.bias[first:last]
            ops.linear(x, packed, bias, self.activation_bits, out[:, first:last])
            first = last
        return out


@dataclass(frozen=True)
class Link:
    """A projection of the residual stream's norm (gated: then SwiGLU), or without a norm of what comes before it."""

    linear: Linear
    norm: "RMSNorm | None" = None
    gated: bool = False


def run(links: Sequence[Link], x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Links one after another: (what the last one gives, the residual stream), (M, K) -> (M, N)."""
    if all(len(link.linear.packed) == 1 for link in links):
        steps = [
            ops.LinearStep(link.linear.packed[0], link.linear.bias, gated=link.gated)
            if link.norm is None
            else ops.LinearStep(
                link.linear.packed[0], link.linear.bias, link.norm.weight, link.norm.eps, gated=link.gated
            )
            for link in links
        ]
        return ops.linear_chain(x, residual, steps, links[0].linear.activation_bits)
    if len(links) > 1:
        for link in links:
            x, residual = run([link], x, residual)
        return x, residual
    (link,) = links
    if link.norm is not None:
        x, residual = link.norm(x, residual)
    x = link.linear(x)
    return (ops.swiglu(x) if link.gated else x), residual


class Head:
    """The final norm and the output projection: (M, hidden) -> logits (M, vocab) in fp32."""

    def __init__(
        self,
        weights: Weights,
        config: DecoderConfig,
        module: str = "lm_head",
        table: str = "model.embed_tokens",
    ) -> None:
        self.packed = weights.head(module, table, config.vocab_size, config.hidden_size, config.tied)
        self.activation_bits: ActivationBits = weights.activation_bits

    def __call__(self, norm: "RMSNorm", x: Tensor, residual: Tensor | None) -> Tensor:
        out = x.new_empty(x.shape[0], self.packed[0].shape[0], dtype=torch.float32)
        bits = self.activation_bits
        return ops.norm_linear(x, norm.weight, norm.eps, residual, self.packed[0], None, bits, out)[0]


class Embedding:
    """Token ids (M,) -> (M, hidden)."""

    def __init__(self, weights: Weights, module: str, config: DecoderConfig) -> None:
        self.table = weights.table(module, config.vocab_size, config.hidden_size, config.tied)
        self.dtype = weights.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        return ops.embedding(ids, self.table, self.dtype)


class RMSNorm:
    """Root-mean-square norm with the residual add before it: returns (norm(h), h), h = x + residual."""

    def __init__(self, weights: Weights, module: str, size: int, eps: float) -> None:
        self.weight, self.eps = weights.vector(f"{module}.weight", size), eps

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return ops.rms_norm(x, self.weight, self.eps, residual)


class Rope:
    """The cos and sin tables that every layer shares, (positions, head_dim / 2) in fp32.

    On the CPU rows are computed when `reach` asks for them, at addresses that stay, so a long context limit costs
    nothing until it is used; on CUDA all at once. There is one for every position of the cache's last page.
    """

    def __init__(self, config: DecoderConfig, positions: int, device: torch.device) -> None:
        self._config, self._made = config, 0
        shape = (page_count(positions) * PAGE, config.head_dim // 2)
        self.cos, self.sin = (reserved(shape, torch.float32, device) for _ in range(2))
        if device.type != "cpu":
            self.reach(shape[0])

    def reach(self, positions: int) -> None:
        """Make rows for at least that many positions, as far as there is room."""
        wanted = min(-(-positions // _ROPE_BLOCK) * _ROPE_BLOCK, self.cos.shape[0])
        while self._made < wanted:
            rows = slice(self._made, min(self._made + _ROPE_BLOCK, wanted))
            cos, sin = tables(self._config.rope, self._config.head_dim, rows.start, rows.stop)
            self.cos[rows], self.sin[rows] = cos, sin
            self._made = rows.stop


def rope_bytes(config: DecoderConfig, positions: int) -> int:
    """Bytes of the tables for that many positions."""
    return 2 * positions * (config.head_dim // 2) * 4


class Attention:
    """Grouped-query attention with rotary positions and, where the family has it, a norm on each head of q and k.

    `before` gives q, k and v of the residual stream's norm, side by side; a call attends; `after` projects the heads.
    """

    def __init__(
        self, weights: Weights, name: str, config: DecoderConfig, rope: Rope, layer: int, norm: RMSNorm
    ) -> None:
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.layer, self.window, self.rope = layer, config.windows[layer], rope
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = [(f"{name}.q_proj", q_size), (f"{name}.k_proj", kv_size), (f"{name}.v_proj", kv_size)]
        self.before = Link(Linear(weights, parts, config.hidden_size, config.qkv_bias), norm)
        self.after = Link(Linear(weights, [(f"{name}.o_proj", config.hidden_size)], q_size, config.o_bias))
        self.eps = config.norm_eps
        norms = [weights.vector(f"{name}.{part}_norm.weight", self.head_dim) for part in "qk"] if config.qk_norm else []
        self.q_norm, self.k_norm = norms or (None, None)

    def __call__(self, qkv: Tensor, step: Step) -> Tensor:
        """(M, (H + 2 Hkv) D), which is undefined afterwards -> (M, H D)."""
        qkv = qkv.view(qkv.shape[0], -1, self.head_dim)
        keys, values = step.cache.keys[self.layer], step.cache.values[self.layer]
        places = (step.positions, step.slots, step.cache.tables, self.rope.cos, self.rope.sin, keys, values)
        norms = {"q_norm": self.q_norm, "k_norm": self.k_norm, "eps": self.eps}
        scale = self.head_dim**-0.5
        return ops.rope_attention(qkv, *places, scale, self.window, one_sequence=step.one_sequence, **norms)


class Mlp:
    """The SwiGLU feed-forward down(silu(gate(x)) * up(x)) of the residual stream's norm."""

    def __init__(self, weights: Weights, name: str, config: DecoderConfig, norm: RMSNorm) -> None:
        size, hidden = config.intermediate_size, config.hidden_size
        parts = [(f"{name}.gate_proj", size), (f"{name}.up_proj", size)]
        gate_up = Linear(weights, parts, hidden, config.mlp_bias, pairs=not config.mlp_bias)
        down = Linear(weights, [(f"{name}.down_proj", hidden)], size, config.mlp_bias)
        self.links = [Link(gate_up, norm, gated=True), Link(down)]
