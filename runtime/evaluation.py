"""How well a model predicts a text, and how far its predictions lie from those of the model it was made from.

The protocol. Each document is tokenized by itself, without special tokens, and read in windows of at most `ctx`
positions: first what the tokenizer puts before a text (BOS, or nothing), then tokens of the document. Windows begin
`stride` tokens apart, and each predicts the tokens that no window before it has predicted; without a BOS the first
token of a document is nobody's. Perplexity is exp of the mean negative log-likelihood of the predicted tokens. Its
standard error takes windows, not tokens, as the independent draws (the ratio estimator of cluster sampling; Cochran,
Sampling Techniques, 1977), times the perplexity.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nibblelm.engine import LLM
from nibblelm.errors import RequestError
from nibblelm.tokenizer import Tokenizer

BLOCK_BYTES = 32 << 20
PERCENTILES = (50, 90, 99)

Logits = Callable[[Sequence[int]], Tensor]
"""Token ids -> logits (len(ids), vocab)."""


@dataclass(frozen=True)
class Window:
    """Token ids of one forward pass; `ids[first:]` are predicted, each from all before it."""

    ids: list[int]
    first: int


def tokenize(tokenizer: Tokenizer | None, text: str, separator: str | None = None) -> tuple[list[int], list[list[int]]]:
    """What the tokenizer puts before a text, and the token ids of each document of `text`, cut at `separator`, white
    space at their ends left out. RequestError where it is not in the text."""
    if tokenizer is None:
        raise RequestError("the model folder has no tokenizer, which a text needs; copy tokenizer.json into it")
    if separator is not None and (not separator or separator not in text):
        raise RequestError(f"the separator {separator!r} is not in the text; without one it is a single document")
    parts = [part.strip() for part in text.split(separator)] if separator else [text]
    return tokenizer.opening, [tokenizer.encode(part, add_special_tokens=False) for part in parts if part]


def windows(prefix: Sequence[int], documents: Iterable[Sequence[int]], ctx: int, stride: int | None) -> list[Window]:
    """Cut documents by the protocol. `stride` None is as many tokens as a window has room for.

    Raises RequestError for sizes that do not fit, and when there is nothing to predict.
    """
    room = ctx - len(prefix)
    stride = room if stride is None else stride
    if room < 1 or ctx < 2 or not 1 <= stride <= room:
        raise RequestError(
            f"windows of {ctx} positions with {len(prefix)} special tokens, {stride} tokens apart: ctx must be at "
            f"least 2 and leave room, stride from 1 to {max(room, 1)}"
        )
    found = [window for ids in documents for window in _windows_of(prefix, ids, room, stride)]
    if not found:
        raise RequestError("the text has no token to predict; give a longer one")
    return found


def _windows_of(prefix: Sequence[int], ids: Sequence[int], room: int, stride: int) -> Iterator[Window]:
    done = 0
    for start in range(0, len(ids), stride):
        part = ids[start : start + room]
        first = max(len(prefix) + done - start, 1)
        if first < len(prefix) + len(part):
            yield Window([*prefix, *part], first)
        done = start + len(part)
        if done == len(ids):
            return


class Scores:
    """Sums over windows; of a window's logits nothing is kept but a few numbers per predicted token."""

    def __init__(self) -> None:
        self._windows: list[tuple[float, int]] = []  # negative log-likelihood and number of predicted tokens
        self._compared: list[Tensor] = []  # (tokens, 4): KL, same first choice, the right token's log-probabilities

    def add(self, window: Window, logits: Tensor, against: Tensor | None = None) -> None:
        """Enter a window's logits (len(ids), vocab), and those of the model to compare with."""
        if against is not None and against.shape != logits.shape:
            raise RequestError(
                f"the models give logits {list(logits.shape)} and {list(against.shape)}; only models of one "
                "vocabulary can be compared"
            )
        rows = slice(window.first - 1, len(window.ids) - 1)
        targets = torch.tensor(window.ids[window.first :], device=logits.device).unsqueeze(1)
        step = max(BLOCK_BYTES // (8 * logits.shape[1]), 1)
        ours = logits[rows].split(step)
        theirs = [None] * len(ours) if against is None else against[rows].to(logits.device).split(step)
        loss = 0.0
        for mine, other, right in zip(ours, theirs, targets.split(step), strict=True):
            log_q = mine.double().log_softmax(-1)
            right_q = log_q.gather(1, right)
            loss -= float(right_q.sum())
            if other is not None:
                log_p = other.double().log_softmax(-1)
                kl = (log_p.exp() * (log_p - log_q)).sum(-1, keepdim=True)
                same = log_p.argmax(-1, keepdim=True) == log_q.argmax(-1, keepdim=True)
                self._compared.append(torch.cat((kl, same, right_q, log_p.gather(1, right)), 1).float().cpu())
        self._windows.append((loss, len(targets)))

    def figures(self) -> dict[str, float]:
        """Perplexity with its standard error and, where there was something to compare with, how far from it.

        ppl_stderr      only where there are several windows to differ
        against_ppl     perplexity of the model compared with
        kl_*            KL divergence of the next-token distributions from those compared with, nats per token
        top1_agreement  share of tokens before which both rank the same token first
        p_change_*      of the right token's probability, mean and root mean square
        """
        losses, counts = torch.tensor(self._windows, dtype=torch.float64).unbind(1)
        mean, n = float(losses.sum() / counts.sum()), len(counts)
        spread = (losses - counts * mean).square().sum() * n / max(n - 1, 1)
        perplexity = float(torch.tensor(mean, dtype=torch.float64).exp())  # infinite where math.exp would raise
        result = {
            "ppl": perplexity,
            **({"ppl_stderr": perplexity * float(spread.sqrt() / counts.sum())} if n > 1 else {}),
            "tokens": int(counts.sum()),
            "windows": n,
        }
        if self._compared:
            kl, same, right_q, right_p = torch.cat(self._compared).double().unbind(1)
            change = right_q.exp() - right_p.exp()
            ordered = kl.sort().values
            ranks = {f"kl_p{p}": float(ordered[math.ceil(p / 100 * len(kl)) - 1]) for p in PERCENTILES}
            result["against_ppl"] = math.exp(-float(right_p.mean()))
            result |= {"kl_mean": float(kl.mean()), **ranks, "kl_max": float(ordered[-1])}
            result |= {"top1_agreement": float(same.mean()), "p_change_mean": float(change.mean())}
            result["p_change_rms"] = float(change.square().mean().sqrt())
        return result


def score(
    parts: Sequence[Window], model: Logits, against: Logits | None = None, progress: Callable[[int], Any] | None = None
) -> dict[str, float]:
    """`Scores.figures` of a model over windows. `progress` is called with the tokens predicted by each."""
    scores = Scores()
    for window in parts:
        scores.add(window, model(window.ids), None if against is None else against(window.ids))
        if progress is not None:
            progress(len(window.ids) - window.first)
    return scores.figures()


def check_same_tokens(model: LLM, against: LLM, text: str) -> None:
    """Raise RequestError where two models cut a text into different tokens."""
    sample = text[:10_000]
    if model.tokenizer and against.tokenizer and model.tokenizer.encode(sample) != against.tokenizer.encode(sample):
        raise RequestError(f"{model.folder} and {against.folder} tokenize the text differently, so they do not compare")
