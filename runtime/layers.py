"""The layers of a decoder: from checkpoint names to ops. No layer knows bits; that is a property of its weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from nibblelm.config import DecoderConfig
from nibblelm.graph import Value
from nibblelm.kv_cache import KVCache
from nibblelm.ops.types import ActivationBits
from nibblelm.rope import Rope
from nibblelm.weights import PlanWeights, TensorSpec, Weights

__all__ = [
    "Attention",
    "Decoder",
    "DecoderModel",
    "Embedding",
    "Head",
    "HeadLayerNorm",
    "LayerNorm",
    "Linear",
    "Mlp",
    "PlainMlp",
    "PlanWeights",
    "ProjectionNorm",
    "RMSNorm",
    "Rope",
    "Step",
    "TensorSpec",
    "Weights",
    "heads_apart",
    "norm",
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
    places: Value | None = None  # of rotary angles in their tables, where these are not the positions; or two streams
    context: Value | None = None  # how many tokens of a bidirectional prompt all others see
    generated: int = 0  # of a step with tiles, so many tokens behind those of prompts


class Linear:
    """One projection, or several of one input side by side: (M, K) -> (M, N).

    order       the rows of the checkpoint in the order of the columns that come out
    transposed  the checkpoint has (K, N)
    """

    def __init__(
        self,
        weights: Weights,
        modules: Sequence[tuple[str, int]],
        columns: int,
        bias: bool = False,
        pairs: bool = False,
        order: Tensor | None = None,
        transposed: bool = False,
    ) -> None:
        self.packed = weights.matrices(modules, columns, pairs=pairs, order=order, transposed=transposed)
        self.bias = torch.cat([weights.vector(f"{name}.bias", rows) for name, rows in modules]) if bias else None
        if self.bias is not None and order is not None and len(self.bias):
            self.bias = self.bias[order.to(self.bias.device)]
        self.activation_bits: ActivationBits = weights.activation_bits
        self.device = weights.device

    @property
    def pairs(self) -> bool:
        """Whether the device has interleaved the rows of a gate and its up."""
        return len(self.packed) == 1 and self.packed[0].pairs

    def __call__(self, x: Value) -> Value:
        return x.linear(self.packed, self.bias, self.activation_bits)


class Head:
    """The output projection, perhaps scaled and soft-capped: (M, hidden) -> logits (M, vocab) in fp32."""

    def __init__(
        self,
        weights: Weights,
        config: DecoderConfig,
        module: str = "lm_head",
        table: str = "model.embed_tokens",
        bias: bool = False,
        columns: int | None = None,
    ) -> None:
        size = config.hidden_size if columns is None else columns
        self.packed = weights.head(module, table, config.vocab_size, size, config.tied, config.unit_head)
        self.bias = weights.vector(f"{module}.bias", config.vocab_size) if bias else None
        self.activation_bits: ActivationBits = weights.activation_bits
        self.scale, self.softcap = config.logit_scale, config.logit_softcap

    def __call__(self, x: Value) -> Value:
        logits = x.linear(self.packed, self.bias, self.activation_bits, torch.float32).scale(self.scale)
        return logits.softcap(self.softcap) if self.softcap else logits


class Embedding:
    """Token ids (M,) -> (M, hidden), times the family's multiplier."""

    def __init__(
        self, weights: Weights, module: str, config: DecoderConfig, columns: int | None = None, head: str = "lm_head"
    ) -> None:
        self.multiplier, self.dtype = config.embedding_multiplier, weights.dtype
        size = config.hidden_size if columns is None else columns
        self.table = weights.table(module, config.vocab_size, size, head if config.tied else None)

    def __call__(self, ids: Value) -> Value:
        return ids.embedding(self.table, self.dtype, self.multiplier)


class RMSNorm:
    """Root-mean-square norm of each row; `plus_one`: the gain is 1 + weight."""

    def __init__(self, weights: Weights, module: str, size: int, eps: float, plus_one: bool = False) -> None:
        self.weight, self.eps, self.plus_one = weights.vector(f"{module}.weight", size), eps, plus_one

    def __call__(self, x: Value) -> Value:
        return x.rms_norm(self.weight, self.eps, self.plus_one)


class LayerNorm:
    """LayerNorm of each row."""

    def __init__(self, weights: Weights, module: str, size: int, eps: float, bias: bool = True) -> None:
        self.weight = weights.vector(f"{module}.weight", size)
        self.bias = weights.vector(f"{module}.bias", size) if bias else None
        self.eps = eps

    def __call__(self, x: Value) -> Value:
        return x.layer_norm(self.weight, self.bias, self.eps)


class HeadLayerNorm:
    """LayerNorm of each head, (M, heads * D) -> (M, heads, D); gain (D,) of all or (heads, D) of each."""

    def __init__(self, gain: Tensor, config: DecoderConfig, bias: Tensor | None = None) -> None:
        self.gain, self.bias, self.head_dim, self.eps = gain, bias, config.head_dim, config.norm_eps

    def __call__(self, x: Value) -> Value:
        return x.heads(self.head_dim).layer_norm(self.gain, self.bias, self.eps)


