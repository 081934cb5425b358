"""A step's ops as a straight list: recorded from a model's forward, fused by a device's rules, run node by node.

A forward computes with `Value`s, which offer the ops of the contract and nothing else, so no torch op can stand between
two ops, which a replayed program would miss. The list does not depend on the number of tokens M.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.ops.types import ActivationBits, PackedLinear, Weight

__all__ = ["Alone", "Graph", "Node", "Rule", "Value", "add_norm", "fused", "record"]


class Value:
    """What a node gives: for each of M tokens `width` numbers of `dtype`, or (width 0) one int32."""

    def __init__(self, nodes: list["Node"], width: int, dtype: torch.dtype) -> None:
        self.nodes, self.width, self.dtype = nodes, width, dtype

    def _op(
        self,
        op: str,
        inputs: Mapping[str, "Value"],
        attributes: Mapping[str, Any],
        width: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> "Value":
        result = Value(self.nodes, self.width if width is None else width, dtype or self.dtype)
        self.nodes.append(Node(op, dict(inputs), dict(attributes), (result,)))
        return result

    def embedding(self, table: Weight, dtype: torch.dtype, multiplier: float = 1.0) -> "Value":
        """Rows of a table for ids."""
        attributes = {"table": table, "dtype": dtype, "multiplier": multiplier}
        return self._op("embedding", {"ids": self}, attributes, table.shape[1], dtype)

    def __add__(self, other: "Value") -> "Value":
        if (self.width, self.dtype) != (other.width, other.dtype):
            raise ValueError(f"add: widths {self.width} and {other.width}, {self.dtype} and {other.dtype}; want equal")
        return self._op("add", {"x": self, "y": other}, {})

    def linear(
        self,
        weights: Sequence[PackedLinear],
        bias: Tensor | None,
        activation_bits: ActivationBits,
        dtype: torch.dtype | None = None,
    ) -> "Value":
        """The products with matrices (N_i, K) side by side, (M, sum N_i), in `dtype` if given."""
        attributes = {"bias": bias, "activation_bits": activation_bits, "dtype": dtype or self.dtype}
        width = sum(weight.shape[0] for weight in weights)
        if len(weights) == 1:
            return self._op("linear", {"x": self}, {"weight": weights[0], **attributes}, width, dtype)
        return self._op("linears", {"x": self}, {"weights": tuple(weights), **attributes}, width, dtype)

    def rms_norm(self, weight: Tensor, eps: float, plus_one: bool = False) -> "Value":
        return self._op("rms_norm", {"x": self}, {"weight": weight, "eps": eps, "plus_one": plus_one})

    def layer_norm(self, weight: Tensor, bias: Tensor | None, eps: float) -> "Value":
        return self._op("layer_norm", {"x": self}, {"weight": weight, "bias": bias, "eps": eps})

    def gelu(self, form: ops.Gelu) -> "Value":
        return self._op("gelu", {"x": self}, {"form": form})

    def geglu(self, form: ops.Gelu, pairs: bool = False) -> "Value":
        return self._op("geglu", {"gate_up": self}, {"form": form, "pairs": pairs}, self.width // 2)

    def relu(self) -> "Value":
        return self._op("relu", {"x": self}, {})

    def scale(self, factor: float) -> "Value":
        """Times a number; times 1 is the value itself."""
        return self if factor == 1.0 else self._op("scale", {"x": self}, {"factor": factor})

    def softcap(self, cap: float) -> "Value":
        return self._op("softcap", {"x": self}, {"cap": cap})

    def swiglu(self, pairs: bool = False) -> "Value":
        return self._op("swiglu", {"gate_up": self}, {"pairs": pairs}, self.width // 2)

    def heads(self, head_dim: int) -> "Value":
        """The same numbers as (M, heads, head_dim)."""
        return self._op("heads", {"x": self}, {"head_dim": head_dim})

    def columns(self, first: int, last: int) -> "Value":
        """The numbers from `first` to before `last` of each token, or of (M, heads, D) those heads."""
        return self._op("columns", {"x": self}, {"first": first, "last": last}, last - first)

    def rows(self, wanted: "Value | None") -> "Value":
        """Those of some tokens, whose numbers `wanted` holds; None: all."""
        return self if wanted is None else self._op("rows", {"x": self, "wanted": wanted}, {})

    def rope_append(self, positions: "Value", slots: "Value", places: "Value | None" = None, **options: Any) -> "Value":
        """(M, H + 2 Hkv, D) -> (M, H, D); options as in `ops.rope_append`, the caches among them."""
        cache: Tensor = options["k_cache"]
        width = self.width - 2 * cache.shape[1] * cache.shape[3]
        inputs = {"qkv": self, "positions": positions, "slots": slots} | ({} if places is None else {"places": places})
        return self._op("rope_append", inputs, options, width)

    def append(
        self,
        k: "Value",
        v: "Value",
        positions: "Value",
        slots: "Value",
        places: "Value | None" = None,
        **options: Any,
    ) -> "Value":
        """q (M, H, D) rotated, k and v (M, Hkv, D) in the cache: what `rope_append` does, of separate values.

        cos, sin  left out: nothing is rotated; q_cos, q_sin, if given, are for q
        """
        inputs = {"q": self, "k": k, "v": v, "positions": positions, "slots": slots}
        return self._op("append", inputs | ({} if places is None else {"places": places}), options)

    def attention(
        self,
        positions: "Value",
        slots: "Value",
        tiles: "Value | None" = None,
        prefix: "Value | None" = None,
        **options: Any,
    ) -> "Value":
        """(M, H, D) -> (M, H D); options as in `ops.attention`, the caches among them."""
        given = {"q": self, "positions": positions, "slots": slots, "tiles": tiles, "prefix_lengths": prefix}
        return self._op("attention", {name: value for name, value in given.items() if value is not None}, options)


@dataclass(frozen=True, eq=False)
class Node:
    """A call of an op by keyword, `op(**inputs, **attributes)`, and what it gives (an op may give more)."""

    op: str
    inputs: dict[str, Value]
    attributes: dict[str, Any]
    outputs: tuple[Value, ...]

    def reads(self, value: Value, *names: str) -> bool:
        """Whether `value` is one of the inputs called `names`."""
        return any(self.inputs.get(name) is value for name in names)


@dataclass(frozen=True)
class Graph:
    """Nodes in their order, from `inputs` to `output`."""

    inputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    output: Value
    device: torch.device

    def __call__(self, *tensors: Tensor) -> Tensor:
        """The output of every node run once, with `tensors` as the inputs."""
        held = dict(zip(self.inputs, tensors, strict=True))
        self.run(held, 0, len(self.nodes))
        return held[self.output]

    def run(self, held: dict[Value, Tensor], first: int, last: int) -> None:
        """Run nodes[first:last] on what is `held`."""
        for at in range(first, last):
            node = self.nodes[at]
            inputs = {name: held[value] for name, value in node.inputs.items()}
            self.put(held, at, self._calls[at][0](**inputs, **node.attributes))

    def put(self, held: dict[Value, Tensor], at: int, results: Tensor | tuple[Tensor, ...]) -> None:
        """Enter what nodes[at] gives into `held`, which loses what no later node reads."""
        held.update(zip(self.nodes[at].outputs, results if isinstance(results, tuple) else (results,), strict=False))
        for value in self._calls[at][1]:
            held.pop(value)

    @cached_property
    def _calls(self) -> list[tuple[Callable[..., Any], set[Value]]]:
        """Each node's function, and the values that no later node reads."""
        read, calls = {self.output}, []
        for node in reversed(self.nodes):
            touched = {*node.inputs.values(), *node.outputs}
            calls.append((self._function(node.op), touched - read))
            read |= touched
        return calls[::-1]

    def _function(self, op: str) -> Callable[..., Any]:
        """A view, an op of the contract, or a kernel that stands for several on this device."""
        return _VIEWS.get(op) or getattr(ops, op, None) or getattr(ops.backend(self.device), op)


