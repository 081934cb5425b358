"""What the CPU runs together."""

from collections.abc import Sequence

from nibblelm.graph import Alone, Node, Rule, add_norm
from nibblelm.ops.cpu_linear import PANEL_ROWS


def linear_activation(nodes: Sequence[Node], alone: Alone) -> tuple[int, list[Node]] | None:
    """linear, activation -> one kernel; gated where the gates and their ups are whole panels of the weight."""
    linear, after = nodes[0], nodes[1] if len(nodes) > 1 else nodes[0]
    if linear.op != "linear" or after.op not in _FORMS or not alone(linear.outputs[0]):
        return None
    weight, gated = linear.attributes["weight"], after.op in {"swiglu", "geglu"}
    if not after.reads(linear.outputs[0], "gate_up" if gated else "x") or weight.bits not in (4, 8):
        return None
    if gated and weight.shape[0] % (2 * PANEL_ROWS):
        return None
    form = after.attributes.get("form", _FORMS[after.op])
    return 2, [
        Node("linear_activation", linear.inputs, linear.attributes | {"form": form, "gated": gated}, after.outputs)
    ]


_FORMS = {"swiglu": "silu", "geglu": "tanh", "gelu": "tanh", "relu": "relu"}

RULES: tuple[Rule, ...] = (add_norm, linear_activation)
RELATED_RULES = RULES
