"""CUDA side of the op contract: thin calls of `nibblelm._cuda`, on PyTorch's current stream of the tensors' card."""

from nibblelm.ops import cuda_attention, cuda_linear, cuda_ops, cuda_sample
from nibblelm.ops.cuda_device import (
    Pool,
    Program,
    available,
    between_captures,
    capture,
    on_card,
    programmatic_launch,
    reclaim,
    require,
    wgmma,
)
from nibblelm.ops.cuda_linear import pack_linear
from nibblelm.ops.cuda_upload import upload

linear = on_card(cuda_linear.linear)
linear_chain = on_card(cuda_linear.linear_chain)
norm_linear = on_card(cuda_linear.norm_linear)
add = on_card(cuda_ops.add)
alibi_mask = on_card(cuda_ops.alibi_mask)
argmax = on_card(cuda_ops.argmax)
attention = on_card(cuda_attention.attention)
attention_mask = on_card(cuda_ops.attention_mask)
embedding = on_card(cuda_ops.embedding)
geglu = on_card(cuda_ops.geglu)
gelu = on_card(cuda_ops.gelu)
kv_append = on_card(cuda_attention.kv_append)
layer_norm = on_card(cuda_ops.layer_norm)
layer_norm_append = on_card(cuda_attention.layer_norm_append)
log_softmax = on_card(cuda_ops.log_softmax)
mask_logits = on_card(cuda_sample.mask_logits)
rms_norm = on_card(cuda_ops.rms_norm)
rope = on_card(cuda_attention.rope)
rope_append = on_card(cuda_attention.rope_append)
rope_attention = on_card(cuda_attention.rope_attention)
sample = on_card(cuda_sample.sample)
silu = on_card(cuda_ops.silu)
read_pinned = on_card(cuda_ops.read_pinned)
relu = on_card(cuda_ops.relu)
scale = on_card(cuda_ops.scale)
softcap = on_card(cuda_ops.softcap)
softmax = on_card(cuda_ops.softmax)
swiglu = on_card(cuda_ops.swiglu)

__all__ = [
    "Pool",
    "Program",
    "add",
    "alibi_mask",
    "argmax",
    "attention",
    "attention_mask",
    "available",
    "between_captures",
    "capture",
    "embedding",
    "geglu",
    "gelu",
    "kv_append",
    "layer_norm",
    "layer_norm_append",
    "linear",
    "linear_chain",
    "log_softmax",
    "mask_logits",
    "norm_linear",
    "pack_linear",
    "programmatic_launch",
    "read_pinned",
    "reclaim",
    "relu",
    "require",
    "rms_norm",
    "rope",
    "rope_append",
    "rope_attention",
    "sample",
    "scale",
    "silu",
    "softcap",
    "softmax",
    "swiglu",
    "upload",
    "wgmma",
]
