"""The CUDA ops but linear and attention: check what came, allocate the result, call the launcher (contract: `ops`)."""

from typing import Any

import torch
from torch import Tensor

from nibblelm.ops.cuda_device import DTYPES, kernels, launch_args
from nibblelm.ops.types import QuantizedWeight, Weight

_ACTIVATIONS = {"silu": 0, "tanh": 1, "erf": 2, "softcap": 3, "relu": 4, "scale": 5}
SOFTMAX_FORMS = {"automatic": 0, "warp": 1, "block": 2, "cluster": 3, "online": 4}


def require_arguments(condition: bool, op: str, wanted: str, *tensors: Tensor | None) -> None:
    if not condition:
        got = ", ".join(f"{tuple(t.shape)} {t.dtype} {t.stride()}" for t in tensors if t is not None)
        raise ValueError(f"{op}: got {got}; supported: {wanted}")


def address(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def rows(x: Tensor) -> bool:
    """Whether everything but the first dimension is contiguous and the dtype one of activations."""
    return x.dtype in {torch.float32, torch.bfloat16} and (x.shape[0] == 0 or x[0].is_contiguous())


def vector(t: Tensor | None, size: int, dtype: torch.dtype = torch.float32) -> bool:
    return t is None or (t.shape == (size,) and t.dtype == dtype and t.is_contiguous())


# ---- norms ---------------------------------------------------------------------------------------------------------


def _norm(
    launcher: Any,
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    plus_one: bool,
) -> tuple[Tensor, Tensor]:
    columns, heads = x.shape[-1], x.shape[1] if x.ndim == 3 else 1
    same = residual is None or (residual.shape == x.shape and residual.dtype == x.dtype and rows(residual))
    per_head = op == "layer_norm" and weight.shape == (heads, columns)
    require_arguments(
        x.ndim in {2, 3} and rows(x) and same and vector(bias, columns)
        and vector(weight.flatten() if per_head else weight, heads * columns if per_head else columns),
        op, "x (M, H) or (M, heads, D) fp32 or bf16, residual like x, weight and bias fp32", x, residual, weight, bias,
    )  # fmt: skip
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = x if residual is None else torch.empty_like(y)
    launcher(
        x.data_ptr(), address(residual), weight.data_ptr(), address(bias), y.data_ptr(),
        0 if residual is None else h.data_ptr(), x.stride(0), 0 if residual is None else residual.stride(0),
        x.numel() // columns, heads, columns, eps, plus_one, per_head, DTYPES[x.dtype], *launch_args(),
    )  # fmt: skip
    return y, h


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, plus_one: bool) -> tuple[Tensor, Tensor]:
    return _norm(kernels.rms_norm, "rms_norm", x, weight, None, eps, residual, plus_one)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _norm(kernels.layer_norm, "layer_norm", x, weight, bias, eps, residual, False)


# ---- attention masks -----------------------------------------------------------------------------------------------


def _score_planes(op: str, scores: Tensor) -> tuple[int, ...]:
    require_arguments(
        scores.ndim == 4 and scores.is_contiguous() and rows(scores), op, "contiguous (B, H, Q, K)", scores
    )
    return tuple(scores.shape)


def attention_mask(scores: Tensor, mask: Tensor, value: float) -> Tensor:
    batch, heads, queries, keys = _score_planes("attention_mask", scores)
    same = mask.shape == (batch, queries, keys) and mask.dtype == scores.dtype and mask.is_contiguous()
    require_arguments(same, "attention_mask", "mask (B, Q, K) of the dtype of scores", mask, scores)
    kernels.attention_mask(
        scores.data_ptr(), mask.data_ptr(), value, batch, heads, queries, keys, DTYPES[scores.dtype], *launch_args()
    )
    return scores


def alibi_mask(scores: Tensor, slopes: Tensor, value: float) -> Tensor:
    batch, heads, queries, keys = _score_planes("alibi_mask", scores)
    require_arguments(vector(slopes, heads), "alibi_mask", f"slopes ({heads},) fp32", slopes)
    kernels.alibi_mask(
        scores.data_ptr(), slopes.data_ptr(), value, batch, heads, queries, keys, DTYPES[scores.dtype], *launch_args()
    )
    return scores


# ---- element-wise, tables, rows ------------------------------------------------------------------------------------


def _activate(op: str, x: Tensor, form: str, gated: bool, pairs: bool = False, cap: float = 0.0) -> Tensor:
    require_arguments(
        x.ndim == 2 and rows(x) and form in _ACTIVATIONS and x.shape[1] % (16 if pairs else 2 if gated else 1) == 0,
        op, f"(M, {'2 I' if gated else 'N'}) fp32 or bf16, I in pairs a multiple of 8, forms {sorted(_ACTIVATIONS)}", x,
    )  # fmt: skip
    m, columns = x.shape[0], x.shape[1] // 2 if gated else x.shape[1]
    y = torch.empty(m, columns, dtype=x.dtype, device=x.device)
    kernels.activate(
        x.data_ptr(), y.data_ptr(), m, columns, x.stride(0), _ACTIVATIONS[form], cap, gated, pairs,
        DTYPES[x.dtype], *launch_args(),
    )  # fmt: skip
    return y


