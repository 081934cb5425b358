"""`nibblelm bench`: prefill and decode speed of a model or of a published shape with random weights."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from nibblelm.cli import bench_serve
from nibblelm.cli.options import (
    add_activations_argument,
    add_device_argument,
    add_kv_argument,
    add_kv_memory_argument,
    add_speculate_argument,
    keep_loaded,
    number,
    positive,
)

if TYPE_CHECKING:
    from nibblelm.benchmark import Load
    from nibblelm.runner import Runner

HELP = "measure prefill and decode speed, or a server under load"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parts = parser.add_subparsers(dest="part", metavar="[serve]")
    serve = parts.add_parser("serve", help=bench_serve.HELP, description=bench_serve.HELP)
    bench_serve.add_arguments(serve)
    serve.add_argument("--debug", action="store_true", help="show the traceback of a failure")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-m", "--model", metavar="PATH|HUB_ID", help="model folder or hub id")
    source.add_argument(
        "--shape", metavar="NAME", help="llama-3-8b, llama-3.2-1b, tinyllama-1.1b, ...; an unknown name lists all"
    )
    parser.add_argument("--random-weights", action="store_true", help="what --shape uses; needs no checkpoint")
    parser.add_argument("--bits", type=int, choices=(4, 8, 16), help="weights of --shape, 4 if not given")
    parser.add_argument("--group-size", type=int, choices=(-1, 32, 64, 128), help="of --shape; -1, per row")
    add_device_argument(parser)
    parser.add_argument("--dtype", choices=("auto", "fp32", "bf16"), default="auto")
    add_activations_argument(parser)
    add_kv_argument(parser)
    parser.add_argument("--threads", type=positive, metavar="N")
    add_kv_memory_argument(parser)
    loads = parser.add_argument_group("load", "several values measure several loads of one model; short lists repeat")
    for flag, default, text in (
        ("--prompt-tokens", None, "512, or what the context has room for"),
        ("--gen-tokens", None, "128, or what the context has room for"),
        ("--batch", 1, "sequences"),
        ("--depth", 0, "tokens in the cache before the prompt"),
    ):
        loads.add_argument(flag, type=int, nargs="+", default=[default], metavar="N", help=text)
    loads.add_argument(
        "--ctx-size", type=positive, metavar="N", help="room for so many tokens a sequence (default: what a load takes)"
    )
    loads.add_argument(
        "--mixed", action="store_true", help="also 256 requests at once, of 64 to 1,024 and 64 to 512 tokens (seed 0)"
    )
    add_speculate_argument(parser, "measure loads without and with drafts from a first run's text")
    parser.add_argument(
        "--acceptance",
        type=number(float, "0 to 1", lambda value: 0 <= value <= 1),
        nargs="+",
        metavar="A",
        help="of this, the share left right (0.8 0)",
    )
    parser.add_argument("--no-graph", dest="graph", action="store_false", help="run decode steps kernel by kernel")
    parser.add_argument("--tree", metavar="HASHES", help="what to record as the source tree in --json")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each load")


def run(args: argparse.Namespace) -> int:
    from nibblelm.benchmark import MIXED_CONTEXT, read_bandwidth
    from nibblelm.errors import RequestError

    if args.part == "serve":
        return bench_serve.run(args)
    if not (args.model or args.shape):
        raise RequestError("say what to measure: --model FOLDER, --shape NAME, or serve --url URL")
    if args.model and (args.random_weights or (args.bits, args.group_size) != (None, None)):
        raise RequestError(
            "--random-weights, --bits and --group-size are of --shape; a model has its own, as it was converted"
        )
    args.bits, args.group_size = args.bits or 4, args.group_size or -1
    limit = _context_limit(args)
    loads = _loads(args, min(limit, args.ctx_size or limit))
    context = _room(args, loads)
    first, facts = (_from_shape if args.shape else _from_model)(args, context)
    keep_loaded()
    peak = read_bandwidth(first.device)
    for load in loads:
        runner = first.with_capacity(args.ctx_size or load.context)
        if args.speculate is not None:
            for right in args.acceptance or (0.8, 0.0):
                row = _drafts(args, runner, load, facts, right)
                print(json.dumps(row) if args.json else _drafts_table(row), flush=True)
            continue
        row = _measured(args, runner, load, facts, peak)
        print(json.dumps(row) if args.json else _table(row), flush=True)
        del runner
    if args.mixed:
        row = _mixed(args, first.with_capacity(args.ctx_size or MIXED_CONTEXT), facts)
        print(json.dumps(row) if args.json else _mixed_table(row), flush=True)
    return 0


def _room(args: argparse.Namespace, loads: "list[Load]") -> int:
    """Tokens of the longest sequence, or what --ctx-size says. Raises RequestError for what cannot be measured."""
    from nibblelm.benchmark import MIXED_CONTEXT
    from nibblelm.errors import RequestError

    for load in loads:
        if min(load.prompt_tokens, load.generated_tokens, load.batch) < 1 or load.depth < 0:
            raise RequestError("--prompt-tokens, --gen-tokens and --batch must be at least 1, --depth at least 0")
        if args.speculate is not None and load.generated_tokens < 2:
            raise RequestError("--speculate needs --gen-tokens of at least 2: the first token has no draft")
    if args.acceptance is not None and args.speculate is None:
        raise RequestError("--acceptance is of drafts: add --speculate ngram, or leave it out")
    if args.speculate is not None and args.mixed:
        raise RequestError("--mixed is measured without drafts: leave out --speculate")
    longest = max([load.context for load in loads] + [MIXED_CONTEXT] * args.mixed)
    if args.ctx_size is not None and args.ctx_size < longest:
        raise RequestError(f"--ctx-size {args.ctx_size} has no room for sequences of {longest} tokens")
    return args.ctx_size or longest


def _loads(args: argparse.Namespace, limit: int) -> "list[Load]":
    """The loads that the flags ask for; tokens that were not asked for fit into `limit` positions."""
    from nibblelm.benchmark import Load

    lists = (args.prompt_tokens, args.gen_tokens, args.batch, args.depth)
    loads: list[Load] = []
    for i in range(max(map(len, lists))):
        prompt, generated, batch, depth = (v[min(i, len(v) - 1)] for v in lists)
        room = limit - depth
        if generated is None:
            generated = max(1, min(128, room // 4 if prompt is None else room - prompt))
        if prompt is None:
            prompt = max(1, min(512, room - generated))
        loads.append(Load(prompt, generated, batch, depth))
    return loads


def _context_limit(args: argparse.Namespace) -> int:
    from nibblelm.models import family, open_model

    raw = _shape(args.shape) if args.shape else open_model(args.model).config
    return family(raw).read_config(raw).max_positions


def _shape(name: str) -> dict[str, Any]:
    from nibblelm.errors import RequestError
    from nibblelm.shapes import SHAPES

    if name not in SHAPES:
        raise RequestError(f"shape {name!r} is not known; known: {sorted(SHAPES)}")
    return SHAPES[name]


def _measured(
    args: argparse.Namespace, runner: "Runner", load: "Load", facts: dict[str, Any], peak: float
) -> dict[str, Any]:
    """One row of the result."""
    from nibblelm.benchmark import measure

    kv, pages = _kv_memory(args, runner)
    speed = measure(runner, load, pages)
    depth = load.depth + load.prompt_tokens + load.generated_tokens / 2
    step_bytes = facts["weight_bytes"] + load.batch * depth * kv
    decode = speed.decode_tok_s[0]
    return {
        **_described(args, runner, facts),
        "batch": load.batch,
        "prompt_tokens": load.prompt_tokens,
        "generated_tokens": load.generated_tokens,
        "depth": load.depth,
        "prefill_tok_s": dict(zip(("mean", "std"), speed.prefill_tok_s, strict=True)),
        "decode_tok_s": dict(zip(("mean", "std"), speed.decode_tok_s, strict=True)),
        "weight_bytes": facts["weight_bytes"],
        "achieved_gb_s": step_bytes * decode / load.batch / 1e9,
        "peak_gb_s": peak / 1e9,
        "load_s": facts["load_s"],
        "kernels_per_token": runner.kernels_per_step(load.batch),
        "ids_hash": speed.ids_hash,
        "tree": args.tree,
    }


def _kv_memory(args: argparse.Namespace, runner: "Runner") -> tuple[int, int | None]:
    """Bytes that a step reads of a token, and the pages that were asked for."""
    from nibblelm.kv_cache import bytes_per_page, bytes_per_token

    c = runner.model.config
    sizes = (c.layers, c.kv_heads, c.head_dim, runner.kv_dtype)
    pages = None if args.kv_memory is None else args.kv_memory // bytes_per_page(*sizes, runner.device)
    return bytes_per_token(*sizes), pages


def _described(args: argparse.Namespace, runner: "Runner", facts: dict[str, Any]) -> dict[str, Any]:
    """What was measured, in every row."""
    import torch

    from nibblelm.ops.devices import kernels

    return {
        "shape": facts["shape"],
        "device": torch.cuda.get_device_name(runner.device) if runner.device.type == "cuda" else "cpu",
        "kernels": kernels(runner.device),
        "dtype": args.dtype,
        "activations": facts["activations"],
        "kv": {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "int8"}[runner.kv_dtype],
        "bits": facts["bits"],
        "group_size": facts["group_size"],
        "ctx_size": args.ctx_size,
    }


def _drafts(
    args: argparse.Namespace, runner: "Runner", load: "Load", facts: dict[str, Any], right: float
) -> dict[str, Any]:
    """The row of a load with drafts of which a share is right."""
    from nibblelm.benchmark import measure_drafts

    result = measure_drafts(runner, load, right, _kv_memory(args, runner)[1])
    return {
        **_described(args, runner, facts),
        "load": "drafts",
        "batch": load.batch,
        "prompt_tokens": load.prompt_tokens,
        "generated_tokens": load.generated_tokens,
        "depth": load.depth,
        "acceptance": right,
        "drafts": result.drafts,
        "draft_tokens": result.draft_tokens,
        "accepted_tokens": result.accepted_tokens,
        "decode_tok_s": dict(zip(("mean", "std"), result.with_drafts, strict=True)),
        "decode_tok_s_without": dict(zip(("mean", "std"), result.without, strict=True)),
        "speed_up": dict(zip(("median", "least", "most"), result.ratio, strict=True)),
        "ids_hash": result.ids_hash,
        "tree": args.tree,
    }


def _drafts_table(row: dict[str, Any]) -> str:
    (with_drafts, std), (without, std_without) = row["decode_tok_s"].values(), row["decode_tok_s_without"].values()
    median, least, most = row["speed_up"].values()
    return (
        f"{row['shape']} on {row['device']}, batch {row['batch']}, depth {row['depth']}, drafts from a first run, "
        f"{100 * row['acceptance']:.0f} % of it as it was: {row['accepted_tokens']} of {row['draft_tokens']} drafted "
        f"tokens accepted in {row['drafts']} drafts\ndecode  {row['generated_tokens']:>6}   {with_drafts:10.1f} ± "
        f"{std:.1f} tok/s, without {without:.1f} ± {std_without:.1f}: {median:.2f} x [{least:.2f}, {most:.2f}], "
        f"ids {row['ids_hash']}"
    )


def _mixed(args: argparse.Namespace, runner: "Runner", facts: dict[str, Any]) -> dict[str, Any]:
    """The row of the mixed load."""
    from nibblelm.benchmark import measure_mixed

    result = measure_mixed(runner, _kv_memory(args, runner)[1])
    return {
        **_described(args, runner, facts),
        "load": "mixed",
        "requests": result.requests,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "output_tok_s": dict(zip(("mean", "std"), result.output_tok_s, strict=True)),
        "tree": args.tree,
    }


def _mixed_table(row: dict[str, Any]) -> str:
    rate = row["output_tok_s"]
    return (
        f"{row['shape']} on {row['device']}, {row['requests']} requests at once, {row['prompt_tokens']} prompt tokens, "
        f"{row['output_tokens']} output tokens\nmixed  {rate['mean']:10.1f} ± {rate['std']:.1f} output tok/s"
    )


def _from_model(args: argparse.Namespace, context: int) -> tuple["Runner", dict[str, Any]]:
    from nibblelm.engine import LLM

    options = {"kv": args.kv, "activations": args.activations, "graph": args.graph, "max_sequences": 1}
    llm = LLM(args.model, args.device, args.dtype, args.threads, context, **options)
    facts = {"bits": None, "group_size": None, "weight_bytes": llm.weight_bytes, "load_s": llm.load_s}
    return llm.runner, facts | {"shape": llm.folder.name, "activations": llm.activations}


def _from_shape(args: argparse.Namespace, context: int) -> tuple["Runner", dict[str, Any]]:
    import time

    from nibblelm.arguments import numeric_types, select_device, use_threads
    from nibblelm.errors import RequestError
    from nibblelm.models import family
    from nibblelm.ops.devices import reclaim
    from nibblelm.random_weights import RandomWeights
    from nibblelm.runner import Runner

    if args.threads is not None:
        use_threads(args.threads)
    raw, device = _shape(args.shape), select_device(args.device)
    module = family(raw)
    config = module.read_config(raw)
    if context > config.max_positions:
        raise RequestError(f"{context} positions are asked for; {args.shape} has {config.max_positions}")
    if args.bits == 16 and args.group_size != -1:
        raise RequestError(f"--group-size {args.group_size} is of 4 or 8 bits; leave it out with --bits 16")
    print(f"making random weights of {args.shape} ...", file=sys.stderr)
    begun = time.perf_counter()
    dtype, kv_dtype, activation_bits = numeric_types(args.dtype, device, args.activations, args.kv)
    weights = RandomWeights(device, dtype, activation_bits, args.bits, args.group_size)
    model = module.Model(weights, config, context)
    reclaim(device)  # what rounding them took
    runner = Runner(model, device, kv_dtype, context, args.graph)
    facts = {"bits": args.bits, "group_size": args.group_size, "weight_bytes": weights.streamed_bytes}
    return runner, facts | {
        "shape": args.shape,
        "activations": activation_bits,
        "load_s": time.perf_counter() - begun,
    }


def _table(row: dict[str, Any]) -> str:
    prefill, decode = row["prefill_tok_s"], row["decode_tok_s"]
    kernels = "" if row["kernels_per_token"] is None else f"{row['kernels_per_token']} kernels per step, "
    percent = 100 * row["achieved_gb_s"] / row["peak_gb_s"]
    decoded = f"{decode['mean']:10.1f} ± {decode['std']:.1f} tok/s"
    read = f"memory traffic   {row['achieved_gb_s']:.1f} of {row['peak_gb_s']:.1f} GB/s ({percent:.0f} %), "
    if row["generated_tokens"] == 1:
        decoded, read = "  not measured: the first token comes of the prompt", ""
    return "\n".join(
        [
            f"{row['shape']} on {row['device']}, {row['dtype']}, activations {row['activations']} bits, "
            f"kv {row['kv']}, batch {row['batch']}, depth {row['depth']}",
            f"prefill {row['prompt_tokens']:>6}   {prefill['mean']:10.1f} ± {prefill['std']:.1f} tok/s",
            f"decode  {row['generated_tokens']:>6}   {decoded}",
            f"{read}{row['weight_bytes'] / 1e6:.0f} MB of weights per step",
            f"load {row['load_s']:.2f} s, {kernels}ids {row['ids_hash']}",
        ]
    )
