"""The text that calibrated methods see, and the walk of its activations through the layers of a model."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.config import DecoderConfig
from nibblelm.errors import ConvertError
from nibblelm.kv_cache import KVCache
from nibblelm.layers import Link, PlanWeights, Step
from nibblelm.models import family
from nibblelm.models.llama import Layer, Model
from nibblelm.ops.types import PackedLinear, Weight
from nibblelm.tokenizer import load_tokenizer
from nibblelm.weights import Kind

LENGTH = 512
SEPARATOR = "<|endoftext|>"
_DEFAULT = "calibration.txt"

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Calibration:
    """Samples (S, length) of token ids, and what nibblelm.json says of them."""

    ids: Tensor
    record: dict[str, Any]


def read_calibration(
    text: str | Path | None, folder: Path, config: DecoderConfig, samples: int, seed: int
) -> Calibration:
    """At most `samples` pieces of a text for the model in `folder`, drawn without replacement.

    text  a UTF-8 file whose documents are separated by <|endoftext|>; None is the bundled one: stories in simple
          English that the demo model wrote
    """
    path = Path(text) if text is not None else None
    try:
        data = (files("nibblelm") / _DEFAULT).read_bytes() if path is None else path.read_bytes()
        documents = [part.strip() for part in data.decode().split(SEPARATOR)]
    except (OSError, UnicodeDecodeError) as cause:
        raise ConvertError(f"cannot read the calibration text {path or _DEFAULT}: {cause}") from cause
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ConvertError(f"{folder} has no tokenizer, which calibration needs; use method mse")
    prefix = tokenizer.encode("")
    stream = [token for part in documents if part for token in tokenizer.encode(part)]
    room = min(LENGTH, config.max_positions, len(prefix) + len(stream)) - len(prefix)
    if room < 1 or samples < 1:
        raise ConvertError(f"{samples} samples of {len(stream)} tokens: calibration needs at least one of each")
    pieces = torch.tensor(stream[: len(stream) // room * room]).view(-1, room)
    if int(pieces.max()) >= config.vocab_size:
        raise ConvertError(f"the tokenizer of {folder} has ids beyond the vocabulary of {config.vocab_size}")
    chosen = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed))[:samples]
    ids = torch.cat((torch.tensor(prefix, dtype=torch.long).expand(len(chosen), -1), pieces[chosen]), 1)
    name = "the bundled text" if path is None else path.name
    facts = {"file": name, "sha256": hashlib.sha256(data).hexdigest(), "seed": seed}
    return Calibration(ids.int(), {**facts, "samples": len(ids), "length": ids.shape[1]})


class _Skeleton(PlanWeights):
    """Vectors and the embedding table as they are, matrices left out; `modules` says which a Linear is made of."""

    def __init__(self, read: Read, device: torch.device) -> None:
        super().__init__()
        self.device, self._read = device, read
        self.modules: dict[int, list[str]] = {}

    def matrices(
        self, modules: Sequence[tuple[str, int]], columns: int, kind: Kind = "linear", pairs: bool = False
    ) -> list[PackedLinear]:
        packed = super().matrices(modules, columns, kind, pairs)
        self.modules[id(packed)] = [name for name, _ in modules]
        return packed

    def vector(self, name: str, size: int) -> Tensor:
        return self._read(name).float().to(self.device)

    def table(self, module: str, rows: int, columns: int, tied: bool) -> Weight:
        return self._read(f"{module}.weight").float()


@dataclass(frozen=True)
class Moments:
    """Of the inputs x of a Linear: mean of x x^T, (K, K) fp32, and of |x|, (K,).

    drift  mean of (u - x) x^T, where the walk carries beside x what it is without quantization, u; else zeros
    """

    second: Tensor
    magnitude: Tensor
    drift: Tensor


Weigh = Callable[[list[str], Callable[[], Moments]], list[Tensor]]
"""(modules that read one input, moments of that input) -> their matrices, stacked, fp32: one for each stream."""


@dataclass
class _Stream:
    """Activations of all samples: what the next op reads, and the residual stream, (length, width) each."""

    x: list[Tensor]
    residual: list[Tensor | None]


class Walk:
    """Activations of all samples on their way through the layers, one layer at a time.

    Layers run in fp32 through the project's own ops, with matrices that the caller supplies: in one stream, or in two,
    of which the first is the model without quantization.
    """

    def __init__(
        self, ids: Tensor, raw: dict[str, Any], config: DecoderConfig, read: Read, device: torch.device, streams: int
    ) -> None:
        self._skeleton = _Skeleton(read, device)
        model = family(raw).Model(self._skeleton, config, ids.shape[1])
        if type(model) is not Model:
            raise ConvertError(f"model_type {config.model_type!r} cannot be calibrated; use method mse")
        self._layers: list[Layer] = model.layers
        count = ids.shape[1]
        model.rope.reach(count)
        cache = KVCache(1, 1, config.kv_heads, count, config.head_dim, torch.float32, device)
        cache.keys, cache.values = cache.keys * config.layers, cache.values * config.layers
        positions = torch.arange(count, dtype=torch.int32, device=device)
        self._step = Step(positions, positions, torch.zeros_like(positions), cache, one_sequence=True)
        table = model.embedding.table
        assert isinstance(table, Tensor)
        x = [table[row.long()].to(device) for row in ids]
        self._streams = [_Stream(list(x), [None] * len(x)) for _ in range(streams)]
        self.head_dim = config.head_dim
        self.layer = 0
        """The layer that `advance` runs next."""

    @torch.inference_mode()
    def advance(self, weigh: Weigh) -> None:
        """Run the next layer; `weigh` is asked for the matrices of each projection when its inputs are known."""
        layer = self._layers[self.layer]
        for link in (layer.attention.before, layer.attention.after, *layer.mlp.links):
            for stream in self._streams:
                if link.norm is not None:
                    for i, x in enumerate(stream.x):
                        stream.x[i], stream.residual[i] = link.norm(x, stream.residual[i])
            weights = weigh(self._skeleton.modules[id(link.linear.packed)], self._moments)
            for stream, weight in zip(self._streams, weights, strict=True):
                placed = weight.to(stream.x[0].device)
                for i, x in enumerate(stream.x):
                    stream.x[i] = self._apply(layer, link, placed, x)
        self.layer += 1

    def _apply(self, layer: Layer, link: Link, weight: Tensor, x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x, weight, link.linear.bias)
        if link.gated:
            return ops.swiglu(y)
        return layer.attention(y, self._step) if link is layer.attention.before else y

    def _moments(self) -> Moments:
        exact, last = self._streams[0].x, self._streams[-1].x
        width, rows = last[0].shape[1], len(last) * len(last[0])
        second, drift = torch.zeros(2, width, width, device=last[0].device)
        magnitude = torch.zeros(width, device=last[0].device)
        for u, x in zip(exact, last, strict=True):
            second.addmm_(x.T, x)
            magnitude += x.abs().sum(0)
            if u is not x:
                drift.addmm_((u - x).T, x)
        return Moments(second / rows, magnitude / rows, drift / rows)