def add(x: Tensor, y: Tensor) -> Tensor:
    same = x.ndim == 2 and x.shape == y.shape and x.dtype == y.dtype
    require_arguments(same and rows(x) and rows(y), "add", "x and y (M, N) of one dtype, fp32 or bf16", x, y)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    strides = (x.stride(0), y.stride(0))
    kernels.add(x.data_ptr(), y.data_ptr(), out.data_ptr(), *x.shape, *strides, DTYPES[x.dtype], *launch_args())
    return out


def swiglu(gate_up: Tensor, pairs: bool) -> Tensor:
    return _activate("swiglu", gate_up, "silu", True, pairs)


def geglu(gate_up: Tensor, form: str, pairs: bool) -> Tensor:
    return _activate("geglu", gate_up, form, True, pairs)


def gelu(x: Tensor, form: str) -> Tensor:
    return _activate("gelu", x, form, False)


def silu(x: Tensor) -> Tensor:
    return _activate("silu", x, "silu", False)


def read_pinned(out: Tensor, x: Tensor) -> Tensor:
    """Copy int32 x, of the shape of `out` and pinned, to `out`, by a kernel: of a program each replay reads x anew."""
    contiguous = out.is_contiguous() and x.is_contiguous() and out.shape == x.shape
    require_arguments(
        contiguous and out.dtype == x.dtype == torch.int32 and x.is_pinned(),
        "read_pinned", "out and x int32, contiguous, of one shape, x pinned", out, x,
    )  # fmt: skip
    kernels.read_pinned(x.data_ptr(), out.data_ptr(), x.numel(), *launch_args())
    return out


def softcap(x: Tensor, cap: float) -> Tensor:
    require_arguments(cap > 0, "softcap", "cap > 0", x)
    return _activate("softcap", x, "softcap", False, cap=cap)


def relu(x: Tensor) -> Tensor:
    return _activate("relu", x, "relu", False)


def scale(x: Tensor, factor: float) -> Tensor:
    return _activate("scale", x, "scale", False, cap=factor)


def embedding(ids: Tensor, table: Weight, dtype: torch.dtype, multiplier: float) -> Tensor:
    v, h = table.shape
    require_arguments(ids.ndim == 1 and vector(ids, ids.shape[0], torch.int32), "embedding", "ids (M,) int32", ids)
    y = torch.empty(ids.shape[0], h, dtype=dtype, device=ids.device)
    if isinstance(table, QuantizedWeight):
        parts = (table.codes, table.scale, table.zero_point, table.minimum)
        whole = all(t is None or (t.is_cuda and t.is_contiguous()) for t in parts)
        layout = (table.codes.shape[1], table.groups, h if table.group_size == -1 else table.group_size, table.bits)
        dense = table.scale
    else:
        parts, whole, layout, dense = (table, None, None, None), table.is_contiguous(), (0, 0, 1, 16), table
    require_arguments(
        whole and dense.dtype in DTYPES and y.dtype in {torch.float32, torch.bfloat16},
        "embedding", "contiguous tables on the device, scales or values fp32, fp16 or bf16", *parts,
    )  # fmt: skip
    kernels.embedding(
        ids.data_ptr(), *(address(t) for t in parts), y.data_ptr(), ids.shape[0], v, h, *layout,
        DTYPES[dense.dtype], multiplier, DTYPES[dtype], *launch_args(),
    )  # fmt: skip
    return y


def softmax(x: Tensor, form: str = "automatic", logarithm: bool = False) -> Tensor:
    require_arguments(x.ndim == 2 and x.is_contiguous() and x.dtype in DTYPES, "softmax", "contiguous (M, N)", x)
    y = torch.empty_like(x)
    kernels.softmax(
        x.data_ptr(), y.data_ptr(), *x.shape, logarithm, SOFTMAX_FORMS[form], DTYPES[x.dtype], *launch_args()
    )
    return y


def log_softmax(x: Tensor) -> Tensor:
    return softmax(x, logarithm=True)


def argmax(x: Tensor) -> Tensor:
    require_arguments(x.ndim == 2 and rows(x) and x.shape[1] > 0, "argmax", "(M, N) fp32 or bf16, N at least 1", x)
    y = torch.empty(x.shape[0], dtype=torch.int32, device=x.device)
    kernels.argmax(x.data_ptr(), y.data_ptr(), *x.shape, x.stride(0), DTYPES[x.dtype], *launch_args())
    return y
