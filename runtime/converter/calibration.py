"""The text that calibrated methods see, and the walk of its activations through the layers of a model."""

import hashlib
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nibblelm.config import DecoderConfig
from nibblelm.errors import ConvertError
from nibblelm.graph import Graph, Value, record
from nibblelm.kv_cache import KVCache
from nibblelm.layers import PlanWeights, Step
from nibblelm.models import family
from nibblelm.ops.types import PackedLinear, Weight, prompt_tiles
from nibblelm.tokenizer import Tokenizer, load_tokenizer
from nibblelm.weights import Kind

LENGTH = 512
_LAYER = re.compile(r".*\b(?:layers|blocks|h)\.(\d+)\.")
_SENTENCE_END = re.compile(r"(?<=[.!?])\s|\n")
SEPARATOR = "<|endoftext|>"
_DEFAULT = "calibration.txt"

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Calibration:
    """Samples (S, length) of token ids, and what nibblelm.json says of them."""

    ids: Tensor
    record: dict[str, Any]


def read_calibration(
    text: str | Path | None, folder: Path, config: DecoderConfig, samples: int, seed: int, held_out: int = 0
) -> Calibration:
    """At most `samples` pieces of a text for the model in `folder`, drawn without replacement.

    held_out  that many are drawn first and left out: what a call for so many samples gives
    text  a UTF-8 file whose documents are separated by <|endoftext|>; None is the bundled one: stories in simple
          English that the demo model wrote

    A model with a chat template sees each document as a chat: its first sentence is what the user says.
    """
    path = Path(text) if text is not None else None
    try:
        data = (files("nibblelm") / _DEFAULT).read_bytes() if path is None else path.read_bytes()
        documents = [part.strip() for part in data.decode("utf-8-sig").split(SEPARATOR)]
    except (OSError, UnicodeDecodeError) as cause:
        raise ConvertError(f"cannot read the calibration text {path or _DEFAULT}: {cause}") from cause
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise ConvertError(f"{folder} has no tokenizer, which calibration needs; use method mse")
    prefix = tokenizer.opening
    stream = [token for part in documents if part for token in _document(tokenizer, part)]
    room = min(LENGTH, config.max_positions, len(prefix) + len(stream)) - len(prefix)
    if not stream:
        raise ConvertError(f"the calibration text {path or _DEFAULT} is empty")
    if room < 1 or samples < 1:
        raise ConvertError(f"{samples} samples of {len(stream)} tokens: calibration needs at least one of each")
    pieces = torch.tensor(stream[: len(stream) // room * room]).view(-1, room)
    if int(pieces.max()) >= config.vocab_size:
        raise ConvertError(f"the tokenizer of {folder} has ids beyond the vocabulary of {config.vocab_size}")
    if len(pieces) <= held_out:
        raise ConvertError(f"the calibration text is {len(pieces)} pieces of {room} tokens: give more than {held_out}")
    chosen = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed))[held_out:][:samples]
    if 2 * len(chosen) < samples:
        text = "the bundled calibration text" if path is None else f"the calibration text {path}"
        warnings.warn(f"{text} is short: {len(chosen)} of {samples} samples, of {room} tokens", stacklevel=2)
    ids = torch.cat((torch.tensor(prefix, dtype=torch.long).expand(len(chosen), -1), pieces[chosen]), 1)
    name = "the bundled text" if path is None else path.name
    facts = {"file": name, "sha256": hashlib.sha256(data).hexdigest(), "seed": seed}
    if tokenizer.chat_template is not None:
        facts["chat_template"] = hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()
    return Calibration(ids.int(), {**facts, "samples": len(ids), "length": ids.shape[1]})


