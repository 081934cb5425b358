"""Teachers, the stories they write, and the student that learns their averaged distribution."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from demo_model.corpus import Corpus, pack
from demo_model.llama import Llama, Shape, autocast, sample, story_mask
from demo_model.training import Batch, Recipe, build, story_batches, train


@dataclass
class Labelled:
    """Rows and, for each of their predicted tokens, the teachers' `k` likeliest tokens."""

    rows: Tensor  # int16 [rows, context + 1]
    top: Tensor  # int16 [rows, context, k]
    probs: Tensor  # bfloat16 [rows, context, k], summing to 1


@torch.no_grad()
def label_rows(teachers: list[Llama], rows: Tensor, k: int = 64) -> Labelled:
    """Average the teachers' distributions over every position of rows."""
    rows = rows[: max(1, len(rows) // 32 * 32)]  # full batches only: one compiled shape
    tops, probs = [], []
    for part in rows.split(32):
        ids = part[:, :-1].long()
        mask = story_mask(ids)
        mean = torch.zeros((), device=rows.device)
        for teacher in teachers:
            with autocast(rows.device):
                mean = mean + teacher(ids, mask).float().softmax(-1) / len(teachers)
        p, top = mean.topk(k, sorted=False)
        tops.append(top.short())
        probs.append((p / p.sum(-1, keepdim=True)).bfloat16())
    return Labelled(rows, torch.cat(tops), torch.cat(probs))


def label_batches(data: Labelled, r: Recipe) -> tuple[int, Iterator[Batch]]:
    """(steps, batches) over `epochs` passes, with the teachers' distribution as label."""
    gen = torch.Generator().manual_seed(r.seed)
    order = torch.cat([torch.randperm(len(data.rows), generator=gen) for _ in range(math.ceil(r.epochs))])
    order = order[: int(len(data.rows) * r.epochs)].to(data.rows.device)
    steps = max(1, len(order) // r.batch_rows)

    def batches() -> Iterator[Batch]:
        for step in range(steps):
            i = order[step * r.batch_rows : (step + 1) * r.batch_rows]
            top, probs = data.top[i].long(), data.probs[i].float()

            def loss_of(logits: Tensor, top: Tensor = top, probs: Tensor = probs) -> Tensor:
                return -(logits.float().log_softmax(-1).gather(-1, top) * probs).sum(-1).mean()

            yield data.rows[i][:, :-1].long(), loss_of

    return steps, batches()


def train_teachers(shape: Shape, recipe: Recipe, count: int, corpus: Corpus) -> list[Llama]:
    """Return `count` teachers, best first. They alternate between fewer and more passes over the stories: the best
    number is not known beforehand, and members that differ make a better ensemble."""
    teachers = []
    for i in range(count):
        r = replace(recipe, seed=recipe.seed + i, epochs=recipe.epochs * (0.8, 1.2)[i % 2])
        model = build(shape, r, corpus.held_rows.device)
        teachers.append((train(model, r, *story_batches(corpus, r), corpus, f"teacher {i}"), i, model))
    return [model for _, _, model in sorted(teachers)]


def write_stories(teachers: list[Llama], count: int, seed: int) -> list[np.ndarray]:
    """Let the teachers write `count` stories in turn, a little closer to their likeliest words than they speak."""
    gen = torch.Generator(teachers[0].cos.device).manual_seed(seed)
    sizes = [min(8192, count - done) for done in range(0, count, 8192)]
    return [s for i, n in enumerate(sizes) for s in sample(teachers[i % len(teachers)], n, gen, 0.9)]


def train_student(
    shape: Shape, recipe: Recipe, teachers: list[Llama], corpus: Corpus, stories: int, real: int
) -> Llama:
    """Learn the teachers' labels of `stories` stories that they write and of `real` passes over the real ones.

    One student starts from the best teacher and one from nothing; the better one on the held-out stories is returned.
    """
    began, context = time.time(), shape.max_position_embeddings
    device = corpus.held_rows.device
    written = pack(write_stories(teachers, stories, recipe.seed), context, np.random.default_rng(recipe.seed))
    rows = torch.cat([written.to(device), *corpus.epochs[:real]])
    print(f"teachers wrote {written.numel() / 1e6:.2f} M tokens, {time.time() - began:.1f} s", flush=True)
    data = label_rows(teachers, rows)
    print(f"labelled {rows.numel() / 1e6:.2f} M tokens, {time.time() - began:.1f} s", flush=True)
    students = []
    for i, start in enumerate((teachers[0], None)):
        model = build(shape, recipe, device)
        if start is not None:
            model.load_state_dict(start.state_dict())
        loss = train(model, recipe, *label_batches(data, recipe), corpus, f"student {i}")
        students.append((loss, i, model))
    return min(students)[2]
