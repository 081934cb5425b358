"""The layers of a decoder: from checkpoint names to ops. No layer knows bits; that is a property of its weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nibblelm.config import DecoderConfig
from nibblelm.graph import Value
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
    "LayerNorm",
    "Linear",
    "Mlp",
    "PlanWeights",
    "RMSNorm",
    "Rope",
    "Step",
    "TensorSpec",
    "Weights",
    "rope_bytes",
]


@dataclass(frozen=True)
class Step:
    """M new tokens: ids, positions and cache slots, (M,) int32 each, and the cache they enter.

    tiles   (T, 2) int32 where the tokens are of prompts, as in `ops.attention`; else each is generated
    wanted  (R,) int32, the tokens whose logits are wanted; None: all
    """

    ids: Value
    positions: Value
    slots: Value
    cache: KVCache
    tiles: Value | None = None
    wanted: Value | None = None


class Linear:
    """One projection, or several of one input side by side: (M, K) -> (M, N).

    order  the rows of the checkpoint in the order of the columns that come out
    """

    def __init__(
        self,
        weights: Weights,
        modules: Sequence[tuple[str, int]],
        columns: int,
        bias: bool = False,
        pairs: bool = False,
        order: Tensor | None = None,
    ) -> None:
        self.packed = weights.matrices(modules, columns, pairs=pairs, order=order)
        self.bias = torch.cat([weights.vector(f"{name}.bias", rows) for name, rows in modules]) if bias else None
        if self.bias is not None and order is not None and len(self.bias):
            self.bias = self.bias[order.to(self.bias.device)]
        self.activation_bits: ActivationBits = weights.activation_bits

    @property
    def pairs(self) -> bool:
        """Whether the device has interleaved the rows of a gate and its up."""
        return len(self.packed) == 1 and self.packed[0].pairs

    def __call__(self, x: Value) -> Value:
        return x.linear(self.packed, self.bias, self.activation_bits)


class Head:
    """The output projection: (M, hidden) -> logits (M, vocab) in fp32."""

    def __init__(
        self,
        weights: Weights,
        config: DecoderConfig,
        module: str = "lm_head",
        table: str = "model.embed_tokens",
    ) -> None:
        self.packed = weights.head(module, table, config.vocab_size, config.hidden_size, config.tied)
        self.activation_bits: ActivationBits = weights.activation_bits

    def __call__(self, x: Value) -> Value:
        return x.linear(self.packed, None, self.activation_bits, torch.float32)


class Embedding:
    """Token ids (M,) -> (M, hidden), times `multiplier`."""

    def __init__(self, weights: Weights, module: str, config: DecoderConfig, multiplier: float = 1.0) -> None:
        self.multiplier = multiplier
        self.table = weights.table(module, config.vocab_size, config.hidden_size, config.tied)
        self.dtype = weights.dtype

    def __call__(self, ids: Value) -> Value:
        return ids.embedding(self.table, self.dtype, self.multiplier)


class RMSNorm:
    """Root-mean-square norm of each row; `plus_one`: the gain is 1 + weight."""

    def __init__(self, weights: Weights, module: str, size: int, eps: float, plus_one: bool = False) -> None:
        self.weight, self.eps, self.plus_one = weights.vector(f"{module}.weight", size), eps, plus_one

    def __call__(self, x: Value) -> Value:
        return x.rms_norm(self.weight, self.eps, self.plus_one)


class LayerNorm:
    """LayerNorm of each row, with a bias."""

    def __init__(self, weights: Weights, module: str, size: int, eps: float) -> None:
        self.weight, self.bias = (weights.vector(f"{module}.{part}", size) for part in ("weight", "bias"))
        self.eps = eps

    def __call__(self, x: Value) -> Value:
        return x.layer_norm(self.weight, self.bias, self.eps)


class Rope:
    """The cos and sin tables that every layer shares, (positions, rotary_dim / 2) in fp32.

    On the CPU rows are computed when `reach` asks for them, at addresses that stay, so a long context limit costs
    nothing until it is used; on CUDA all at once. There is one for every position of the cache's last page.
    """

    def __init__(self, config: DecoderConfig, positions: int, device: torch.device) -> None:
        self._config, self._made = config, 0
        shape = (page_count(positions) * PAGE, config.rotary_dim // 2)
        self.cos, self.sin = (reserved(shape, torch.float32, device) for _ in range(2))
        if device.type != "cpu":
            self.reach(shape[0])

    def reach(self, positions: int) -> None:
        """Make rows for at least that many positions, as far as there is room."""
        wanted = min(-(-positions // _ROPE_BLOCK) * _ROPE_BLOCK, self.cos.shape[0])
        while self._made < wanted:
            rows = slice(self._made, min(self._made + _ROPE_BLOCK, wanted))
            cos, sin = tables(self._config.rope, self._config.rotary_dim, rows.start, rows.stop)
            self.cos[rows], self.sin[rows] = cos, sin
            self._made = rows.stop


def rope_bytes(config: DecoderConfig, positions: int) -> int:
    """Bytes of the tables for that many positions."""
    return 2 * positions * (config.rotary_dim // 2) * 4


class Attention:
    """Grouped-query attention with rotary positions and, where the family has it, a norm on each head of q and k."""

    def __init__(
        self,
        qkv: Linear,
        o: Linear,
        config: DecoderConfig,
        rope: Rope,
        layer: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
    ) -> None:
        self.qkv, self.o, self.rope, self.layer, self.head_dim = qkv, o, rope, layer, config.head_dim
        self.norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": config.norm_eps}
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.options: dict[str, float] = {"scale": scale, "window": config.windows[layer]}
        if config.attention_softcap:
            self.options["softcap"] = config.attention_softcap

    @classmethod
    def of_projections(cls, weights: Weights, name: str, config: DecoderConfig, rope: Rope, layer: int) -> "Attention":
        """From the modules q_proj, k_proj, v_proj, o_proj and, with qk_norm, q_norm and k_norm."""
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        parts = [(f"{name}.q_proj", q_size), (f"{name}.k_proj", kv_size), (f"{name}.v_proj", kv_size)]
        qkv = Linear(weights, parts, config.hidden_size, config.qkv_bias)
        o = Linear(weights, [(f"{name}.o_proj", config.hidden_size)], q_size, config.o_bias)
        norms = [weights.vector(f"{name}.{p}_norm.weight", config.head_dim) for p in "qk"] if config.qk_norm else []
        return cls(qkv, o, config, rope, layer, *norms)

    def __call__(self, x: Value, step: Step) -> Value:
        cache = step.cache
        caches = {"k_cache": cache.keys[self.layer], "v_cache": cache.values[self.layer], "tables": cache.tables}
        qkv = self.qkv(x).heads(self.head_dim)
        q = qkv.rope_append(step.positions, step.slots, cos=self.rope.cos, sin=self.rope.sin, **caches, **self.norms)
        return self.o(q.attention(step.positions, step.slots, step.tiles, **caches, **self.options))


class Mlp:
    """The gated feed-forward down(silu(gate(x)) * up(x)), or with tanh-GELU in place of silu."""

    def __init__(self, weights: Weights, name: str, config: DecoderConfig, gelu: bool = False) -> None:
        self.gelu = gelu
        size, hidden = config.intermediate_size, config.hidden_size
        parts = [(f"{name}.gate_proj", size), (f"{name}.up_proj", size)]
        self.gate_up = Linear(weights, parts, hidden, config.mlp_bias, pairs=not (gelu or config.mlp_bias))
        self.down = Linear(weights, [(f"{name}.down_proj", hidden)], size, config.mlp_bias)

    def __call__(self, x: Value) -> Value:
        gate_up = self.gate_up(x)
        return self.down(gate_up.geglu("tanh") if self.gelu else gate_up.swiglu(self.gate_up.pairs))
