"""One training run: Muon and AdamW on packed rows, keeping the weights that do best on held-out stories."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from demo_model.corpus import Corpus
from demo_model.llama import Llama, Shape, autocast, story_mask


@dataclass(frozen=True)
class Recipe:
    """One training run. Learning rates are peaks; `weight_decay` is decoupled and multiplies the learning rate."""

    seed: int = 0
    epochs: float = 20.0  # passes over the stories
    batch_rows: int = 32  # rows of max_position_embeddings tokens per step
    matrix_lr: float = 4e-3
    table_lr: float = 4e-3
    weight_decay: float = 1.5
    dropout: float = 0.25
    book_share: float = 0.6  # of the first batch; falls linearly to 0 at 90 % of the steps


def orthogonalize(g: Tensor) -> Tensor:
    """Replace each matrix of g [count, rows, columns] by roughly the nearest orthogonal one (Newton-Schulz, five steps;
    coefficients of Jordan et al., "Muon", 2024)."""
    x = g.bfloat16()
    if tall := x.shape[1] > x.shape[2]:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).float()


class Muon:
    """Momentum with orthogonalized updates, for the layers' matrices. With little data and many passes it generalizes
    better than Adam. Matrices of one shape are updated as one batch."""

    def __init__(self, matrices: list[nn.Parameter]) -> None:
        shapes = sorted({tuple(p.shape) for p in matrices})
        self.groups = [[p for p in matrices if tuple(p.shape) == s] for s in shapes]
        self.momenta = [torch.zeros(len(g), *g[0].shape, device=g[0].device) for g in self.groups]

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float, momentum: float = 0.95) -> None:
        for group, m in zip(self.groups, self.momenta, strict=True):
            g = torch.stack([p.grad for p in group if p.grad is not None])
            m.lerp_(g, 1 - momentum)
            update = orthogonalize(g.lerp(m, momentum))
            # 0.2 sqrt(larger side) gives the update the root mean square that Adam's has
            rate = lr * 0.2 * math.sqrt(max(m.shape[1:]))
            for p, u in zip(group, update.unbind(), strict=True):
                p.mul_(1 - lr * weight_decay).sub_(u, alpha=rate)


@torch.no_grad()
def held_out_loss(model: Llama, corpus: Corpus) -> float:
    """Mean negative log-likelihood per token (nats, </s> included) of the held-out stories, each from <s>."""
    model.eval()
    total = 0.0
    for rows, lengths in zip(corpus.held_rows.chunk(5), corpus.held_lengths.chunk(5), strict=True):
        logits = model(rows[:, :-1], story_mask(rows[:, :-1]))
        nll = F.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:], reduction="none")
        valid = torch.arange(nll.shape[1], device=rows.device) < lengths[:, None]
        total += float((nll * valid).sum())
    return total / int(corpus.held_lengths.sum())


Batch = tuple[Tensor, Callable[[Tensor], Tensor]]  # int64 [rows, context] and the loss of its logits


def story_batches(corpus: Corpus, r: Recipe) -> tuple[int, Iterator[Batch]]:
    """(steps, batches) of stories and, early on, books, with the next token as label."""
    gen = torch.Generator().manual_seed(r.seed)
    whole = [corpus.epochs[(i + r.seed) % len(corpus.epochs)] for i in range(math.ceil(r.epochs))]
    stories = torch.cat([e[torch.randperm(len(e), generator=gen).to(e.device)] for e in whole])
    stories = stories[: int(len(stories) * r.epochs / len(whole))]
    books = corpus.books[torch.randperm(len(corpus.books), generator=gen).to(corpus.books.device)]
    steps = max(1, int(len(stories) / (r.batch_rows * (1 - 0.45 * r.book_share))))

    def batches() -> Iterator[Batch]:
        s = b = 0
        for step in range(steps):
            from_books = round(r.batch_rows * r.book_share * max(0.0, 1 - step / steps / 0.9))
            take = [torch.arange(s, s + r.batch_rows - from_books), torch.arange(b, b + from_books)]
            s, b = s + len(take[0]), b + len(take[1])
            rows = torch.cat([x[i.to(x.device) % len(x)] for x, i in zip((stories, books), take, strict=True)]).long()
            yield rows[:, :-1], lambda logits, y=rows[:, 1:]: F.cross_entropy(logits.float().flatten(0, 1), y.flatten())

    return steps, batches()


def build(shape: Shape, r: Recipe, device: torch.device) -> Llama:
    torch.manual_seed(r.seed)
    model = Llama(shape, r.dropout).to(device)
    if device.type == "cuda":
        for layer in model.layers:
            layer.compile(dynamic=False)
    return model


def train(model: Llama, r: Recipe, steps: int, batches: Iterator[Batch], corpus: Corpus, label: str) -> float:
    """Train in place and leave the weights that did best on the held-out stories; return their loss."""
    tables = [p for n, p in model.named_parameters() if p.ndim == 1 or "embed" in n]
    muon = Muon([p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n])
    device = corpus.held_rows.device
    adam = torch.optim.AdamW(tables, betas=(0.9, 0.98), weight_decay=0.01, fused=device.type == "cuda")
    best, best_state, began = math.inf, {}, time.time()
    check = max(1, steps // 20)
    for step, (ids, loss_of) in enumerate(batches):
        model.train()
        now = (step + 1) / steps
        rate = min(1.0, now / 0.04, (1 - step / steps) / 0.7)  # warm up, hold, fall linearly to zero
        with autocast(device):
            loss = loss_of(model(ids, story_mask(ids)))
        loss.backward()
        for group in adam.param_groups:
            group["lr"] = r.table_lr * rate
        nn.utils.clip_grad_norm_(tables, 1.0)
        adam.step()
        muon.step(r.matrix_lr * rate, r.weight_decay)
        model.zero_grad(set_to_none=True)
        if (step + 1) % check == 0 or step + 1 == steps:
            held = held_out_loss(model, corpus)
            if held < best:
                best, best_state = held, {k: v.clone() for k, v in model.state_dict().items()}
            if (step + 1) % (4 * check) == 0:
                print(f"  {label} step {step + 1}/{steps} loss {loss.item():.3f} held-out {held:.4f}", flush=True)
    model.load_state_dict(best_state)
    model.eval()
    print(f"{label}: held-out {best:.4f} (last {held:.4f}), {time.time() - began:.1f} s", flush=True)
    return best
