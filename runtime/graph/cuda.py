"""What CUDA runs together: kernels that take bf16 activations, chosen by shapes alone."""

from collections.abc import Sequence
from typing import get_args

import torch

from nibblelm.graph import Alone, Node, Rule, add_norm
from nibblelm.ops.cuda_linear import MAX_NORM_COLUMNS
from nibblelm.ops.types import PAGE, Gate, LinearStep, PackedLinear


def norm_linear(nodes: Sequence[Node], alone: Alone) -> tuple[int, list[Node]] | None:
    """(rms_norm, added in) rms_norm, linear (, swiglu or geglu of pairs) -> norm_linear."""
    first = int(_norms_what_is_added(nodes, alone))
    norm, *rest = nodes[first : first + 3]
    if norm.op != "rms_norm" or not rest or rest[0].op != "linear" or not rest[0].reads(norm.outputs[0], "x"):
        return None
    linear, x = rest[0], norm.inputs["x"]
    weight: PackedLinear = linear.attributes["weight"]
    if x.dtype != torch.bfloat16 or x.width % 8 or x.width > MAX_NORM_COLUMNS or not alone(norm.outputs[0]):
        return None
    count, last, gate = first + 2, linear, _gate(rest[1], linear) if rest[1:] and alone(linear.outputs[0]) else None
    if gate:
        count, last = count + 1, rest[1]
    attributes = {"gain": norm.attributes["weight"], "eps": norm.attributes["eps"], "gate": gate}
    attributes |= {"plus_one": norm.attributes["plus_one"], **linear.attributes, "weight": weight}
    inputs = norm.inputs
    if first:
        inputs = inputs | nodes[0].inputs
        attributes["post"] = nodes[0].attributes["weight"], nodes[0].attributes["eps"]
    return count, [Node("norm_linear", inputs, attributes, (*last.outputs, *norm.outputs[1:]))]


def _norms_what_is_added(nodes: Sequence[Node], alone: Alone) -> bool:
    """Whether the first node is an RMSNorm of what the second, one too, adds to its residual and nobody else reads."""
    if len(nodes) < 2 or any(node.op != "rms_norm" for node in nodes[:2]):
        return False
    post, norm = nodes[:2]
    same_form = post.attributes["plus_one"] == norm.attributes["plus_one"]
    added = norm.reads(post.outputs[0], "x") and "residual" in norm.inputs and "residual" not in post.inputs
    return same_form and added and alone(post.outputs[0])


def _gate(node: Node, linear: Node) -> Gate | None:
    """The gate that `node` is, if a linear's kernel can end with it."""
    if node.op not in {"swiglu", "geglu"} or not node.attributes["pairs"]:
        return None
    form = node.attributes.get("form", "silu")
    plain = linear.attributes["bias"] is None and linear.attributes["dtype"] == torch.bfloat16
    return form if plain and form in get_args(Gate) and node.reads(linear.outputs[0], "gate_up") else None


def rope_attention(nodes: Sequence[Node], alone: Alone) -> tuple[int, list[Node]] | None:
    """rope_append, attention of rows that do not see each other -> rope_attention."""
    append, *rest = nodes[:2]
    if append.op != "rope_append" or not rest or rest[0].op != "attention" or not alone(append.outputs[0]):
        return None
    (attention,), options = rest, append.attributes
    cache, cos = options["k_cache"], options["cos"]
    head_dim = cache.shape[3]
    plain = attention.attributes.keys() <= {"k_cache", "v_cache", "tables", "scale", "window"}
    if (
        not plain or not attention.inputs.keys() <= {"q", "positions", "slots"} or "places" in append.inputs
        or options.get("interleaved", False)
        or not attention.reads(append.outputs[0], "q") or head_dim not in {64, 128} or 2 * cos.shape[1] != head_dim
        or append.inputs["qkv"].dtype != torch.bfloat16 or cache.dtype not in {torch.bfloat16, torch.int8}
        or cos.shape[0] < options["tables"].shape[1] * PAGE
    ):  # fmt: skip
        return None
    own = {name: attention.attributes[name] for name in ("scale", "window")}
    return 2, [Node("rope_attention", append.inputs, options | own, attention.outputs)]


def linear_chain(nodes: Sequence[Node], alone: Alone) -> tuple[int, list[Node]] | None:
    """linear or norm_linear, each of what the one before gives, along one residual stream -> linear_chain."""
    steps: list[LinearStep] = []
    entry = stream = result = None  # residual before the first norm, after the last one; what the last linear gives
    bits = nodes[0].attributes.get("activation_bits")
    for node in nodes:
        a, x, residual = node.attributes, node.inputs.get("x"), node.inputs.get("residual")
        if (
            node.op not in {"linear", "norm_linear"} or x is None or not (x.dtype == a["dtype"] == torch.bfloat16)
            or a["activation_bits"] != bits or (steps and not (x is result and alone(x)))
        ):  # fmt: skip
            break
        if node.op == "linear":
            steps.append(LinearStep(a["weight"], a["bias"]))
        else:
            goes_on = residual is stream and alone(stream) if stream is not None else residual is not None
            if steps and not goes_on:
                break
            entry, stream = entry or residual, x if residual is None else node.outputs[1]
            norm = (a["gain"], a["eps"], a["gate"], a["plus_one"], a.get("post"))
            steps.append(LinearStep(a["weight"], a["bias"], *norm))
        result = node.outputs[0]
    if len(steps) < 2 or result is None:
        return None
    inputs = {"x": nodes[0].inputs["x"]} | ({} if entry is None else {"residual": entry})
    outputs = (result,) if stream is None else (result, stream)
    return len(steps), [Node("linear_chain", inputs, {"steps": tuple(steps), "activation_bits": bits}, outputs)]


RULES: tuple[Rule, ...] = (add_norm, norm_linear, rope_attention, linear_chain)
RELATED_RULES: tuple[Rule, ...] = tuple(rule for rule in RULES if rule is not rope_attention)
