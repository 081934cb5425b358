"""From logits to the next token, in the order of transformers' generate, with repeatable random numbers.

Order (transformers 5, `GenerationMixin._get_logits_processor`):
  0. what a guide does not allow is -inf
  1. logit bias (its sequence_bias stands first, so a biased logit is penalised like any other)
  2. repetition penalty over prompt and output: a seen token's logit is multiplied if negative, else divided
  3. frequency and presence penalties over the output: logit - frequency * count - presence * (count > 0);
     transformers has none, these follow the OpenAI API; then min_tokens forbids end tokens
  4. temperature, 5. top-k (ties with the k-th stay), 6. top-p, 7. min-p, 8. softmax and draw
At temperature 0 the token is the argmax after step 3, the lowest id of equals. Log-probabilities reported are
those of the raw logits, before step 1.

Top-p keeps a token if the probability of all tokens before it is below top_p, in the order of falling logits
and, among equals, rising ids. The draw is the inverse of the cumulative distribution over the kept tokens in the
order of rising ids: the first whose cumulative weight exceeds u * (sum of weights).

u = word / 2**32 with word the first output of Philox-4x32-10 (Salmon, Moraes, Dror, Shaw 2011, "Parallel random
numbers: as easy as 1, 2, 3") at counter (position mod 2**32, position >> 32, 0, 0) and key (seed mod 2**32,
seed >> 32); position counts the output tokens of one sequence from 0. Nothing else enters, so a sequence draws the
same numbers alone and in a batch.
"""

import math
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.errors import RequestError
from nibblelm.ops import SamplingState
from nibblelm.sampling_params import SamplingParams
from nibblelm.structured import Guide

