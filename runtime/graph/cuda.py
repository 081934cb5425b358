"""What CUDA runs together: kernels that take bf16 activations, chosen by shapes and by what the card has room for."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import torch

from nibblelm.graph import Alone, Node, Rule, Value, add_norm
from nibblelm.ops.cuda_attention import has_room_to_rotate
from nibblelm.ops.cuda_linear import MAX_NORM_COLUMNS
from nibblelm.ops.types import PAGE, After, Gate, LinearStep


def norm_for_each(nodes: Sequence[Node], alone: Alone) -> tuple[int, list[Node]] | None:
    """norm, then linears that read it -> the norm again before each linear, whose kernel does it on the way."""
    norm = nodes[0]
    if norm.op not in _NORMS or alone(norm.outputs[0]) or not _fits(norm.inputs["x"]):
        return None
    (normed, *sums), again = norm.outputs, dict(norm.inputs)
    readers = [at for at, node in enumerate(nodes) if normed in node.inputs.values()]
    if not all(nodes[at].op == "linear" for at in readers):
        return None
    if "residual" in again:
        again = {"x": sums[0]}
    result = list(nodes[: readers[-1] + 1])
    for at in reversed(readers[1:]):
        own = Value(normed.nodes, normed.width, normed.dtype)
        reader = replace(nodes[at], inputs={**nodes[at].inputs, "x": own})
        result[at : at + 1] = [Node(norm.op, again, norm.attributes, (own,)), reader]
    return readers[-1] + 1, result


def norm_linear(nodes: Sequence[Node], alone: Alone) -> tuple[int, list[Node]] | None:
    """norm, linear (, swiglu or geglu of pairs, or gelu or relu) -> norm_linear; with an rms_norm of what is added to
    the residual before it, also where the sum goes into the linear as it is; with what was added to x."""
    post = nodes[0] if _norms_what_is_added(nodes, alone) else None
    added = nodes[0] if _is_added_before(nodes, alone) else None
    norm, *rest = nodes[1:4] if post or added else nodes[:3]
    if not (norm.op in _NORMS and alone(norm.outputs[0])) and not (post and norm.op == "add"):
        return None
    linear, x = rest[0] if rest else norm, norm.inputs["x"]
    if linear.op != "linear" or not linear.reads(norm.outputs[0], "x") or not _fits(x):
        return None
    count, last, after = 2, linear, rest[1] if rest[1:] and alone(linear.outputs[0]) else None
    gate = _gate(after, linear) if after else None
    ending = _ending(after, linear) if after else None
    if after and (gate or ending):
        count, last = 3, after
    if norm.op == "add":
        inputs, sums, form = {"residual": norm.inputs["x"]}, norm.outputs, {"weight": None, "eps": 0.0}
    else:
        inputs, sums, form = norm.inputs, norm.outputs[1:], norm.attributes
    attributes = {"gain": form["weight"], "eps": form["eps"], "gate": gate, "after": ending, **linear.attributes}
    if post:
        count, inputs, form = count + 1, inputs | post.inputs, post.attributes
        attributes["post"] = form["weight"], form["eps"]
    if added:
        count, inputs = count + 1, inputs | {"addend": added.inputs["x"], "x": added.inputs["y"]}
    if norm.op == "layer_norm":
        attributes |= {"centred": True, "gain_bias": form["bias"]}
    else:
        attributes["plus_one"] = form["plus_one"]
    return count, [Node("norm_linear", inputs, attributes, (*last.outputs, *sums))]


_NORMS = {"rms_norm", "layer_norm"}


def _fits(x: Value) -> bool:
    """Whether a linear's kernel can norm it."""
    return x.dtype == torch.bfloat16 and x.width % 8 == 0 and x.width <= MAX_NORM_COLUMNS


def _is_added_before(nodes: Sequence[Node], alone: Alone) -> bool:
    """Whether the first node adds up what the second, a norm, adds to a residual."""
    if len(nodes) < 2 or nodes[0].op != "add" or not alone(nodes[0].outputs[0]):
        return False
    norm = nodes[1]
    return norm.op in _NORMS and "residual" in norm.inputs and norm.reads(nodes[0].outputs[0], "x")


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


def _ending(node: Node, linear: Node) -> After | None:
    """The activation that `node` is, if a linear's kernel can end with it."""
    if linear.attributes["dtype"] != torch.bfloat16 or not node.reads(linear.outputs[0], "x"):
        return None
    endings: dict[str, After] = {"tanh": "gelu_tanh", "erf": "gelu_erf"}
    return endings.get(node.attributes["form"]) if node.op == "gelu" else "relu" if node.op == "relu" else None


