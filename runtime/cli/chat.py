"""`nibblelm chat`: a conversation that keeps its history and its cache between turns."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from nibblelm.cli.options import add_model_arguments, add_sampling_arguments, load_model, print_footer, sampling_params

if TYPE_CHECKING:
    from nibblelm.engine import LLM
    from nibblelm.sampler import SamplingParams

HELP = "talk to a model with a chat template (/reset forgets, /exit leaves)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    llm = load_model(args)
    if llm.tokenizer is None or llm.tokenizer.chat_template is None:
        from nibblelm.errors import RequestError

        raise RequestError("this model has no chat template; use nibblelm generate")
    params = sampling_params(args)
    opening: list[dict[str, Any]] = [] if args.system is None else [{"role": "system", "content": args.system}]
    messages = list(opening)
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing and history for input())
    print("/reset forgets the conversation, /exit leaves", file=sys.stderr)
    while (line := _read()) is not None and line.strip() != "/exit":
        if line.strip() == "/reset":
            messages = list(opening)
        elif line.strip():
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _answer(llm, messages, params)})
    return 0


def _read() -> str | None:
    """One line of the user, None at the end. The prompt sign goes to standard error."""
    print("> ", end="", file=sys.stderr, flush=True)
    try:
        return input()
    except EOFError:
        print(file=sys.stderr)
        return None


def _answer(llm: "LLM", messages: list[dict[str, Any]], params: "SamplingParams") -> str:
    """Stream an answer; Ctrl-C ends the answer, not the conversation."""
    text = ""
    try:
        for piece in llm.stream_chat(messages, params):
            print(piece.text, end="", flush=True)
            text += piece.text
            if piece.output is not None:
                print(flush=True)
                print_footer(piece.output)
    except KeyboardInterrupt:
        print("\n(stopped)", file=sys.stderr)
    return text
