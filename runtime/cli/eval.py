"""`nibblelm eval`: perplexity of a text, and the distance from the model that a folder was made from."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from nibblelm.cli.options import (
    add_activations_argument,
    add_device_argument,
    add_kv_argument,
    add_model_argument,
    positive,
    shown_perplexity,
    text_of,
)

HELP = "measure perplexity, and how far a converted model is from its source"
_CTX = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--text", required=True, type=Path, metavar="FILE", help="UTF-8 text to predict")
    parser.add_argument(
        "--against",
        metavar="SOURCE",
        help="model to compare with; it runs with fp32 activations. MODEL itself shows what 8-bit activations and --kv "
        "int8 cost: it runs as MODEL does, but for 16 bits and the cache that --dtype has",
    )
    parser.add_argument("--ctx", type=positive, default=_CTX, metavar="N", help=f"positions of a window ({_CTX})")
    parser.add_argument("--stride", type=positive, metavar="N", help="tokens between windows (default: no overlap)")
    parser.add_argument("--separator", metavar="TEXT", help="what stands between documents (default: one document)")
    add_device_argument(parser)
    parser.add_argument(
        "--dtype",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="activations, as generate has them; fp32 measures the weights alone",
    )
    add_activations_argument(parser)
    add_kv_argument(parser)
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: the cores it may use)")
    parser.add_argument("--record", action="store_true", help="enter the figures in MODEL's nibblelm.json, for info")
    parser.add_argument("--json", action="store_true", help="print one JSON object, no progress bar")


def run(args: argparse.Namespace) -> int:
    figures, record = _measure(args)
    print(json.dumps(figures)) if args.json else _print(args, figures)
    if args.record:
        record()
    return 0


def _print(args: argparse.Namespace, figures: dict[str, Any]) -> None:
    p = figures["protocol"]
    start = "each after BOS" if p["bos"] else "without BOS"
    print(
        f"{args.model} on {args.text}, {p['device']}, dtype {p['dtype']}, activations {p['activations']} bits, "
        f"kv {p['kv']}"
    )
    print(
        f"protocol         windows of {p['ctx']} positions {p['stride']} tokens apart, {start}: {figures['windows']} "
        f"windows of {p['documents']} documents, {figures['tokens']} tokens predicted"
    )
    print(f"perplexity       {shown_perplexity(figures)}")
    if args.against:
        bits = p["against_activations"]
        print(f"against          {args.against}, activations {bits} bits, perplexity {figures['against_ppl']:.4f}")
        ranks = ", ".join(f"{rank[4:]} % {figures[rank]:.3g}" for rank in ("kl_p50", "kl_p90", "kl_p99"))
        print(f"KL divergence    mean {figures['kl_mean']:.3g} nats ({ranks}, most {figures['kl_max']:.3g})")
        print(f"same first       {100 * figures['top1_agreement']:.2f} % of tokens")
        print(
            f"right token      probability changes by {100 * figures['p_change_mean']:+.3f} % on average, "
            f"{100 * figures['p_change_rms']:.3f} % root mean square"
        )


def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], Callable[[], None]]:
    """The figures and their protocol as plain values, and what enters them in the model's folder."""
    from tqdm import tqdm

    from nibblelm.checkpoint import open_checkpoint
    from nibblelm.engine import LLM
    from nibblelm.evaluation import check_same_tokens, score, tokenize, windows

    text = text_of(args.text.read_bytes(), str(args.text))
    if args.record:
        _recordable(open_checkpoint(args.model).folder)
    options = {"kv": args.kv, "activations": args.activations}
    model = LLM(args.model, args.device, args.dtype, args.threads, args.ctx, **options)
    against, rounding = None, False
    if args.against:
        rounds = model.activations == 8 or args.kv == "int8"
        rounding = rounds and open_checkpoint(args.against).folder.samefile(model.folder)
        dtype = args.dtype if rounding else "fp32"
        activations = (16 if model.activations == 8 else args.activations) if rounding else None
        against = LLM(args.against, args.device, dtype, args.threads, args.ctx, activations=activations)
        check_same_tokens(model, against, text)
    prefix, documents = tokenize(model.tokenizer, text, args.separator)
    parts = windows(prefix, documents, args.ctx, args.stride)
    shown = not args.json and sys.stderr.isatty()
    total = sum(len(window.ids) - window.first for window in parts)
    with tqdm(total=total, unit="tok", file=sys.stderr, leave=False, disable=not shown) as bar:
        figures = score(parts, model.logits, against.logits if against else None, bar.update)
    protocol = {
        "ctx": args.ctx,
        "stride": args.stride or args.ctx - len(prefix),
        "bos": bool(prefix),
        "documents": len(documents),
        "device": model.device.type,
        "dtype": args.dtype,
        "activations": model.activations,
        "kv": args.kv,
    }
    if against is not None:
        protocol["against_activations"] = against.activations
    names = {"model": args.model, "text": str(args.text), "against": args.against}
    kind = "activation_rounding" if rounding and args.kv == "auto" else "evaluations"
    entry = {"against": args.against, "protocol": protocol, **figures}
    record = partial(_record, model.folder, kind, args.text.name, entry)
    return {**names, "protocol": protocol, **figures}, record


def _recordable(folder: Path) -> Path:
    """The folder's nibblelm.json. Raises RequestError where there is none that can be written."""
    from nibblelm.errors import RequestError

    path = folder / "nibblelm.json"
    if not path.is_file():
        raise RequestError(f"{folder} has no nibblelm.json to record in: only folders of nibblelm convert have one")
    if not os.access(folder, os.W_OK):  # a new file takes its place
        raise RequestError(f"{folder} cannot be written to; leave out --record, or copy the folder")
    return path


def _record(folder: Path, kind: str, text: str, figures: dict[str, Any]) -> None:
    """Enter figures in a converted folder's nibblelm.json, where `info` finds them; the last of kind and text stays."""
    from nibblelm.checkpoint.json_object import read_object
    from nibblelm.checkpoint.writer import write_json
    from nibblelm.errors import RequestError

    path = _recordable(folder)
    record = read_object(path, RequestError)
    write_json(path, {**record, kind: {**record.get(kind, {}), text: figures}})
