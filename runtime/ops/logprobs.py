"""Log-probabilities of chosen and of most likely tokens: `log_softmax`, and torch's top-k of keys without equals."""

import torch
from torch import Tensor

from nibblelm.ops.devices import backend

AT_ONCE = 1 << 21
"""Logits that are looked at together, unless a row has more: they take 64 MB for a while."""


def top_logprobs(logits: Tensor, tokens: Tensor, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Under softmax of some rows of logits: the logarithms of the probabilities of a token, and of the most likely.

    logits (M, V) fp32; tokens (M,) int32, below 0 for none; rows (R,) int64, those that are wanted; n = min(count, V)
    returns  scores (R, 1 + n) fp32, the token's first (of none: token 0's), then falling; ids (R, n) int64, of equal
             logits the lowest first. A row's bits do not depend on others, and a host does not wait for them
    """
    if logits.ndim != 2 or logits.dtype != torch.float32 or tokens.shape != logits.shape[:1] or rows.ndim != 1:
        raise ValueError(
            f"top_logprobs: got logits {tuple(logits.shape)} {logits.dtype}, tokens {tuple(tokens.shape)}, rows "
            f"{tuple(rows.shape)}; supported: (M, V) fp32, (M,) and (R,)"
        )
    parts = [
        _of_rows(logits.index_select(0, part), tokens.index_select(0, part), min(count, logits.shape[1]))
        for part in rows.split(max(AT_ONCE // logits.shape[1], 1))
    ]
    scores, ids = zip(*parts, strict=True)
    return torch.cat(scores), torch.cat(ids)


def _of_rows(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    last = logits.shape[1] - 1
    scores = backend(logits.device).log_softmax(logits)
    ids = torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    if count:
        bits = (logits + 0.0).view(torch.int32)  # without -0, whose bits are not those of the equal 0
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers in the order of the numbers
        keys = (ordered.long() << 32) + torch.arange(last, -1, -1, device=logits.device)
        ids = last - (keys.topk(count).values & 0xFFFFFFFF)
    chosen = tokens.long().clamp(min=0)[:, None]
    return scores.gather(1, torch.cat([chosen, ids], 1)), ids
