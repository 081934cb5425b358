"""Stories and books: reading, augmenting, tokenizing, packing into rows."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor

STORIES = "tinystories_sample_2MiB.txt"
BOOKS = (
    "alice_11-0.txt",
    "wizard_of_oz_llmatoz.txt",
    "war_and_peace_2600-0.txt",
    "tinyshakespeare_input.txt",
)
BOS, EOS = 0, 1  # ids of <s> and </s>
GIRLS = (
    "Lily Anna Sara Mia Lucy Jane Sarah Molly Lila Sue Sally Jill Mary Amy Jen Emma Jenny Susie Emily Bella "
    "Lisa Cindy Lola Rosie Mandy Kate Ella"
).split()
BOYS = (
    "Ben Tom Tim Timmy Jack Sam John Joe Bob Tommy Jimmy Billy Benny Andy Jake Jim Henry Sammy Danny James Peter "
    "Bobby Alex Frank Johnny Mike Fred"
).split()


def clean(text: str) -> str:
    """Plain quotes and dashes: the stories mix both kinds, and a small model should not have to learn two."""
    return text.translate(str.maketrans({"“": '"', "”": '"', "’": "'", "‘": "'", "–": "-", "…": "..."}))


def read_stories(path: Path) -> tuple[list[str], list[str]]:
    """Return (training stories, held-out stories): the last 5 % of the file is held out."""
    stories = [s.strip() for s in clean(path.read_text(encoding="utf-8")).split("<|endoftext|>")]
    stories = [s for s in stories if s]
    held = len(stories) * 5 // 100
    return stories[:-held], stories[-held:]


def read_book(path: Path) -> str:
    """Return a book without Gutenberg header and licence, its hard-wrapped lines joined into paragraphs."""
    text = path.read_text(encoding="utf-8-sig").replace("\r\n", "\n")
    if start := re.search(r"\*\*\* ?START OF TH.*?\*\*\*\n", text):
        text = re.split(r"End of (?:the )?Project Gutenberg|\*\*\* ?END OF TH", text[start.end() :])[0]
    if "llmatoz" in path.name:  # cut into overlapping JSON strings: drop their borders and the text each repeats
        text = re.sub(r'",\s*\n\s*"', "\n", text)
        text = re.sub(r"(.{20,300}?)\n?\1", r"\1", text, flags=re.S)
    if "shakespeare" not in path.name:  # verse keeps its lines
        text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
    return re.sub(r"\n{2,}", "\n", re.sub(r"[ \t]{2,}", " ", clean(text))).strip()


class NameSwapper:
    """Gives a story's characters other names of the same gender, drawn by how often the stories use them.

    Which name a hero bears says nothing about what happens next; without this the model learns Lily's stories apart
    from Sue's. Drawing by frequency keeps the distribution of names as it is.
    """

    def __init__(self, stories: list[str]) -> None:
        counts = Counter(re.findall(r"\b[A-Z][a-z]+\b", "\n".join(stories)))
        self.groups = []
        for names in (GIRLS, BOYS):
            weights = np.array([counts[n] + 1.0 for n in names])
            self.groups.append((names, weights / weights.sum()))
        self.pattern = re.compile(r"\b(" + "|".join(GIRLS + BOYS) + r")\b")

    def __call__(self, story: str, rng: np.random.Generator) -> str:
        present = set(self.pattern.findall(story))
        mapping: dict[str, str] = {}
        for names, weights in self.groups:
            old = [n for n in names if n in present]
            if old:
                mapping |= dict(zip(old, rng.choice(names, len(old), replace=False, p=weights), strict=True))
        return self.pattern.sub(lambda m: mapping[m[0]], story)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE; encoding a text puts <s> before it, and nothing ever puts </s>."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    tok.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]),
        ]
    )
    return tok


def encode(tok: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Return one int16 array <s> text </s> per story."""
    return [np.array([*e.ids, EOS], np.int16) for e in tok.encode_batch(texts)]


def pack(docs: list[np.ndarray], length: int, rng: np.random.Generator) -> Tensor:
    """Concatenate the documents in random order and cut the stream, at a random offset, into int16 [rows, length + 1]
    (one token of overlap: the last input's target)."""
    stream = np.concatenate([docs[i] for i in rng.permutation(len(docs))])
    stream = np.roll(stream, int(rng.integers(len(stream))))
    rows = (len(stream) - 1) // length
    index = np.arange(rows)[:, None] * length + np.arange(length + 1)
    return torch.from_numpy(stream[index])


@dataclass
class Corpus:
    """Everything the runs read: rows are int16 [*, context + 1] on the training device."""

    tok: Tokenizer
    train: list[str]
    held_out: list[str]
    epochs: list[Tensor]  # each a differently augmented, differently packed pass over the training stories
    books: Tensor
    held_rows: Tensor  # one story per row, padded with EOS; int64 [stories, context + 1]
    held_lengths: Tensor  # number of predicted tokens per row, int64 [stories]
    held_bytes: int


def build_corpus(
    data: Path, vocab_size: int, context: int, passes: int, device: torch.device, limit: int | None = None
) -> Corpus:
    """Read, clean, tokenize and pack. Half of the stories of every pass get new names, and every other pass is cut by
    BPE-dropout (10 % of the merges left out). `limit` keeps that many stories and a page of each book."""
    rng = np.random.default_rng(0)
    train, held_out = read_stories(data / "text" / STORIES)
    books = [read_book(data / "text" / name) for name in BOOKS]
    if limit:
        train, held_out, books = train[:limit], held_out[:limit], [book[:20000] for book in books]
    tok = train_tokenizer(train + books, vocab_size)
    swap = NameSwapper(train)
    epochs = []
    for i in range(passes):
        texts = [swap(s, rng) if rng.random() < 0.5 else s for s in train]
        tok.model.dropout = 0.1 if i % 2 else None
        epochs.append(pack(encode(tok, texts), context, rng).to(device))
    tok.model.dropout = None
    book_ids = [np.array(tok.encode(b, add_special_tokens=False).ids, np.int16) for b in books]
    held = [ids[: context + 1] for ids in encode(tok, held_out)]
    held_rows = np.full((len(held), context + 1), EOS, np.int64)
    for row, ids in zip(held_rows, held, strict=True):
        row[: len(ids)] = ids
    return Corpus(
        tok=tok,
        train=train,
        held_out=held_out,
        epochs=epochs,
        books=pack(book_ids, context, rng).to(device),
        held_rows=torch.from_numpy(held_rows).to(device),
        held_lengths=torch.tensor([len(ids) - 1 for ids in held], device=device),
        held_bytes=sum(len(tok.decode(ids.tolist()).encode()) for ids in held),
    )
