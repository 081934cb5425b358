"""Flags that several commands share, and what they mean."""

import argparse
import gc
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nibblelm.engine import LLM, GenerationOutput
    from nibblelm.sampling_params import SamplingParams


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """The model, by its place or as -m; `settle_arguments` makes one of the two."""
    parser.add_argument("place", nargs="?", metavar="MODEL", help="model folder or hub id")
    parser.add_argument("-m", "--model", metavar="MODEL", help="the same")


def settle_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """args.model of what `add_model_argument` took, and what generate cannot do without; here, so that an option that
    is not known is named first: what follows it would be the model, and it may stand for what is missing."""
    if not hasattr(args, "place"):
        return
    place, named, instead = args.place, args.model, getattr(args, "supported", False)
    if place is not None and named is not None:
        parser.error(f"MODEL {place!r} beside -m {named!r}; give one of them")
    args.model = named if place is None else place
    if (args.model is None) != instead:
        parser.error("MODEL beside --supported; give one of them" if instead else "MODEL is required")
    if getattr(args, "prompt", "") is None and args.file is None:
        parser.error("one of -p/--prompt and -f/--file is required")


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything that decides how a model is loaded, and the model."""
    add_model_argument(parser)
    add_device_argument(parser)
    parser.add_argument(
        "--dtype",
        choices=("auto", "fp32", "bf16"),
        default="auto",
        help="activations; on the CPU auto rounds inputs of quantized layers to 8 bits, bf16 to 16, fp32 to 24",
    )
    add_activations_argument(parser)
    add_kv_argument(parser)
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: the cores it may use)")
    parser.add_argument(
        "--ctx-size", "--max-context", type=positive, metavar="N", help="context in tokens (default: the model's)"
    )
    add_kv_memory_argument(parser)
    add_speculate_argument(parser)
    parser.add_argument("--no-graph", dest="graph", action="store_false", help="run decode steps kernel by kernel")
    parser.add_argument("--strict", action="store_true", help="refuse unknown keys in config.json")


def add_device_argument(parser: argparse.ArgumentParser, text: str = "") -> None:
    """--device, whose name `nibblelm.arguments.select_device` reads."""
    text = f"{text}: " if text else ""
    parser.add_argument("--device", default="auto", help=f"{text}auto, cpu, cuda, or cuda:1 for one of several cards")


def add_activations_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--activations",
        type=int,
        choices=(8, 16),
        help="bits that inputs of quantized layers are rounded to (default: as --dtype says; on CUDA 16 for bf16)",
    )


def add_kv_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv",
        choices=("auto", "bf16", "int8"),
        default="auto",
        help="keys and values in the cache: as --dtype has them, or in 8 bits, half the memory of bf16",
    )


def add_kv_memory_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv-memory",
        type=byte_count,
        metavar="BYTES",
        help="memory for keys and values, also as 512M or 8G (default: what the context takes, at most 60%% of what is "
        "free)",
    )


def add_speculate_argument(
    parser: argparse.ArgumentParser,
    text: str = "draft from prompt and output what may come next: faster where text repeats, and the same text",
) -> None:
    parser.add_argument("--speculate", choices=("ngram",), help=text)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of SamplingParams; a flag that is not given takes generation_config.json's value, else the default."""
    group = parser.add_argument_group("sampling (default: generation_config.json, else temperature 0.8, top-p 0.95)")
    group.add_argument("-n", "--max-tokens", type=int, metavar="N", help="tokens to generate (256; -1: to the end)")
    group.add_argument("--temp", "--temperature", type=float, dest="temperature", metavar="T", help="0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--repetition-penalty", type=float, metavar="R")
    group.add_argument("--presence-penalty", type=float, metavar="R")
    group.add_argument("--frequency-penalty", type=float, metavar="R")
    group.add_argument("--seed", type=int, metavar="S")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", help="go on after end tokens")


def sampling_params(args: argparse.Namespace) -> "SamplingParams":
    """The SamplingParams that the flags ask for."""
    from nibblelm.sampling_params import SamplingParams

    return SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )


