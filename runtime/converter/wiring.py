"""What of a model can be rotated or scaled without changing its function: found in the recorded forward.

The residual stream is what may be multiplied by an orthogonal matrix: what tables and linears give, their sums and
multiples, and the norms of those, up to the linears that read them. A value that anything else reads is not of it, nor
is what it is added to.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nibblelm.config import DecoderConfig
from nibblelm.converter.calibration import Skeleton, recorded
from nibblelm.graph import Graph, Node, Value
from nibblelm.models import family
from nibblelm.ops.types import PackedLinear, Weight

_LINEAR = ("add", "scale", "rows")
_NORMS = ("rms_norm", "layer_norm")


@dataclass
class Wiring:
    """Names of modules and tensors.

    tables    tensors whose rows enter the stream
    writers   modules whose outputs do
    readers   modules that read it, each with the gain of the norm before it
    gains     of those norms, each with whether 1 is added to it
    biases    of those norms, each with the norm's gain
    centred   whether some of those norms subtract the mean
    values    modules with the rows of the values, head after head; only those that nothing but attention's mean and
              then linears read
    mixers    modules that read what attention gives of these
    """

    tables: set[str] = field(default_factory=set)
    writers: set[str] = field(default_factory=set)
    readers: dict[str, str | None] = field(default_factory=dict)
    gains: dict[str, bool] = field(default_factory=dict)
    biases: dict[str, str] = field(default_factory=dict)
    centred: bool = False
    values: dict[str, Tensor] = field(default_factory=dict)
    mixers: set[str] = field(default_factory=set)


class _Names(Skeleton):
    """Stand-ins of one number each, known by their storage."""

    def __init__(self) -> None:
        super().__init__(lambda name: torch.empty(0), torch.device("cpu"))
        self.sizes: dict[str, int] = {}
        self.unit_rows: set[str] = set()
        self._names: dict[int, str] = {}
        self._held: list[Tensor] = []

    def name(self, tensor: Tensor) -> str:
        return self._names[tensor.untyped_storage().data_ptr()]

    def matrices(self, modules: Sequence[tuple[str, int]], *args: Any, **options: Any) -> list[PackedLinear]:
        self.sizes.update(modules)
        return super().matrices(modules, *args, **options)

    def head(
        self, module: str, table: str, rows: int, columns: int, tied: bool, unit_rows: bool = False
    ) -> list[PackedLinear]:
        self.unit_rows.update([module] if unit_rows else [])
        return super().head(module, table, rows, columns, tied, unit_rows)

    def vector(self, name: str, *shape: int) -> Tensor:
        self._held.append(torch.ones(1))
        self._names[self._held[-1].untyped_storage().data_ptr()] = name
        return self._held[-1].expand(shape)

    def table(self, module: str, rows: int, columns: int, head: str | None) -> Weight:
        return self.vector(f"{module}.weight", rows, columns)


def wiring(raw: Mapping[str, Any], config: DecoderConfig) -> Wiring:
    """Of the model of a config.json. Without writers where its residual stream is not as above."""
    names = _Names()
    graph = recorded(family(raw).Model(names, config, 1), config, 1, names.device)
    stream = _stream(graph, names, config.hidden_size)
    found, makers = Wiring(), {value: node for node in graph.nodes for value in node.outputs}
    for node in graph.nodes:
        inside = node.outputs[0] in stream
        if node.op == "embedding" and inside:
            found.tables.add(names.name(node.attributes["table"]))
        elif node.op in _NORMS and inside:
            gain, bias = node.attributes["weight"], node.attributes.get("bias")
            found.gains[names.name(gain)] = node.attributes.get("plus_one", False)
            if bias is not None:
                found.biases[names.name(bias)] = names.name(gain)
            found.centred |= node.op == "layer_norm"
        elif node.op == "linear":
            modules, _ = node.attributes["weight"].data
            found.writers.update(modules if inside else ())
            if node.inputs["x"] in stream:
                found.readers.update(dict.fromkeys(modules, _gain_before(node.inputs["x"], makers, names)))
        elif node.op == "attention":
            readers = [other for other in graph.nodes if node.outputs[0] in other.inputs.values()]
            if all(reader.op == "linear" for reader in readers) and (rows := _value_rows(node, makers, names, config)):
                found.values.update(rows)
                found.mixers.update(module for reader in readers for module in reader.attributes["weight"].data[0])
    return found


@dataclass(eq=False)
class Fold:
    """Modules that read one input, and what its columns can be divided by where theirs are multiplied.

    gain, bias  tensors of the norm that gives the input, without or with a bias; plus_one  1 is added to the gain
    rows        or modules with the rows that become its columns, in order; `heads` parts of them, each of which serves
                as many columns' heads as there are for one part
    """

    modules: list[str]
    gain: str | None = None
    bias: str | None = None
    plus_one: bool = False
    rows: list[tuple[str, Tensor]] = field(default_factory=list)
    heads: int = 1


def folds(raw: Mapping[str, Any], config: DecoderConfig) -> dict[str, Fold]:
    """What may be folded for each module of the model of a config.json. A nonlinear function, or someone else who reads
    the input, stands against it."""
    names = _Names()
    graph = recorded(family(raw).Model(names, config, 1), config, 1, names.device)
    makers = {value: node for node in graph.nodes for value in node.outputs}
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in dict.fromkeys(node.inputs.values()):
            readers.setdefault(value, []).append(node)
    found: dict[str, Fold] = {}
    for value, nodes in readers.items():
        linears = [node for node in nodes if node.op == "linear"]
        fold = Fold([module for node in linears for module in node.attributes["weight"].data[0]])
        found.update(dict.fromkeys(fold.modules, fold))
        if len(linears) < len(nodes):
            continue
        maker = makers[value]
        if maker.op in _NORMS:
            bias = maker.attributes.get("bias")
            fold.gain, fold.bias = names.name(maker.attributes["weight"]), None if bias is None else names.name(bias)
            fold.plus_one = maker.attributes.get("plus_one", False)
        elif maker.op == "attention":
            fold.rows, fold.heads = _value_rows(maker, makers, names, config), config.kv_heads
        elif maker.op in ("swiglu", "geglu", "relu"):
            (source,) = maker.inputs.values()
            if makers[source].op == "linear" and len(readers[source]) == 1:
                fold.rows = list(_rows(makers[source], source.width - value.width, source.width, names))
    return found


def _stream(graph: Graph, names: _Names, width: int) -> set[Value]:
    """The largest set of values that fits the definition."""
    outside = {graph.output, *graph.inputs}
    normed = {value for node in graph.nodes if node.op in _NORMS for value in node.outputs}
    for node in graph.nodes:
        if node.op not in ("embedding", "linear", *_LINEAR, *_NORMS):
            outside.update(node.inputs.values(), node.outputs)
        elif node.op == "linear" and names.unit_rows.intersection(node.attributes["weight"].data[0]):
            outside.add(node.inputs["x"])  # lengths of rows would come to be those with the gain
        outside.update(value for value in node.outputs if value.width != width)
        if node.op not in ("linear", "rows"):  # a gain can be folded into nothing else
            outside.update(normed.intersection(node.inputs.values()))
    grown = True
    while grown:
        grown = False
        for node in graph.nodes:
            if node.op in (*_LINEAR, *_NORMS):
                equal = {*node.outputs[:1], *(node.inputs[name] for name in ("x", "y") if name in node.inputs)}
                if outside & equal and not equal <= outside:
                    outside |= equal
                    grown = True
    return {value for node in graph.nodes for value in node.outputs} - outside


def _gain_before(value: Value, makers: Mapping[Value, Node], names: _Names) -> str | None:
    node = makers[value]
    while node.op == "rows":
        node = makers[node.inputs["x"]]
    return names.name(node.attributes["weight"]) if node.op in _NORMS else None


def _value_rows(
    node: Node, makers: Mapping[Value, Node], names: _Names, config: DecoderConfig
) -> list[tuple[str, Tensor]]:
    """Modules with the rows of attention's values, head after head; none where something stands in between."""
    append = makers[node.inputs["q"]]
    value, size = append.inputs.get("v") or append.inputs["qkv"], config.kv_heads * config.head_dim
    first = value.width - size
    while makers[value].op in ("heads", "columns"):
        maker = makers[value]
        first, value = first + maker.attributes.get("first", 0), maker.inputs["x"]
    return list(_rows(makers[value], first, first + size, names)) if makers[value].op == "linear" else []


def _rows(node: Node, first: int, last: int, names: _Names) -> Iterator[tuple[str, Tensor]]:
    """The rows of its modules, as they are in the checkpoint, that give these columns of what a linear gives."""
    modules, order = node.attributes["weight"].data
    begin = 0
    for module in modules:
        rows = torch.arange(names.sizes[module]) if order is None else order
        part = rows[max(first - begin, 0) : max(last - begin, 0)]
        begin += len(rows)
        if len(part):
            yield module, part