class ProjectionNorm:
    """RMSNorm over all heads of q or k together, (M, heads * D) -> (M, heads, D)."""

    def __init__(self, weights: Weights, module: str, heads: int, config: DecoderConfig) -> None:
        self.norm, self.head_dim = RMSNorm(weights, module, heads * config.head_dim, config.norm_eps), config.head_dim

    def __call__(self, x: Value) -> Value:
        return self.norm(x).heads(self.head_dim)


def norm(weights: Weights, module: str, config: DecoderConfig) -> RMSNorm | LayerNorm:
    """The norm that a family has throughout, over the hidden state."""
    if config.norm in ("layer", "layer_without_bias"):
        return LayerNorm(weights, module, config.hidden_size, config.norm_eps, config.norm == "layer")
    return RMSNorm(weights, module, config.hidden_size, config.norm_eps, config.norm == "rms_plus_one")


HeadNorm = Callable[[Value], Value]
"""A norm of q or k, (M, heads * D) -> (M, heads, D), that is not RMSNorm of each head with one gain for all."""


class Attention:
    """Grouped-query attention with the positions, windows and caps that a family has.

    qkv          the projection to q, k and v, in this order
    norms        gains (head_dim,) of an RMSNorm of each head of q and k
    head_norms   other norms of q and of k
    scale        of q . k, where it differs from layer to layer
    """

    def __init__(
        self,
        qkv: Linear,
        o: Linear,
        config: DecoderConfig,
        rope: Rope,
        layer: int,
        norms: Sequence[Tensor] = (),
        head_norms: tuple[HeadNorm, HeadNorm] | None = None,
        scale: float | None = None,
    ) -> None:
        self.qkv, self.o, self.layer, self.head_norms = qkv, o, layer, head_norms
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.rope, self.interleaved = rope, config.interleaved
        self.norms: dict[str, Any] = {}
        if norms:
            self.norms = {"q_norm": norms[0], "k_norm": norms[1], "eps": config.norm_eps}
            if config.norm == "rms_plus_one":
                self.norms["plus_one"] = True
        scale = config.attention_scale if scale is None else scale
        self.options: dict[str, Any] = {"scale": config.head_dim**-0.5 if scale is None else scale}
        self.options["window"] = config.windows[layer]
        if config.attention_softcap:
            self.options["softcap"] = config.attention_softcap
        if config.alibi:
            self.options["alibi_slopes"] = torch.tensor(config.alibi).to(qkv.device)

    @classmethod
    def of_projections(
        cls,
        weights: Weights,
        name: str,
        config: DecoderConfig,
        rope: Rope,
        layer: int,
        o: str = "o_proj",
        **options: Any,
    ) -> "Attention":
        """From the modules q_proj, k_proj, v_proj, o_proj and, with qk_norm, q_norm and k_norm."""
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        parts = [(f"{name}.q_proj", q_size), (f"{name}.k_proj", kv_size), (f"{name}.v_proj", kv_size)]
        qkv = Linear(weights, parts, config.hidden_size, config.qkv_bias)
        out = Linear(weights, [(f"{name}.{o}", config.hidden_size)], q_size, config.o_bias)
        if config.qk_norm:
            options["norms"] = [weights.vector(f"{name}.{p}_norm.weight", config.head_dim) for p in "qk"]
        return cls(qkv, out, config, rope, layer, **options)

    @classmethod
    def of_fused(
        cls,
        weights: Weights,
        qkv: str,
        o: str,
        config: DecoderConfig,
        rope: Rope,
        layer: int,
        order: Tensor | None = None,
        **options: Any,
    ) -> "Attention":
        """From one module for q, k and v, whose rows come in another `order`, and one for the output."""
        q_size, kv_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        hidden, turned, rows = config.hidden_size, config.transposed, q_size + 2 * kv_size
        fused = Linear(weights, [(qkv, rows)], hidden, config.qkv_bias, order=order, transposed=turned)
        out = Linear(weights, [(o, hidden)], q_size, config.o_bias, transposed=turned)
        return cls(fused, out, config, rope, layer, **options)

    def __call__(self, x: Value, step: Step) -> Value:
        cache = step.cache
        caches = {"k_cache": cache.keys[self.layer], "v_cache": cache.values[self.layer], "tables": cache.tables}
        qkv, rotation, table = self.qkv(x), self._rotation(), self.rope.of(self.layer)
        moved = table is not None and (table.rope.chooses or self.rope.gap is not None)
        places = step.places if moved else None
        if self.head_norms is None and rotation and "q_cos" not in rotation:
            qkv = qkv.heads(self.head_dim)
            q = qkv.rope_append(step.positions, step.slots, places, **caches, **rotation, **self.norms)
        else:
            q, k, v = self._parts(qkv)
            q = q.append(k, v, step.positions, step.slots, places, **caches, **rotation)
        options = {**caches, **self.options} | ({"generated": step.generated} if step.generated else {})
        return self.o(q.attention(step.positions, step.slots, step.tiles, step.context, **options))

    def _rotation(self) -> dict[str, Any]:
        """The tables of angles as they are now, and how pairs lie; empty: nothing is rotated."""
        table = self.rope.of(self.layer)
        if table is None:
            return {}
        rotation: dict[str, Any] = {"cos": table.cos, "sin": table.sin}
        if self.interleaved:
            rotation["interleaved"] = True
        return rotation if table.q_cos is None else {**rotation, "q_cos": table.q_cos, "q_sin": table.q_sin}

    def _parts(self, qkv: Value) -> tuple[Value, Value, Value]:
        """q, k and v, (M, heads, D) each, normed where there is a norm that `rope_append` has not."""
        size, each = self.head_dim, self.kv_heads * self.head_dim
        first = self.heads * size
        q, k, v = qkv.columns(0, first), qkv.columns(first, first + each), qkv.columns(first + each, first + 2 * each)
        if self.head_norms is None:
            return q.heads(size), k.heads(size), v.heads(size)
        return self.head_norms[0](q), self.head_norms[1](k), v.heads(size)


