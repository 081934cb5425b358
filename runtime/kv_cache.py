"""Keys and values of past tokens: one (slots, kv heads, capacity, head_dim) buffer per layer for each."""

import torch

from nibblelm.memory import reserved


class KVCache:
    """Room for `capacity` positions of `slots` sequences.

    On the CPU the whole capacity is reserved address space, and memory is taken page by page as positions are
    written, so a long context limit costs nothing until it is used. On CUDA it is allocated at once.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (slots, kv_heads, capacity, head_dim)
        self.slots, self.capacity = slots, capacity
        self.keys = [reserved(shape, dtype, device) for _ in range(layers)]
        self.values = [reserved(shape, dtype, device) for _ in range(layers)]


def bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one position of one sequence takes in all layers."""
    return 2 * layers * kv_heads * head_dim * dtype.itemsize