def _document(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a text as the model will meet it: through its chat template, where it has one."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(text)

    def any_day(pattern: str) -> str:  # a conversion's bytes must not depend on when it runs
        from nibblelm.tokenizer.template_limits import strftime_now

        return strftime_now(pattern, datetime(2026, 1, 1))

    first = _SENTENCE_END.split(text, maxsplit=1)[0]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": first}], strftime_now=any_day)
    return tokenizer.encode(prompt + text[len(first) :], add_special_tokens=False)


def layer_of(name: str) -> int | None:
    """The layer that a tensor belongs to."""
    found = _LAYER.match(name)
    return int(found[1]) if found else None


class Skeleton(PlanWeights):
    """Vectors and the embedding table as they are; of matrices, in place of data, the modules and the order of rows."""

    def __init__(self, read: Read, device: torch.device) -> None:
        super().__init__()
        self.device, self._read = device, read

    def matrices(
        self,
        modules: Sequence[tuple[str, int]],
        columns: int,
        kind: Kind = "linear",
        pairs: bool = False,
        order: Tensor | None = None,
        transposed: bool = False,
    ) -> list[PackedLinear]:
        shape, names = (sum(rows for _, rows in modules), columns), [name for name, _ in modules]
        return [PackedLinear(shape, 32, -1, 0, self.device, (names, order))]

    def head(
        self, module: str, table: str, rows: int, columns: int, tied: bool, unit_rows: bool = False
    ) -> list[PackedLinear]:
        return self.matrices([(module, rows)], columns, "head")

    def vector(self, name: str, *shape: int) -> Tensor:
        return self._read(name).float().to(self.device)

    def table(self, module: str, rows: int, columns: int, head: str | None) -> Weight:
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


def recorded(model: Any, config: DecoderConfig, count: int, device: torch.device) -> Graph:
    """The forward of prompts of `count` tokens, from ids, positions, slots and tiles; all layers have one cache."""
    model.rope.reach(count)
    cache = KVCache(1, 1, config.kv_heads, count, config.head_dim, torch.float32, device)
    cache.keys, cache.values = cache.keys * config.layers, cache.values * config.layers

    def forward(ids: Value, positions: Value, slots: Value, tiles: Value) -> Value:
        return model.forward(Step(ids, positions, slots, cache, tiles))

    return record(forward, 4, device)


class Walk:
    """Activations of all samples on their way through the layers, one layer at a time.

    Layers run in fp32 through the project's own ops, with matrices that the caller supplies: in one stream, or in two,
    of which the first is the model without quantization.
    """

    def __init__(
        self, ids: Tensor, raw: dict[str, Any], config: DecoderConfig, read: Read, device: torch.device, streams: int
    ) -> None:
        model, count = family(raw).Model(Skeleton(read, device), config, ids.shape[1]), ids.shape[1]
        positions = torch.arange(count, dtype=torch.int32, device=device)
        self._graph = recorded(model, config, count, device)
        # Activations of each stream, and in it of each sample, that a node still reads.
        self._held = [[self._embedded(row, positions) for row in ids] for _ in range(streams)]
        self._at = 1
        self.device = device
        self.layer = 0
        """The layer that `advance` runs next."""

    def _embedded(self, ids: Tensor, positions: Tensor) -> dict[Value, Tensor]:
        """The first node, whose table stays on the CPU."""
        tiles = torch.tensor(prompt_tiles([len(ids)]), dtype=torch.int32, device=positions.device)
        held = dict(zip(self._graph.inputs, (ids, positions, torch.zeros_like(positions), tiles), strict=True))
        self._graph.run(held, 0, 1)
        return {value: t.to(positions.device) for value, t in held.items()}

    @torch.inference_mode()
    def advance(self, weigh: Weigh) -> None:
        """Run the next layer; `weigh` is asked for the matrices of each projection when its inputs are known."""
        nodes = self._graph.nodes
        while True:
            linear = next(i for i in range(self._at, len(nodes)) if nodes[i].op == "linear")
            node = nodes[linear]
            modules, order = node.attributes["weight"].data
            if layer_of(modules[0]) != self.layer:
                break
            for stream in self._held:
                for held in stream:
                    self._graph.run(held, self._at, linear)
            x = node.inputs["x"]
            weights = weigh(modules, lambda x=x: self._moments(x))
            for stream, weight in zip(self._held, weights, strict=True):
                placed = (weight if order is None else weight[order.to(weight.device)]).to(self.device)
                for held in stream:
                    y = torch.nn.functional.linear(held[x], placed, node.attributes["bias"])
                    self._graph.put(held, linear, y)
            self._at = linear + 1
        self.layer += 1

    def _moments(self, value: Value) -> Moments:
        exact, last = ([held[value] for held in self._held[i]] for i in (0, -1))
        width, rows = last[0].shape[1], len(last) * len(last[0])
        second, drift = torch.zeros(2, width, width, device=last[0].device)
        magnitude = torch.zeros(width, device=last[0].device)
        for u, x in zip(exact, last, strict=True):
            second.addmm_(x.T, x)
            magnitude += x.abs().sum(0)
            if u is not x:
                drift.addmm_((u - x).T, x)
        return Moments(second / rows, magnitude / rows, drift / rows)