def _linears(
    x: Tensor, weights: Sequence[PackedLinear], bias: Tensor | None, activation_bits: ActivationBits, dtype: torch.dtype
) -> Tensor:
    """Parts of different schemes run apart, each into its own columns."""
    out, first = x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights), dtype=dtype), 0
    for weight in weights:
        last = first + weight.shape[0]
        ops.linear(x, weight, None if bias is None else bias[first:last], activation_bits, out[:, first:last])
        first = last
    return out


def _append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    slots: Tensor,
    tables: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    places: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    q_cos: Tensor | None = None,
    q_sin: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    if cos is not None and sin is not None:
        angles = positions if places is None else places
        ops.rope(q, angles, cos if q_cos is None else q_cos, sin if q_sin is None else q_sin, interleaved)
        ops.rope(k, angles, cos, sin, interleaved)
    ops.kv_append(k, v, k_cache, v_cache, slots, positions, tables)
    return q


_VIEWS: dict[str, Callable[..., Tensor]] = {
    "append": _append,
    "heads": lambda x, head_dim: x.unflatten(1, (-1, head_dim)),
    "columns": lambda x, first, last: x[:, first:last],
    "rows": lambda x, wanted: x.index_select(0, wanted),
    "linears": _linears,
}


def record(forward: Callable[..., Value], inputs: int, device: torch.device) -> Graph:
    """The ops of `forward` on that many int32 values of each token: ids, positions ..."""
    nodes: list[Node] = []
    values = tuple(Value(nodes, 0, torch.int32) for _ in range(inputs))
    output = forward(*values)
    graph = Graph(values, tuple(nodes), output, device)
    nodes.clear()  # which every value has: a circle, in which weights and caches would wait for a garbage collection
    return graph


