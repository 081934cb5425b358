"""What CUDA's rules record, computed in float64 by the formulae of the parts: needs no card."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
from torch import Tensor

from nibblelm.graph import Graph, Value, fused, record
from nibblelm.models import families
from nibblelm.ops.types import LinearStep, PackedLinear, PostNorm, Weight

sys.path.insert(0, str(Path(__file__).parent))
from test_fusion import BF16, CUDA, HEAD_NORMS, ShapesOnly, names, raw_config, step_of


class Seeded(ShapesOnly):
    """Numbers too: each tensor's follow from its name."""

    def vector(self, name: str, *shape: int) -> Tensor:
        return seeded(name, *shape).add(1)

    def table(self, module: str, rows: int, columns: int, head: str | None) -> Weight:
        return seeded(module, rows, columns)


def seeded(name: str, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(crc32(name.encode())), dtype=torch.float64)


def parts_in_float64() -> dict[str, Any]:
    """The ops by their formulae, the fused ones by the formulae of their parts; attention by something short."""

    def linear(x: Tensor, weight: PackedLinear, bias: Tensor | None, **_: Any) -> Tensor:
        y = x @ seeded("/".join(weight.data), *weight.shape).T * weight.shape[1] ** -0.5
        return y if bias is None else y + bias

    def rms_norm(
        x: Tensor, weight: Tensor, eps: float, plus_one: bool, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        h = x if residual is None else x + residual
        return h / (h.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + plus_one), h

    def gated(gate_up: Tensor, pairs: bool, form: str = "silu") -> Tensor:
        gate, up = gate_up.unflatten(1, (-1, 2, 8)).unbind(2) if pairs else gate_up.chunk(2, 1)
        act = torch.nn.functional.silu(gate) if form == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")
        return (act * up).flatten(1)

    def layer_norm(
        x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        h = x if residual is None else x + residual
        centred = h - h.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight
        return (normed if bias is None else normed + bias), h

    def append(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
        return q + k.mean() * v.mean()

    def layer_norm_append(
        qkv: Tensor, q_norm: Tensor, k_norm: Tensor, k_cache: Tensor, eps: float, **given: Any
    ) -> Any:
        kv_heads = k_cache.shape[1]
        q, k, v = qkv.split([qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
        q, k = layer_norm(q, q_norm, given["q_bias"], eps)[0], layer_norm(k, k_norm, given["k_bias"], eps)[0]
        return append(q, k, v)

    def gelu(x: Tensor, form: str) -> Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh" if form == "tanh" else "none")

    def norm_linear(
        x: Tensor,
        gain: Tensor | None,
        eps: float,
        weight: PackedLinear,
        plus_one: bool = False,
        gate: str | None = None,
        residual: Tensor | None = None,
        bias: Tensor | None = None,
        post: PostNorm | None = None,
        centred: bool = False,
        gain_bias: Tensor | None = None,
        addend: Tensor | None = None,
        after: str | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        x = x if post is None else rms_norm(x, *post, plus_one)[0]
        x = x if addend is None else addend + x
        h = x if residual is None else x + residual
        normed = h
        if gain is not None:
            normed = layer_norm(h, gain, gain_bias, eps)[0] if centred else rms_norm(h, gain, eps, plus_one)[0]
        y = linear(normed, weight, bias)
        if after is not None:
            y = y.relu() if after == "relu" else gelu(y, after.removeprefix("gelu_"))
        return (gated(y, True, gate) if gate else y), h

    def linear_chain(x: Tensor, steps: Sequence[LinearStep], activation_bits: int, **given: Tensor) -> Any:
        held, results = {"x": x, **given}, list[Tensor]()
        for i, s in enumerate(steps):
            own, residual, addend = (None if name is None else held[name] for name in (s.x, s.residual, s.addend))
            assert own is not None
            if s.norms:
                options = {name: getattr(s, name) for name in ("plus_one", "gate", "post", "centred", "after")}
                how = {"residual": residual, "bias": s.bias, "gain_bias": s.gain_bias, "addend": addend, **options}
                held[f"y{i}"], held[f"h{i}"] = norm_linear(own, s.gain, s.eps, s.weight, **how)
            else:
                held[f"y{i}"] = linear(own, s.weight, s.bias)
            results += [held[f"y{i}"]] if residual is None else [held[f"y{i}"], held[f"h{i}"]]
        return tuple(results)

    return {
        "embedding": lambda ids, table, multiplier, **_: table[ids] * multiplier,
        "heads": lambda x, head_dim: x.unflatten(1, (-1, head_dim)),
        "columns": lambda x, first, last: x[:, first:last],
        "rope_append": lambda qkv, q_norm=None, **_: qkv.flatten(1),
        "append": append,
        "attention": lambda q, **_: q.flatten(1).tanh(),
        "add": lambda x, y: x + y,
        "softcap": lambda x, cap: cap * (x / cap).tanh(),
        "scale": lambda x, factor: x * factor,
        "relu": lambda x: x.relu(),
        **{"swiglu": gated, "geglu": gated, "linear": linear, "rms_norm": rms_norm, "layer_norm": layer_norm},
        **{"gelu": gelu, "layer_norm_append": layer_norm_append},
        **{"norm_linear": norm_linear, "linear_chain": linear_chain},
    }


def in_float64(graph: Graph, *inputs: Tensor) -> Tensor:
    ops_of, held = parts_in_float64(), dict(zip(graph.inputs, inputs, strict=True))
    for node in graph.nodes:
        results = ops_of[node.op](**{name: held[x] for name, x in node.inputs.items()}, **node.attributes)
        results = results if isinstance(results, tuple) else (results,)
        held.update((y, t[:, : y.width]) for y, t in zip(node.outputs, results, strict=False) if t is not None)
    return held[graph.output]


@pytest.mark.parametrize(("model_type", "changes"), [*((name, {}) for name in sorted(families())), *HEAD_NORMS.items()])
def test_fused_nodes_have_the_value_of_their_parts(model_type: str, changes: dict[str, Any]) -> None:
    """Which gain, which residual and which sum go where."""
    graph, ids = step_of(raw_config(model_type, **changes), Seeded()), torch.arange(5)
    assert not changes or "layer_norm_append" in names(fused(graph))
    want = in_float64(graph, ids, *(4 * [ids]))
    assert torch.equal(in_float64(fused(graph, related=True), ids, *(4 * [ids])), want)
    assert want.isfinite().all()


@pytest.mark.parametrize("case", ["fused", "read twice", "another form", "nothing to add to"])
def test_a_norm_of_what_is_added(case: str) -> None:
    weights = Seeded()
    (square,), gains = weights.matrices([("square", 256)], 256), [weights.vector(f"gain.{i}", 256) for i in range(2)]

    def forward(ids: Value) -> Value:
        x = ids.embedding(weights.table("table", 331, 256, None), BF16)
        post = x.linear([square], None, 16).rms_norm(gains[0], 0.5)
        total = post if case == "nothing to add to" else x + post
        y = total.rms_norm(gains[1], 0.25, plus_one=case == "another form").linear([square], None, 16)
        return y + post if case == "read twice" else y + total

    graph, ids = record(forward, 1, CUDA), torch.arange(5)
    found = names(fused(graph))
    assert found[1:] == (["square > norm+norm+square", "add"] if case == "fused" else
                         ["square", "rms_norm", "norm+square", "add"])  # fmt: skip
    assert torch.equal(in_float64(fused(graph), ids), in_float64(graph, ids))
