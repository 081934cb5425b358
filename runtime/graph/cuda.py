"""What CUDA runs together: kernels that take bf16 activations, chosen by shapes and by what the card has room for."""

from collections.abc import Sequence
from typing import get_args

import torch

from nibblelm.graph import Alone, Node, Rule, add_norm
from nibblelm.ops.cuda_attention import has_room_to_rotate
from nibblelm.ops.cuda_linear import MAX_NORM_COLUMNS
from nibblelm.ops.types import PAGE, Gate, LinearStep


def norm_linear(nodes: Sequence[Node], alone: Alone) -> tuple[int, list[Node]] | None:
    """rms_norm, linear (, swiglu or geglu of pairs) -> norm_linear; with an rms_norm of what is added to the residual
    before it, also where the sum goes into the linear as it is."""
    post = nodes[0] if _norms_what_is_added(nodes, alone) else None
    norm, *rest = nodes[1:4] if post else nodes[:3]
    if not (norm.op == "rms_norm" and alone(norm.outputs[0])) and not (post and norm.op == "add"):
        return None
    linear, x = rest[0] if rest else norm, norm.inputs["x"]
    if linear.op != "linear" or not linear.reads(norm.outputs[0], "x"):
        return None
    if x.dtype != torch.bfloat16 or x.width % 8 or x.width > MAX_NORM_COLUMNS:
        return None
    count, last, gate = 2, linear, _gate(rest[1], linear) if rest[1:] and alone(linear.outputs[0]) else None
    if gate:
        count, last = 3, rest[1]
    if norm.op == "add":
        inputs, sums, form = {"residual": norm.inputs["x"]}, norm.outputs, {"weight": None, "eps": 0.0}
    else:
        inputs, sums, form = norm.inputs, norm.outputs[1:], norm.attributes
    attributes = {"gain": form["weight"], "eps": form["eps"], "gate": gate, **linear.attributes}
    if post:
        count, inputs, form = count + 1, inputs | post.inputs, post.attributes
        attributes["post"] = form["weight"], form["eps"]
    return count, [Node("norm_linear", inputs, {**attributes, "plus_one": form["plus_one"]}, (*last.outputs, *sums))]


def _norms_what_is_added(nodes: Sequence[Node], alone: Alone) -> bool:
    """Whether the first node is an RMSNorm of what the second, one of the same form or an add, adds to a residual."""
    if len(nodes) < 2 or nodes[0].op != "rms_norm" or "residual" in nodes[0].inputs or not alone(nodes[0].outputs[0]):
        return False
    post, total = nodes[:2]
    if total.op == "add":
        return total.reads(post.outputs[0], "y")
    same_form = total.op == "rms_norm" and total.attributes["plus_one"] == post.attributes["plus_one"]
    return same_form and "residual" in total.inputs and total.reads(post.outputs[0], "x")


def _gate(node: Node, linear: Node) -> Gate | None:
    """The gate that `node` is, if a linear's kernel can end with it."""
    if node.op not in {"swiglu", "geglu"} or not node.attributes["pairs"]:
        return None
    form = node.attributes.get("form", "silu")
    plain = linear.attributes["bias"] is None and linear.attributes["dtype"] == torch.bfloat16
    return form if plain and form in get_args(Gate) and node.reads(linear.outputs[0], "gate_up") else None


def rope_attention(nodes: Sequence[Node], alone: Alone) -> tuple[int, list[Node]] | None:
    """rope_append, attention of rows that do not see each other -> rope_attention. With a soft-cap the two apart are
    faster (gemma2: 456 tok/s to 448)."""
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
        or not attention.reads(append.outputs[0], "q") or head_dim not in {64, 128, 256} or 2 * cos.shape[1] != head_dim
        or append.inputs["qkv"].dtype != torch.bfloat16 or cache.dtype not in {torch.bfloat16, torch.int8}
        or cos.shape[0] < options["tables"].shape[1] * PAGE or not has_room_to_rotate(head_dim, cos.device)
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
