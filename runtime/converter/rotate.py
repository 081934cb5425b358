"""A checkpoint with its residual stream, and the values of each attention head, rotated: the same function.

With x' = x R for an orthogonal R, whatever writes to the residual stream (embedding, o_proj, down_proj) is followed by
R and whatever reads it is preceded by R^T. RMSNorm commutes with R once its gain is folded into the matrices behind it
(SliceGPT, Ashkboos et al. 2024). The values of a head are rotated in v_proj and back in o_proj; nothing stands between
them but a weighted mean over positions (QuaRot, Ashkboos et al. 2024). Nothing is left to do at run time.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nibblelm.config import DecoderConfig
from nibblelm.converter.plan import HEAD
from nibblelm.errors import ConvertError
from nibblelm.quant.rotation import Rotation

Read = Callable[[str], Tensor]
"""A tensor of the model by its name."""

LLAMA_WIRING = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers are known here by the names of their modules: what may be folded into what."""
_TABLE, _FINAL = "model.embed_tokens.weight", "model.norm.weight"
_ATTENTION, _MLP = "input_layernorm.weight", "post_attention_layernorm.weight"
_READERS = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), _ATTENTION),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), _MLP),
}
_WRITERS = ("self_attn.o_proj", "mlp.down_proj")


def rotated(read: Read, config: DecoderConfig, seed: int) -> Read:
    """Read tensors of the model as they are after rotation, whole, matrices and what changes in fp64.

    Raises ConvertError for a family whose wiring is not known here.
    """
    if config.model_type not in LLAMA_WIRING:
        raise ConvertError(
            f"model_type {config.model_type!r} cannot be rotated; {', '.join(LLAMA_WIRING)} can. Convert without rotate"
        )
    stream, values = Rotation(config.hidden_size, seed), Rotation(config.head_dim, seed + 1)

    def in_heads(weight: Tensor) -> Tensor:
        """Rotate dimension 0, (heads * head_dim, ...), head by head."""
        return values.rows(weight.unflatten(0, (-1, config.head_dim)).transpose(0, 1)).transpose(0, 1).flatten(0, 1)

    def tensor(name: str) -> Tensor:
        weight = read(name).double()
        if name == _TABLE:
            return stream(weight)
        if name == HEAD:
            return stream(weight * read(_FINAL).double())
        if name == _FINAL or name.endswith((_ATTENTION, _MLP)):
            return torch.ones_like(weight)
        layer, module, kind = _parts(name)
        if module == "self_attn.v_proj":
            weight = in_heads(weight)
        if kind == "weight" and module in _READERS:
            return stream(weight * read(f"{layer}.{_READERS[module]}").double())
        if kind == "weight" and module == "self_attn.o_proj":
            weight = in_heads(weight.T).T
        return stream.rows(weight) if module in _WRITERS else weight

    return tensor


def _parts(name: str) -> tuple[str, str, str]:
    """model.layers.3.mlp.up_proj.weight -> model.layers.3, mlp.up_proj, weight."""
    parts = name.split(".")
    return ".".join(parts[:3]), ".".join(parts[3:-1]), parts[-1]
