"""`nibblelm convert`: a Hugging Face checkpoint to a folder of int4 / int8 weights."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibblelm.cli.options import add_device_argument, positive

if TYPE_CHECKING:
    from nibblelm.converter import ConvertReport, Progress

_LAYERS = 8

HELP = "quantize a Hugging Face checkpoint to int4 or int8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("src", metavar="SRC", help="model folder or hub id")
    parser.add_argument("dst", metavar="DST", help="folder to write")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4, help="bits per weight (default 4)")
    parser.add_argument(
        "--group-size",
        type=int,
        choices=(-1, 32, 64, 128),
        help="weights that share a scale; -1: one scale per row (default: 128 at 4 bits, -1 at 8)",
    )
    parser.add_argument("--symmetric", action="store_true", help="no zero-points")
    parser.add_argument(
        "--method",
        choices=("minmax", "mse", "gptq", "awq"),
        default="mse",
        help="how scales are chosen: the whole range, or the clip of least squared error (default); gptq and awq look "
        "at the activations of a calibration text",
    )
    parser.add_argument(
        "--rotate", action="store_true", help="spread outliers by random rotations folded into the matrices"
    )
    parser.add_argument(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="UTF-8 text for gptq and awq, documents separated by <|endoftext|> (default: bundled stories)",
    )
    parser.add_argument("--samples", type=positive, metavar="N", help="pieces of 512 tokens of it (128)")
    parser.add_argument("--seed", type=int, metavar="S", help="of the samples and the rotation (0)")
    add_device_argument(parser, "where gptq and awq compute")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="REGEX=BITS",
        help="send modules whose name matches to 4, 8 or 16 bits, as 4:32 in groups of 32; may be repeated, the last "
        "match wins",
    )
    parser.add_argument(
        "--keep-tied",
        action="store_true",
        help="keep one 16-bit table for embedding and head (default: a head of its own, int8 per row)",
    )
    parser.add_argument(
        "--embeddings", type=int, choices=(8, 4), help="quantize the embedding table (not for transformers)"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "fp32", "bf16", "fp16"),
        default="auto",
        help="of what is not quantized and of scales (default: the source's; tables of an fp32 source in bf16)",
    )
    parser.add_argument("--max-shard-size", default="4GB", metavar="SIZE", help="largest weight file (default 4GB)")
    parser.add_argument(
        "--target-kl",
        type=float,
        metavar="X",
        help="choose bits and groups: from int4 per row up, until the KL divergence from SRC is at most X nats a token",
    )
    parser.add_argument("--max-size", metavar="SIZE", help="with --target-kl: bytes that the tensors may take, as 4GB")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted conversion")
    parser.add_argument("--overwrite", action="store_true", help="replace a model folder at DST, once this one is done")
    parser.add_argument("--strict", action="store_true", help="refuse unknown keys in config.json")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: the cores it may use)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object, no progress bar")


def run(args: argparse.Namespace) -> int:
    from nibblelm.converter import convert

    with _progress_bar(not args.json and sys.stderr.isatty()) as progress:
        report = convert(
            args.src,
            args.dst,
            bits=args.bits,
            group_size=args.group_size,
            symmetric=args.symmetric,
            method=args.method,
            keep=args.keep,
            keep_tied=args.keep_tied,
            embeddings=args.embeddings,
            dtype=args.dtype,
            rotate=args.rotate,
            calibration=args.calibration,
            samples=args.samples,
            seed=args.seed,
            device=args.device,
            max_shard_size=args.max_shard_size,
            resume=args.resume,
            overwrite=args.overwrite,
            strict=args.strict,
            threads=args.threads,
            progress=progress,
            target_kl=args.target_kl,
            max_size=args.max_size,
        )
    if args.json:
        print(json.dumps(report.to_dict()))
    else:
        _print_report(report)
    return 0


@contextmanager
def _progress_bar(shown: bool) -> "Iterator[Progress | None]":
    """A bar of source bytes with speed and time left, on standard error."""
    if not shown:
        yield None
        return
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, file=sys.stderr, dynamic_ncols=True, leave=False) as bar:

        def progress(done: int, total: int, name: str) -> None:
            bar.total = total
            bar.set_postfix_str(name, refresh=False)
            bar.update(done - bar.n)

        yield progress


def _print_report(report: "ConvertReport") -> None:
    """The report in words, on standard error: a conversion has no text to give."""

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    for note in report.notes:
        say(f"note: {note}")
    if report.target is not None:
        _print_target(report.target)
    if report.reused_tensors:
        say(f"resumed: {report.reused_tensors} tensors were finished already")
    if report.tensors:
        layers = report.worst_per_layer()
        say(f"largest relative error of each layer (the worst {min(len(layers), _LAYERS)} of {len(layers)}):")
        for tensor in layers[:_LAYERS]:
            grouping = "per row" if tensor.group_size == -1 else f"groups of {tensor.group_size}"
            say(f"  {tensor.relative_error:.4f}  {tensor.module}  (int{tensor.bits}, {grouping})")
    say(
        f"{report.dst}: {report.parameters / 1e6:.1f} M parameters, {report.bits_per_weight:.2f} bits per weight "
        f"({report.quantized_bits_per_weight:.2f} in the quantized matrices), "
        f"{report.source_bytes / 1e6:.1f} MB -> {report.output_bytes / 1e6:.1f} MB in {report.seconds:.1f} s"
    )


def _print_target(target: dict[str, Any]) -> None:
    def say(text: str) -> None:
        print(text, file=sys.stderr)

    for scheme, modules in target["promoted"].items():
        say(f"promoted to {scheme}: {', '.join(modules)}")
    reached = "reached" if target["reached"] else "NOT reached, this is the best"
    within = "" if target["max_size"] is None else f" within {target['max_size'] / 1e6:.1f} MB"
    say(
        f"KL divergence {target['kl']:.6f} on {target['tokens']} tokens kept for it; {target['target_kl']:g} was asked "
        f"for{within}: {reached}"
    )
    say(
        f"a decoded token reads {target['bytes_ratio']:.3f} times the matrices of int4 per row, and takes about as long"
    )