Alone = Callable[[Value], bool]
"""Whether exactly one node reads a value, and nobody after the last node."""

Rule = Callable[[Sequence[Node], Alone], tuple[int, list[Node]] | None]
"""(nodes from some node on, readers) -> how many of them are replaced, and by what. None: nothing here.

A rule may drop a value only if the one node that reads it goes too; what it gives has the bits of what it replaces.
"""


def fused(graph: Graph, related: bool = False) -> Graph:
    """The same computation, the same bits, with the kernels that the graph's device has for several ops together.

    related  generated tokens may attend to others of the same step
    """
    module = import_module(f"nibblelm.graph.{graph.device.type}")
    for rule in module.RELATED_RULES if related else module.RULES:
        graph = _rewritten(graph, rule)
    return graph


def _rewritten(graph: Graph, rule: Rule) -> Graph:
    reads = Counter(value for node in graph.nodes for value in node.inputs.values())
    reads[graph.output] += 1
    result: list[Node] = []
    at = 0
    while at < len(graph.nodes):
        count, nodes = rule(graph.nodes[at:], lambda value: reads[value] == 1) or (1, [graph.nodes[at]])
        result += nodes
        at += count
    return replace(graph, nodes=tuple(result))


def add_norm(nodes: Sequence[Node], alone: Alone) -> tuple[int, list[Node]] | None:
    """add, norm -> the norm with a residual, which gives the sum too; of chosen rows, where only these go on."""
    add, *rest = nodes[:3]
    if add.op != "add" or not rest:
        return None
    (total,), parts, chosen = add.outputs, {"residual": add.inputs["x"], "x": add.inputs["y"]}, []
    if rest[0].op == "rows" and rest[0].reads(total, "x") and alone(total):
        row = rest.pop(0)
        for name, part in parts.items():
            parts[name] = Value(total.nodes, part.width, part.dtype)
            chosen.append(Node("rows", {**row.inputs, "x": part}, row.attributes, (parts[name],)))
        (total,) = row.outputs
    if not rest or rest[0].op not in {"rms_norm", "layer_norm"} or not rest[0].reads(total, "x"):
        return None
    norm = Node(rest[0].op, parts, rest[0].attributes, (*rest[0].outputs, total))
    return (3 if chosen else 2), [*chosen, norm]
