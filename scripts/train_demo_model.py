"""Train the bundled demo checkpoint: a 7 M-parameter Llama that tells short stories.

    python scripts/train_demo_model.py --data ../shared/data --out demo/stories-7m

`--data` is a folder whose `text/` holds tinystories_sample_2MiB.txt and the four books named in demo_model/corpus.py.
Only 2 MB of stories exist, so a model of this size memorizes them long before it writes well. The recipe:

1. Several teachers of the same architecture are trained on the stories, with books mixed in at first and annealed
   away, under dropout, strong weight decay, character-name swapping and BPE-dropout; each keeps its best
   checkpoint on the held-out stories (the last 5 %).
2. The teachers write new stories, and their averaged distribution labels those and the real ones. An ensemble
   over-fits less than its members, and text that nobody has memorized can carry what it knows.
3. The student, which is what is saved, learns those soft labels.

One NVIDIA H200 takes about five minutes. `--smoke` runs every stage with toy sizes on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import torch
from demo_model.corpus import BOS, EOS, Corpus, build_corpus
from demo_model.distillation import train_student, train_teachers
from demo_model.llama import Llama, Shape, quantized, story_mask
from demo_model.training import Recipe, held_out_loss
from safetensors.torch import save_file
from tokenizers import Tokenizer

# Chosen by reading stories: a lower temperature repeats itself, a higher one loses the thread.
SAMPLING = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 0,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
}

CARD = """---
license: apache-2.0
language: en
pipeline_tag: text-generation
---
# stories-7m

A Llama-architecture model of {params:.1f} M parameters ({num_hidden_layers} layers, hidden {hidden_size},
{num_attention_heads} query and {num_key_value_heads} key/value heads of {head_dim}, feed-forward {intermediate_size},
vocabulary {vocab_size}, context {max_position_embeddings}, tied embeddings) that tells short children's stories in
English. It exists so that a clone of the project has a real model to convert and run; it knows nothing but such
stories. Prompts start from `<s>`, a story ends with `</s>`. "Once upon a time" is a good prompt.

## Training data
- 2 MiB of [TinyStories](https://huggingface.co/datasets/roneneldan/TinyStories) (Eldan and Li, 2023), under
  CDLA-Sharing-1.0, which leaves results of using the data, such as these weights, free of it: {train} stories; the
  last {held} of the sample (5 %) are held out.
- As pretraining mix only: *Alice's Adventures in Wonderland*, *The Wonderful Wizard of Oz* with the passages found in
  the same file, *War and Peace* (Maude translation) and the "tiny Shakespeare" selection of his plays, all in the
  public domain; Project Gutenberg's headers and licence text were cut.

## Recipe
`scripts/train_demo_model.py`, one NVIDIA H200, {minutes:.1f} minutes:

    python scripts/train_demo_model.py --data ../shared/data --out demo/stories-7m

Byte-level BPE trained on the same text. {teachers} teachers of this architecture ({epochs:g} passes over the stories on
average, books annealed away, Muon and AdamW, weight decay {recipe.weight_decay:g}, dropout {recipe.dropout:g}, half of
the stories with other character names, BPE-dropout on every other pass; the best checkpoint by held-out loss). They
wrote {stories} stories from `<s>`; the student learned their averaged distribution on those and on the real stories.

## Held-out results
The {held} held-out stories, each from `<s>`, cut at {max_position_embeddings} tokens, `</s>` counted. They chose the
checkpoints and the recipe, so expect slightly worse on other stories of this kind.

| weights | perplexity per token | bits per byte |
|---|---|---|
{rows}

int4: round-to-nearest with zero-points in groups of 128, output table int8 per row. The best teacher alone: perplexity
{teacher:.3f}.

## Chat
`chat_template.jinja` tells a story on request: "a dog who lost his ball", or "Tell me a story about a dog who lost his
ball", starts one with "Once upon a time, there was a dog who lost his ball."; a text that starts with a capital letter
is the story's own beginning. Every request is a new story.

## Limits
Its sentences are grammatical and simple, its plots often inconsistent: it forgets who did what and repeats itself. The
sampling defaults in generation_config.json were chosen by reading its stories.

## Licence
The weights are licensed under Apache-2.0.
"""


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def save(model: Llama, tok: Tokenizer, out: Path) -> None:
    """Write a Hugging Face folder: bf16 weights, config, tokenizer and sampling defaults."""
    out.mkdir(parents=True, exist_ok=True)
    state = {f"model.{k}": v.bfloat16().cpu().contiguous() for k, v in model.state_dict().items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **vars(model.s),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "bfloat16",
    }
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, **SAMPLING})
    tok.save(str(out / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "clean_up_tokenization_spaces": False}
    length = {"model_max_length": model.s.max_position_embeddings}
    write_json(out / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **names, **length})


@torch.no_grad()
def check_with_transformers(model: Llama, tok: Tokenizer, out: Path, text: str) -> float:
    """Open the folder with transformers; return the relative L2 distance of its float32 logits from `model`'s.

    `model` must hold the saved (bf16-rounded) weights, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(out)(text, return_tensors="pt").input_ids
    assert ids[0].tolist() == tok.encode(text).ids, "transformers cuts the text differently"
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()(ids).logits
    error = float((model(ids, story_mask(ids)) - theirs).norm() / theirs.norm())
    assert error < 1e-4, f"transformers' logits differ by {error:.1e} relative"
    return error


def tell(rounded: Llama, out: Path, count: int) -> list[str]:
    """Stories by the weights of `rounded` (on the CPU) with the saved sampling defaults, drawn by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tok = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    model.load_state_dict({f"model.{k}": v for k, v in rounded.state_dict().items()}, strict=False)
    assert rounded.head is not None
    model.lm_head.weight = torch.nn.Parameter(rounded.head)  # untied: rows in int8
    prompt = tok(["Once upon a time"] * count, return_tensors="pt")
    torch.manual_seed(0)
    limit = rounded.s.max_position_embeddings - prompt.input_ids.shape[1]
    mask = prompt.attention_mask
    stories = model.generate(prompt.input_ids, attention_mask=mask, max_new_tokens=limit)  # pyright: ignore
    return tok.batch_decode(stories, skip_special_tokens=True)


def evaluate(model: Llama, corpus: Corpus) -> str:
    """Held-out perplexity per token and bits per byte, as cells of the card's table."""
    loss = held_out_loss(model, corpus)
    bits = loss * int(corpus.held_lengths.sum()) / corpus.held_bytes / math.log(2)
    return f"{math.exp(loss):.3f} | {bits:.4f}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with text/")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    parser.add_argument("--teachers", type=int, default=6)
    parser.add_argument("--stories", type=int, default=24576, help="stories the teachers write")
    parser.add_argument(
        "--epochs", type=float, default=20, help="teachers' mean number of passes over the real stories"
    )
    parser.add_argument("--student-epochs", type=float, default=4, help="student's passes over what was labelled")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="toy sizes, to try every stage on a CPU")
    return parser.parse_args()