def load_model(args: argparse.Namespace, max_sequences: int | None = 1) -> "LLM":
    """The model that the flags ask for; None: for as many sequences at a time as is usual on its device."""
    from nibblelm.engine import LLM

    options = {"kv": args.kv, "activations": args.activations, "strict": args.strict, "graph": args.graph}
    options |= {"kv_memory": args.kv_memory, "max_sequences": max_sequences, "speculate": args.speculate}
    llm = LLM(args.model, args.device, args.dtype, args.threads, args.ctx_size, **options)
    keep_loaded()
    return llm


@contextmanager
def needing_extra(name: str) -> Iterator[None]:
    """Around imports of what an extra of the package installs. Raises RequestError where that is not there."""
    from nibblelm.errors import RequestError

    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("nibblelm"):
            raise
        text = f"this needs {error.name}; install it with pip install 'nibblelm[{name}]'"
        raise RequestError(text) from error


def keep_loaded() -> None:
    """Leave what is loaded out of collections to come: one over all of it holds a step up by a tenth of a second."""
    gc.freeze()


def print_load(llm: "LLM") -> None:
    """What was loaded, and the memory that was planned for its use, on standard error."""
    print(
        f"weights: {llm.weight_bytes / 2**20:.1f} MiB in {llm.load_s:.2f} s, "
        f"{llm.weight_bytes / llm.load_s / 1e9:.1f} GB/s | context: {llm.max_context} tokens | "
        f"keys and values: {llm.kv_bytes / 2**20:.1f} MiB for {llm.kv_tokens} tokens",
        file=sys.stderr,
    )


def warn_unheard(llm: "LLM", system: str) -> None:
    """Say so where the chat template passes over system messages."""

    def ids(text: str) -> list[int]:
        return llm.encode_chat([{"role": "system", "content": text}, {"role": "user", "content": "?"}])

    if ids(system) == ids(f"{system} And?"):
        print(
            "warning: this model's chat template leaves out system messages: --system changes nothing", file=sys.stderr
        )


def print_footer(output: "GenerationOutput") -> None:
    """Tokens, speed and peak memory of a request, on standard error."""
    t = output.timings
    ended = "end of text" if output.stop_reason is None else f"stopped at {output.stop_reason!r}"
    reason = "context is full" if output.limit == "context" else output.limit or ended
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    drafts = f"drafts: {t.accepted_tokens} of {t.drafted_tokens} tokens right | " if t.drafted_tokens else ""
    print(
        f"prompt: {t.prompt_tokens} tokens, {t.prefill_tok_s:.1f} tok/s | "
        f"generation: {t.generated_tokens} tokens, {t.decode_tok_s:.1f} tok/s ({reason}) | {drafts}"
        f"peak memory: {peak / 2**20:.0f} MiB",
        file=sys.stderr,
    )


def number(kind: Callable[[str], Any], supported: str, fits: Callable[[Any], bool]) -> Callable[[str], Any]:
    """The type of an argument: one line for what is no number, and for one out of range."""

    def parsed(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"must be {supported}, got {text!r}")
        return value

    return parsed


positive = number(int, "a whole number of at least 1", lambda value: value >= 1)


def byte_count(text: str) -> int:
    """A number of bytes, as 512M or 8GB."""
    from nibblelm.errors import RequestError
    from nibblelm.sizes import parse_size

    try:
        return parse_size(text, "it", RequestError)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def text_of(data: bytes, name: str) -> str:
    """What a file or a pipe of this name holds, every byte of it. RequestError where it is not UTF-8."""
    from nibblelm.errors import RequestError

    try:
        return data.decode("utf-8-sig")  # the mark that some editors put first is no part of the text
    except UnicodeDecodeError as error:
        where = f"{name}, byte {error.start}"
        raise RequestError(f"{where}: {data[error.start]:#04x} is not UTF-8; convert the text to UTF-8") from error


def shown_perplexity(figures: Mapping[str, Any]) -> str:
    """Perplexity and, where it is known, its standard error, for a line of text."""
    error = f" ± {figures['ppl_stderr']:.4f}" if "ppl_stderr" in figures else " (one window: no standard error)"
    return f"{figures['ppl']:.4f}{error}"