def layer_norm_append(nodes: Sequence[Node], alone: Alone) -> tuple[int, list[Node]] | None:
    """q, k and v out of a projection, layer_norm of the heads of q and of k, append -> layer_norm_append."""
    shape = ["columns"] * 3 + ["heads", "layer_norm"] * 2 + ["heads", "append"]
    if [node.op for node in nodes[: len(shape)]] != shape:
        return None
    parts, (q, q_norm, k, k_norm, v, append) = nodes[:3], nodes[3 : len(shape)]
    qkv, size, options = parts[0].inputs["x"], v.attributes["head_dim"], append.attributes
    norms = q_norm.attributes, k_norm.attributes
    path = [(parts[0], q, "x"), (q, q_norm, "x"), (q_norm, append, "q"), (parts[1], k, "x"), (k, k_norm, "x")]
    path += [(k_norm, append, "k"), (parts[2], v, "x"), (v, append, "v")]
    bounds = [(part.attributes["first"], part.attributes["last"]) for part in parts]
    if (
        not all(alone(a.outputs[0]) and b.reads(a.outputs[0], name) for a, b, name in path)
        or not all(part.reads(qkv, "x") for part in parts)
        or any(qkv in node.inputs.values() for node in nodes[len(shape) :])
        or [0, *(last for _, last in bounds)] != [*(first for first, _ in bounds), qkv.width]
        or any(part.attributes["head_dim"] != size for part in (q, k)) or size % 8 or size > 256
        or qkv.dtype != torch.bfloat16 or "cos" not in options or "q_cos" in options
        or norms[0]["eps"] != norms[1]["eps"] or norms[0]["weight"].ndim != norms[1]["weight"].ndim
    ):  # fmt: skip
        return None
    heads = Value(qkv.nodes, qkv.width, qkv.dtype)
    inputs = {"qkv": heads} | {name: value for name, value in append.inputs.items() if name not in {"q", "k", "v"}}
    own = {"eps": norms[0]["eps"]}
    for name, norm in zip("qk", norms, strict=True):
        own |= {f"{name}_norm": norm["weight"], f"{name}_bias": norm["bias"]}
    split = Node("heads", {"x": qkv}, {"head_dim": size}, (heads,))
    return len(shape), [split, Node("layer_norm_append", inputs, options | own, append.outputs)]


def rope_attention(nodes: Sequence[Node], alone: Alone) -> tuple[int, list[Node]] | None:
    """rope_append, attention of rows that do not see each other -> rope_attention."""
    append, *rest = nodes[:2]
    if append.op != "rope_append" or not rest or rest[0].op != "attention" or not alone(append.outputs[0]):
        return None
    (attention,), options = rest, append.attributes
    cache, cos = options["k_cache"], options["cos"]
    head_dim = cache.shape[3]
    # kernels of several sizes sum the squares of a head in another order than rope_append, so they take no norms
    sizes = {64, 128, 256} if options.get("q_norm") is not None else {64, 80, 96, 112, 128, 256}
    if attention.attributes.get("softcap"):
        sizes &= {128, 256}
    plain = attention.attributes.keys() <= {"k_cache", "v_cache", "tables", "scale", "window", "softcap"}
    if (
        not plain or not attention.inputs.keys() <= {"q", "positions", "slots"} or "places" in append.inputs
        or options.get("interleaved", False)
        or not attention.reads(append.outputs[0], "q") or head_dim not in sizes or 2 * cos.shape[1] != head_dim
        or append.inputs["qkv"].dtype != torch.bfloat16 or cache.dtype not in {torch.bfloat16, torch.int8}
        or cos.shape[0] < options["tables"].shape[1] * PAGE or not has_room_to_rotate(head_dim, cos.device)
    ):  # fmt: skip
        return None
    own = {name: attention.attributes[name] for name in ("scale", "window", "softcap") if name in attention.attributes}
    return 2, [Node("rope_attention", append.inputs, options | own, attention.outputs)]


def linear_chain(nodes: Sequence[Node], alone: Alone) -> tuple[int, list[Node]] | None:
    """linears and norm_linears that follow each other -> linear_chain."""
    steps: list[LinearStep] = []
    given: dict[Value, str] = {}
    outputs: list[Value] = []
    names: dict[Value, str] = {}
    bits = nodes[0].attributes.get("activation_bits")
    for node in nodes:
        a, x = node.attributes, node.inputs.get("x")
        if (
            node.op not in {"linear", "norm_linear"} or x is None or not (x.dtype == a["dtype"] == torch.bfloat16)
            or a["activation_bits"] != bits
        ):  # fmt: skip
            break
        read: dict[str, Any] = {}
        for role, value in node.inputs.items():
            if value not in names:
                names[value] = given[value] = f"in{len(given)}" if given else "x"
            read[role] = names[value]
        own: dict[str, Any] = {name: a[name] for name in a if name not in {"activation_bits", "dtype"}}
        steps.append(LinearStep(**own, **read))
        for result, letter in zip(node.outputs, "yh", strict=False):
            names[result] = f"{letter}{len(steps) - 1}"
            outputs.append(result)
    if len(steps) < 2:
        return None
    inputs = {name: value for value, name in given.items()}
    return len(steps), [Node("linear_chain", inputs, {"steps": tuple(steps), "activation_bits": bits}, tuple(outputs))]


RULES: tuple[Rule, ...] = (add_norm, norm_for_each, norm_linear, layer_norm_append, rope_attention, linear_chain)
RELATED_RULES: tuple[Rule, ...] = tuple(rule for rule in RULES if rule is not rope_attention)
