"""A checkpoint with its residual stream, and the values of each attention head, rotated: the same function.

With x' = x R for an orthogonal R, whatever writes to the residual stream (embedding, o_proj, down_proj) is followed by
R and whatever reads it is preceded by R^T. RMSNorm commutes with R once its gain is folded into the matrices behind it
(SliceGPT, Ashkboos et al. 2024), and so does LayerNorm where R leaves the mean alone; a norm's bias b stays in the norm
as b / gain. The values of a head are rotated in v_proj and back in o_proj; nothing stands between them but a weighted
mean over positions (QuaRot, Ashkboos et al. 2024). Nothing is left to do at run time.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from nibblelm.config import DecoderConfig
from nibblelm.converter.wiring import wiring
from nibblelm.errors import ConvertError
from nibblelm.quant.rotation import Rotation

Read = Callable[[str], Tensor]
"""A tensor of the model by its name, a matrix as (N, K)."""


def rotated(read: Read, raw: Mapping[str, Any], config: DecoderConfig, seed: int) -> Read:
    """Read tensors of the model of config.json `raw` as they are after rotation, whole, what changes in fp64.

    Raises ConvertError for a model whose wiring does not allow it.
    """
    found = wiring(raw, config)
    if not found.writers:
        raise ConvertError(
            f"model_type {config.model_type!r}, with this config.json, cannot be rotated: something that is not linear "
            "stands between its blocks and the residual stream, or behind the last norm. Convert without rotate"
        )
    stream = Rotation(config.hidden_size, seed, keeps_mean=found.centred)
    values = Rotation(config.head_dim, seed + 1)

    def in_heads(weight: Tensor) -> Tensor:
        """Rotate dimension 0, (heads * head_dim, ...), head by head."""
        return values.rows(weight.unflatten(0, (-1, config.head_dim)).transpose(0, 1)).transpose(0, 1).flatten(0, 1)

    def gain(name: str) -> Tensor:
        return read(name).double() + found.gains[name]

    def bias_of_norm(name: str) -> Tensor:
        factors = gain(found.biases[name])
        if not factors.all():
            raise ConvertError(f"{found.biases[name]} has a gain of 0, which cannot be rotated; convert without rotate")
        return stream(read(name).double() / factors)

    def tensor(name: str) -> Tensor:
        if name in found.gains:
            return torch.full_like(read(name), 1.0 - found.gains[name], dtype=torch.float64)
        if name in found.biases:
            return bias_of_norm(name)
        weight = read(name).double()
        if name in found.tables:
            return stream(weight)
        module, _, kind = name.rpartition(".")
        if module in found.values:
            rows = found.values[module]
            weight = weight.index_copy(0, rows, in_heads(weight[rows]))  # a source in fp64 is as it is in the file
        if kind == "weight" and module in found.mixers:
            weight = in_heads(weight.T).T
        if kind == "weight" and module in found.readers:
            norm = found.readers[module]
            weight = stream(weight if norm is None else weight * gain(norm))
        return stream.rows(weight) if module in found.writers else weight

    return tensor
