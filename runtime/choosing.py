"""Tokens from logits: drawn by the device where that can be, else by the host."""

import ctypes
from math import isfinite, isnan

import torch
from torch import Tensor

from nibblelm import ops
from nibblelm.errors import RequestError
from nibblelm.ops import SamplingState
from nibblelm.sampler import Sampled, Sampler, device_sampling, scored, unusable_logits
from nibblelm.scheduler import Sequence

Choice = Sampled | RequestError | None
"""A token, why there is none, or None: the prompt was all that was to be computed."""


def draws(logits: Tensor) -> bool:
    """Whether the device of these draws tokens."""
    return logits.device.type == "cuda"


def picked(logits: Tensor, rows: list[int]) -> Tensor:
    """These rows, without a copy where they follow each other."""
    first = rows[0] if rows else 0
    return logits[first : first + len(rows)] if rows == list(range(first, first + len(rows))) else logits[rows]


def choose(members: list[Sequence], logits: Tensor) -> list[tuple[Sequence, Choice]]:
    """The next token of each sequence, from its row of logits (M, vocab), or why there is none: drawn on the device
    where that can be."""
    chosen: list[tuple[Sequence, Choice]] = []
    on_device = [draws(logits) and not s.owner.sampler.on_host for s in members]
    for way, device in ((_choose_on_device, True), (_choose_on_host, False)):
        rows = [i for i, own in enumerate(on_device) if own is device]
        if rows:
            part = logits if len(rows) == len(members) else logits[rows]
            found = way([members[i].owner.sampler for i in rows], part)
            chosen += zip((members[i] for i in rows), found, strict=True)
    return chosen


def _choose_on_device(samplers: list[Sampler], logits: Tensor) -> list[Sampled | RequestError]:
    """`_choose_on_host` by the kernel that draws the tokens to come."""
    failed: dict[int, RequestError] = {}
    allowed = logits
    if any(sampler.guide is not None for sampler in samplers):
        masks = torch.full((len(samplers), -(-logits.shape[1] // 32)), -1, dtype=torch.int32)
        for i, sampler in enumerate(samplers):
            try:
                masks[i] = masks[i] if sampler.guide is None else sampler.allowed()[0]
            except RequestError as error:
                failed[i] = error
        allowed = ops.mask_logits(logits, ops.to_device(masks, logits.device))
    drawn = zip(samplers, draw(samplers, allowed, logits), strict=True)
    return [failed.get(i) or accepted(sampler, chosen) for i, (sampler, chosen) in enumerate(drawn)]


def draw(samplers: list[Sampler], logits: Tensor, raw: Tensor, drafts: list[list[int]] | None = None) -> list[Sampled]:
    """What the device draws from each row of logits (M, vocab), as `device_sampling` has it, with the log-probabilities
    that are wanted from the row's raw logits."""
    state = device_sampling(samplers, logits.shape[1], drafts)
    columns = ops.to_device(state.columns, logits.device)
    wide = (None if t is None else ops.to_device(t, logits.device) for t in state.wide)
    tokens = ops.sample(logits, SamplingState.over(columns, *wide))
    chosen = [Sampled(token) for token in tokens.tolist()]
    if wanted := wanted_scores(samplers):
        rows = ops.to_device(torch.tensor(list(wanted)), logits.device)
        found = ops.top_logprobs(raw, tokens, rows, max(wanted.values()))
        scores = scored([chosen[i].token_id for i in wanted], [*wanted.values()], *found)
        for i, one in zip(wanted, scores, strict=True):
            chosen[i] = one
    return chosen


def draws_ahead(samplers: list[Sampler], logits: Tensor) -> bool:
    """Whether `drawn_ahead` may be asked for rows of such logits: all that a draw depends on is known."""
    plain = (s.runs_ahead and not s.wide and s.params.logprobs is None for s in samplers)
    return draws(logits) and all(plain)


def drawn_ahead(samplers: list[Sampler], logits: Tensor) -> Tensor:
    """`draw` from logits (M, vocab) without a wait: ids (M,), int32, on the device."""
    columns = ops.to_device(device_sampling(samplers, logits.shape[1]).columns, logits.device)
    return ops.sample(logits, SamplingState.over(columns))


def wanted_scores(samplers: list[Sampler]) -> dict[int, int]:
    """The rows whose log-probabilities are wanted, with how many of the most likely."""
    return {i: s.params.logprobs for i, s in enumerate(samplers) if s.params.logprobs is not None}


def accepted(sampler: Sampler, chosen: Sampled) -> Sampled | RequestError:
    """What the device chose: below 0 where no logit is finite. Where one is NaN, log-probabilities are, too."""
    try:
        if chosen.token_id < 0 or (chosen.logprob is not None and isnan(chosen.logprob)):
            return unusable_logits("not finite")
        sampler.accept(chosen.token_id)
        return chosen
    except RequestError as error:  # of its guide
        return error


def _choose_on_host(samplers: list[Sampler], logits: Tensor) -> list[Sampled | RequestError]:
    """The next token of each sequence, from its row of logits (M, vocab), or why there is none."""
    greedy: list[int] = ops.argmax(logits).tolist() if any(s.takes_argmax for s in samplers) else []
    chosen: list[Sampled | RequestError] = []
    for i, sampler in enumerate(samplers):
        try:
            chosen.append(_argmax(sampler, logits[i], greedy[i]) if sampler.takes_argmax else sampler.sample(logits[i]))
        except RequestError as error:
            chosen.append(error)
    return chosen


def _argmax(sampler: Sampler, row: Tensor, token_id: int) -> Sampled:
    peak = float(row[token_id])
    if not isfinite(peak):  # the kernel's argmax passes over NaN
        raise unusable_logits(peak)
    return sampler.accept(token_id)


def compute_alone() -> None:
    """From now on torch's host ops in this thread are not shared out, those of other threads as before. Sampling is too
    small for it: torch's threads would wait for each other and for the kernels' own."""
    torch.get_num_threads()  # a thread's first op sets its number, which would undo this
    if limit := getattr(ctypes.CDLL(None), "omp_set_num_threads", None):
        limit(1)
