"""What `ops.sample` reads and updates."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingState:
    """What `ops.sample` reads and updates, a row per sequence; (M,) tensors on one device unless said otherwise.

    The parameters are those of `SamplingParams`; a captured program takes new ones by writing into the tensors.
    """

    temperature: Tensor  # fp32; 0: greedy
    top_k: Tensor  # int32; 0: off
    top_p: Tensor  # fp32; 1: off
    min_p: Tensor  # fp32; 0: off
    repetition: Tensor  # fp32; 1: off
    presence: Tensor  # fp32; 0: off
    frequency: Tensor  # fp32; 0: off
    seeds: Tensor  # int64, the bits of an unsigned seed
    steps: Tensor  # int64, output tokens drawn so far; `sample` adds 1
    bias: Tensor | None = None  # fp32 (M, V), added to the logits
    prompt: Tensor | None = None  # uint8 (M, V), 1 where the prompt has the token
    counts: Tensor | None = None  # int32 (M, V), how often the output has the token; `sample` counts its result

    @classmethod
    def greedy(cls, rows: int, device: torch.device, vocab_size: int = 0) -> "SamplingState":
        """Everything off, temperature 0; with a `vocab_size` also room for bias, prompt and counts."""

        def filled(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        off, on = filled(0, torch.float32), filled(1, torch.float32)
        whole = [filled(0, dtype) for dtype in (torch.int32, torch.int64, torch.int64)]
        wide: list[Tensor | None] = [None, None, None]
        if vocab_size:
            dtypes = (torch.float32, torch.uint8, torch.int32)
            wide = [torch.zeros(rows, vocab_size, dtype=dtype, device=device) for dtype in dtypes]
        return cls(off, whole[0], on, off.clone(), on.clone(), off.clone(), off.clone(), whole[1], whole[2], *wide)

    @property
    def rows(self) -> int:
        """M."""
        return self.temperature.shape[0]

    @property
    def vocab_size(self) -> int:
        """V of the tensors that have one, 0 without any."""
        wide = [t for t in (self.bias, self.prompt, self.counts) if t is not None]
        return wide[0].shape[1] if wide else 0

    def tensors(self) -> dict[str, Tensor | None]:
        """All fields by their names."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