MASK32 = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox-4x32 with 10 rounds: four 32-bit words from a 128-bit counter and a 64-bit key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high, low = 0xD2511F53 * c0, 0xCD9E8D57 * c2  # 64-bit products
        c0, c1, c2, c3 = (low >> 32) ^ c1 ^ k0, low & MASK32, (high >> 32) ^ c3 ^ k1, high & MASK32
        k0, k1 = (k0 + 0x9E3779B9) & MASK32, (k1 + 0xBB67AE85) & MASK32
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that output token `position` is drawn with; 0 <= seed < 2**64."""
    word = philox((position & MASK32, position >> 32, 0, 0), (seed & MASK32, seed >> 32))[0]
    return word * 2.0**-32


@dataclass(slots=True)  # frozen it would take three times as long to make, for every token
class Sampled:
    """One token: its id, and if asked for its log-probability and the most likely (id, log-probability) pairs."""

    token_id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = field(default_factory=list)


def token_logprobs(logits: Tensor, token_id: int, top_n: int) -> Sampled:
    """Log-probabilities under softmax of raw `logits` (V,): of `token_id` and of the `top_n` most likely tokens."""
    x = logits.detach().to("cpu", torch.float32)
    peak = float(x.max())
    norm = peak + math.log(float((x - peak).exp_().sum(dtype=torch.float64)))
    values = x.numpy()
    ids = _largest(x, top_n) if top_n else np.empty(0, np.int64)
    ids = ids[np.lexsort((ids, -values[ids]))][:top_n]
    top = [(int(i), float(values[i]) - norm) for i in ids]
    return Sampled(token_id, float(values[token_id]) - norm, top)


def scored(tokens: Sequence[int], counts: Sequence[int], scores: Tensor, ids: Tensor) -> list[Sampled]:
    """What `ops.top_logprobs` gave for tokens, with so many of the most likely for each."""
    found: list[Sampled] = []
    for token, count, (own, *values), names in zip(tokens, counts, scores.tolist(), ids.tolist(), strict=True):
        top = [(i, value) for i, value in zip(names, values, strict=True) if value > -math.inf]
        found.append(Sampled(token, own, top[:count]))
    return found


def row_logprobs(logits: Tensor, token_ids: Sequence[int], top_n: int) -> list[Sampled]:
    """`token_logprobs` of rows (M, V) of raw logits, for a token each; on CUDA there, in fp32."""
    if logits.device.type == "cpu" or not token_ids:
        return [token_logprobs(row, token, top_n) for row, token in zip(logits, token_ids, strict=True)]
    rows = torch.arange(len(token_ids), device=logits.device)
    tokens = ops.to_device(torch.tensor(token_ids, dtype=torch.int32), logits.device)
    return scored(token_ids, [top_n] * len(token_ids), *ops.top_logprobs(logits, tokens, rows, top_n))


class Sampler:
    """Draws the tokens of one sequence.

    vocab_size is the width of the logits; prompt_ids are what the repetition penalty counts besides the output, end_ids
    what `min_tokens` holds back; `guide` says which tokens may come.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        prompt_ids: Sequence[int] = (),
        end_ids: Collection[int] = (),
        guide: Guide | None = None,
    ) -> None:
        self.params = params = params.resolve({})
        # 48 random bits: large enough, and exact as a JSON number everywhere
        self.seed = int.from_bytes(os.urandom(6), "little") if params.seed is None else params.seed
        self.position = 0
        bias = params.logit_bias or {}
        self._bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self._bias = np.fromiter(bias.values(), np.float32, len(bias))
        for name, named in (("logit_bias", bias), ("stop_token_ids", params.stop_token_ids)):
            if named and (largest := max(named)) >= vocab_size:
                raise RequestError(f"{name} names token {largest}; supported: 0 to {vocab_size - 1}")
        self._seen = _Counts(prompt_ids) if params.repetition_penalty != 1 else None
        counted = params.frequency_penalty or params.presence_penalty
        self._output = _Counts(()) if counted else None
        self._ends = np.array([i for i in end_ids if i < vocab_size], np.int64)
        self.guide, self._end_ids = guide, end_ids

    @property
    def takes_argmax(self) -> bool:
        """Whether the argmax of the raw logits is the token and no log-probabilities are asked for."""
        return self.params.temperature == 0 and self.params.logprobs is None and not self._changes_logits

    @property
    def wide(self) -> bool:
        """Whether its state has a number for each token of the vocabulary: penalties and a bias."""
        return self._seen is not None or self._output is not None or self._bias_ids.size > 0

    @property
    def on_host(self) -> bool:
        """Whether the next token is for `sample` on every device: `device_sampling` knows no ends to hold back."""
        return self.position < self.params.min_tokens and self._ends.size > 0

    @property
    def runs_ahead(self) -> bool:
        """Whether a device may draw a token before the host has seen the one before it."""
        return self.guide is None and not self.on_host

    @property
    def _changes_logits(self) -> bool:
        return self.wide or self.on_host or self.guide is not None

    def accept(self, token_id: int) -> Sampled:
        """Take a token that the device chose: the argmax where `takes_argmax`, else the draw of `device_sampling`."""
        self.position += 1
        if self.guide is not None and token_id not in self._end_ids:
            self.guide.accept(token_id)
        for counts in (self._seen, self._output):
            if counts is not None:
                counts.add(token_id)
        return Sampled(token_id)

    def sample(self, logits: Tensor) -> Sampled:
        """The next token for raw fp32 `logits` (V,), which stay as they are. Log-probabilities only if asked for."""
        raw = logits.detach().to("cpu", torch.float32)
        x = self._processed(raw)
        token_id = int(x.argmax())  # the first of equals
        peak = float(x[token_id])
        if not math.isfinite(peak):
            raise unusable_logits(peak)
        if self.params.temperature != 0:
            token_id = self._draw(x, peak)
        accepted = self.accept(token_id)
        return accepted if self.params.logprobs is None else token_logprobs(raw, token_id, self.params.logprobs)

    def allowed(self) -> Tensor:
        """The mask (1, ceil(V / 32)) of `ops.mask_logits` for the next token, with a guide. Raises SchemaError."""
        assert self.guide is not None
        return torch.from_numpy(self.guide.mask())[None]

    def _processed(self, logits: Tensor) -> Tensor:
        """Steps 1 to 3 of the order above."""
        if not self._changes_logits:
            return logits
        logits = logits.clone() if self.guide is None else ops.mask_logits(logits[None], self.allowed())[0]
        x = logits.numpy()  # shares memory: what is written below is in `logits`
        x[self._bias_ids] += self._bias
        if self._seen is not None:
            ids, penalty = self._seen.ids, np.float32(self.params.repetition_penalty)
            seen = x[ids]
            x[ids] = np.where(seen < 0, seen * penalty, seen / penalty)
        if self._output is not None:
            x[self._output.ids] -= np.float32(self.params.frequency_penalty) * self._output.counts
            x[self._output.ids] -= np.float32(self.params.presence_penalty)
        if self.on_host:
            x[self._ends] = -np.inf
        return logits

    def _draw(self, x: Tensor, peak: float) -> int:
        u = uniform(self.seed, self.position)
        ids, weights = kept_tokens(x, peak, self.params)
        if ids is None:  # every token: worth its own path, since this is a pass over the vocabulary
            sums = weights.cumsum(0)
            return int(torch.searchsorted(sums, u * sums[-1], right=True))
        order = np.argsort(ids)
        sums = np.cumsum(weights.numpy()[order])
        return int(ids[order[np.searchsorted(sums, u * sums[-1], side="right")]])


def unusable_logits(peak: float | str) -> RequestError:
    """What ends a request whose largest logit, `peak`, is not finite."""
    return RequestError(f"the largest logit is {peak}: the model's output, or the logit bias, is not usable")