def heads_apart(config: DecoderConfig) -> Tensor:
    """The order of rows that makes [all q, all k, all v] of a fused projection that has, kv head after kv head, its
    query heads, its key and its value."""
    group, size = config.heads // config.kv_heads, config.head_dim
    rows = torch.arange((config.heads + 2 * config.kv_heads) * size).view(config.kv_heads, group + 2, size)
    return torch.cat([rows[:, :group].flatten(), rows[:, group].flatten(), rows[:, group + 1].flatten()])


class Mlp:
    """The gated feed-forward down(act(gate(x)) * up(x)).

    parts  the modules of gate, up and down, or of gate and up in one and down
    """

    def __init__(
        self,
        weights: Weights,
        name: str,
        config: DecoderConfig,
        form: Literal["silu", "tanh", "erf"] = "silu",
        parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        self.form = form
        size, hidden, bias, (*first, down) = config.intermediate_size, config.hidden_size, config.mlp_bias, parts
        modules = [(f"{name}.{part}", 2 * size // len(first)) for part in first]
        self.gate_up = Linear(weights, modules, hidden, bias, pairs=not bias)
        self.down = Linear(weights, [(f"{name}.{down}", hidden)], size, bias)

    def __call__(self, x: Value) -> Value:
        gate_up, pairs = self.gate_up(x), self.gate_up.pairs
        return self.down(gate_up.swiglu(pairs) if self.form == "silu" else gate_up.geglu(self.form, pairs))


class PlainMlp:
    """The feed-forward down(act(up(x)))."""

    def __init__(
        self, weights: Weights, up: str, down: str, config: DecoderConfig, form: Literal["tanh", "erf", "relu"]
    ) -> None:
        self.form = form
        size, hidden = config.intermediate_size, config.hidden_size
        self.up = Linear(weights, [(up, size)], hidden, config.mlp_bias, transposed=config.transposed)
        self.down = Linear(weights, [(down, hidden)], size, config.mlp_bias, transposed=config.transposed)

    def __call__(self, x: Value) -> Value:
        up = self.up(x)
        return self.down(up.relu() if self.form == "relu" else up.gelu(self.form))


class DecoderLayer(Protocol):
    """One layer on the residual stream, (M, hidden)."""

    def __call__(self, x: Value, step: Step) -> Value: ...


class Decoder:
    """Token ids to hidden states to logits: the frame that families share. Each names its layer and its modules."""

    layer: Callable[[Weights, Any, Rope, int], DecoderLayer]
    table, final_norm, lm_head, head_bias = "model.embed_tokens", "model.norm", "lm_head", False

    def __init__(self, weights: Weights, config: DecoderConfig, positions: int) -> None:
        self.config = config
        self.embedding = Embedding(weights, self.table, config, head=self.lm_head)
        self.rope = Rope(config, positions, weights.device)
        layer = type(self).layer
        self.layers = [layer(weights, config, self.rope, i) for i in range(config.layers)]
        self.norm = norm(weights, self.final_norm, config)
        self.head = Head(weights, config, self.lm_head, self.table, self.head_bias)

    def embed(self, step: Step) -> Value:
        """What the first layer reads."""
        return self.embedding(step.ids)

    def forward(self, step: Step) -> Value:
        """Logits (R, vocab) in fp32 of a step's wanted tokens; the step's keys and values enter its cache."""
        x = self.embed(step)
        for layer in self.layers:
            x = layer(x, step)
        return self.head(self.norm(x.rows(step.wanted)))


class DecoderModel(Protocol):
    """What models/<type>.py exports as `Model`."""

    config: DecoderConfig
    rope: Rope

    def forward(self, step: Step) -> Value: ...