def main() -> None:
    args, began = arguments(), time.time()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    shape, teaching = Shape(), Recipe(seed=args.seed, epochs=args.epochs)
    learning = Recipe(seed=args.seed + 100, epochs=args.student_epochs, dropout=0.05, weight_decay=0.5)
    passes, limit, real = 12, None, 8
    if args.smoke:
        shape = replace(shape, num_hidden_layers=2, hidden_size=128, intermediate_size=256, max_position_embeddings=128)
        teaching, learning = (replace(r, epochs=0.5, batch_rows=4) for r in (teaching, learning))
        passes, limit, real, args.teachers, args.stories = 2, 60, 1, 2, 20
    corpus = build_corpus(args.data, shape.vocab_size, shape.max_position_embeddings, passes, device, limit)
    million = [sum(x.numel() for x in rows) / 1e6 for rows in (corpus.epochs[0], corpus.books)]
    print(f"{len(corpus.train)} stories of {million[0]:.2f} M tokens, {len(corpus.held_out)} held out, ", end="")
    print(f"books {million[1]:.2f} M, {time.time() - began:.1f} s", flush=True)

    teachers = train_teachers(shape, teaching, args.teachers, corpus)
    student = train_student(shape, learning, teachers, corpus, args.stories, real)
    final = Llama(shape).eval()
    final.load_state_dict({k: v.bfloat16().float() for k, v in student.state_dict().items()})
    save(final, corpus.tok, args.out)
    error = check_with_transformers(final, corpus.tok, args.out, corpus.held_out[0][:300])
    print(f"transformers opens the folder and agrees within {error:.1e}")

    final = final.to(device)
    rounded = quantized(final)
    lines = [f"| bf16, as saved | {evaluate(final, corpus)} |", f"| int4 | {evaluate(rounded, corpus)} |"]
    print("\n".join([*lines, f"| best teacher | {evaluate(teachers[0], corpus)} |"]))
    card = CARD.format(
        **vars(shape),
        **vars(args),
        params=sum(p.numel() for p in final.parameters()) / 1e6,
        train=len(corpus.train),
        held=len(corpus.held_out),
        minutes=(time.time() - began) / 60,
        recipe=teaching,
        rows="\n".join(lines),
        teacher=math.exp(held_out_loss(teachers[0], corpus)),
    )
    (args.out / "README.md").write_text(card)
    for file in args.out.iterdir():  # save_file makes its file private
        file.chmod(0o644)
    print("\n---\n".join(tell(rounded.cpu(), args.out, 10)))
    print(f"{time.time() - began:.0f} s in all")


if __name__ == "__main__":
    main()