def device_sampling(
    samplers: Sequence[Sampler], vocab_size: int, drafts: Sequence[Sequence[int]] | None = None
) -> SamplingState:
    """What `ops.sample` needs to go on where these samplers stand, a row for each, on the CPU.

    drafts  or would stand after these tokens, of each
    """
    drafts = drafts or [()] * len(samplers)
    wide = any(s.wide for s in samplers)
    state = SamplingState.greedy(len(samplers), torch.device("cpu"), vocab_size if wide else 0)
    of_all = (s.params for s in samplers)
    columns = zip(
        *(
            (
                p.temperature,
                min(p.top_k or 0, vocab_size),
                p.top_p,
                p.min_p,
                p.repetition_penalty,
                p.presence_penalty,
                p.frequency_penalty,
            )
            for p in of_all
        ),
        strict=True,
    )
    targets = (state.temperature, state.top_k, state.top_p, state.min_p)
    for tensor, values in zip((*targets, state.repetition, state.presence, state.frequency), columns, strict=True):
        tensor.numpy()[:] = values  # a third of the time that torch takes to read a list
    state.seeds.numpy()[:] = [s.seed - (1 << 64) * (s.seed >> 63) for s in samplers]  # the same bits, signed
    state.steps.numpy()[:] = [s.position + len(d) for s, d in zip(samplers, drafts, strict=True)]
    if state.bias is None or state.prompt is None or state.counts is None:
        return state
    for row, sampler in enumerate(samplers):
        state.bias[row, torch.from_numpy(sampler._bias_ids)] = torch.from_numpy(sampler._bias)
        if sampler._seen is not None:
            state.prompt[row, torch.from_numpy(sampler._seen.ids)] = 1
        if sampler._output is not None:
            counts = torch.from_numpy(sampler._output.counts).int()
            state.counts[row, torch.from_numpy(sampler._output.ids)] = counts
        for token in drafts[row]:
            state.counts[row, token] += 1
    return state


def kept_tokens(x: Tensor, peak: float, params: SamplingParams) -> tuple[np.ndarray | None, Tensor]:
    """Steps 4 to 7: the ids that may be drawn (None: all of them, in order) and their weights, float64.

    x (V,) fp32 on the CPU, peak its largest value, params resolved. A weight is exp((x - peak) / temperature).
    """
    assert params.temperature is not None
    assert params.top_p is not None
    assert params.min_p is not None
    temperature = max(params.temperature, 1e-30)  # fp32 cannot divide by less
    values, count = x.numpy(), x.numel()

    def weights_of(ids: np.ndarray) -> np.ndarray:
        return np.exp((values[ids].astype(np.float64) - peak) / temperature)

    if not params.top_k and params.top_p >= 1 and not params.min_p:
        return None, ((x - peak) / temperature).exp_().double()
    if params.top_k:
        ids = _largest(x, params.top_k)
        weights = weights_of(ids)
        total = float(weights.sum())
    elif params.top_p < 1:
        # The candidates grow until they hold the mass asked for; what is kept is the same as after a full sort
        total = float(((x - peak) / temperature).exp_().sum(dtype=torch.float64))
        for size in (256, 4096, count):
            ids = _largest(x, size)
            weights = weights_of(ids)
            if weights.sum() >= params.top_p * total:
                break
    else:
        # min-p alone is a threshold on logits, here with room for rounding; the exact test on weights follows
        ids = np.flatnonzero(values >= peak + temperature * math.log(params.min_p) - 1e-3 * (1 + abs(peak)))
        weights, total = weights_of(ids), 0.0
    if params.top_p < 1:
        order = np.lexsort((ids, -values[ids]))
        ids, weights = ids[order], weights[order]
        before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
        last = max(1, int(np.searchsorted(before, params.top_p * total)))
        ids, weights = ids[:last], weights[:last]
    enough = weights >= params.min_p  # the largest weight is 1
    return ids[enough], torch.from_numpy(weights[enough])


def _largest(x: Tensor, count: int) -> np.ndarray:
    """Ids, rising, of the `count` largest of x (V,) and of all that equal the smallest of them, but none of -inf: under
    a guide that is most of them."""
    values, least = x.numpy(), -math.inf
    rows = values.size // (4 * count)
    if rows > 1:
        # There are at least `count` values not below the count-th largest of the maxima of disjoint columns
        maxima = x[: values.size - values.size % rows].view(rows, -1).amax(0)
        least = float(maxima.topk(count).values[-1])
    ids = np.flatnonzero(values >= least if least > -math.inf else values > least)
    if count >= ids.size:
        return ids
    found = values[ids]
    return ids[found >= np.partition(found, found.size - count)[found.size - count]]


class _Counts:
    """How often each token occurred, as parallel arrays of ids and counts that grow by doubling."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        ids, counts = np.unique(np.asarray(token_ids, np.int64), return_counts=True)
        self._size = ids.size
        self._index = {int(token): i for i, token in enumerate(ids)}
        self._ids = np.concatenate([ids, np.zeros(64, np.int64)])
        self._counts = np.concatenate([counts, np.zeros(64)]).astype(np.float32)

    def add(self, token_id: int) -> None:
        """Count one more occurrence."""
        index = self._index.setdefault(token_id, self._size)
        if index == self._size:
            if index == self._ids.size:
                self._ids = np.resize(self._ids, 2 * index)
                self._counts = np.concatenate([self._counts, np.zeros(index, np.float32)])
            self._ids[index] = token_id
            self._size += 1
        self._counts[index] += 1

    @property
    def ids(self) -> np.ndarray:
        """Distinct token ids, int64."""
        return self._ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """Their counts, fp32."""
        return self._counts[: self._size]


__all__ = ["Sampled", "Sampler", "kept_tokens", "philox", "token_logprobs", "uniform"]
