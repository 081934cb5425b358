"""`nibblelm chat`: a conversation that keeps its history and its cache between turns."""

import argparse
import re
import sys
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

from nibblelm.cli.options import (
    add_load_arguments,
    add_sampling_arguments,
    load_model,
    print_footer,
    print_load,
    sampling_params,
    warn_unheard,
)

if TYPE_CHECKING:
    from nibblelm.engine import LLM
    from nibblelm.sampling_params import SamplingParams

_COMMAND = re.compile(r"/\w+")

HELP = "talk to a model with a chat template (/reset forgets, /exit leaves)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from nibblelm.errors import NibbleLMError, RequestError

    if sys.stdin is None:
        raise RequestError("chat reads standard input, which is closed")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is not UTF-8 is refused as one that has no tokens
    llm = load_model(args)
    if llm.tokenizer is None or llm.tokenizer.chat_template is None:
        raise RequestError("this model has no chat template; use nibblelm generate")
    params = sampling_params(args)
    print_load(llm)
    opening: list[dict[str, Any]] = [] if args.system is None else [{"role": "system", "content": args.system}]
    if args.system is not None:
        warn_unheard(llm, args.system)
    turns: list[dict[str, Any]] = []
    if sys.stdin.isatty():
        import readline  # noqa: F401  (line editing and history for input())
    print("/reset forgets the conversation, /exit leaves", file=sys.stderr)
    while (line := _read()) is not None and line.strip() != "/exit":
        if line.strip() == "/reset":
            turns = []
        elif _COMMAND.fullmatch(line.strip()):
            print("unknown command: /reset forgets the conversation, /exit leaves", file=sys.stderr)
        elif line.strip():
            try:
                asked = _fitted(llm, opening, [*turns, {"role": "user", "content": line}], params)
                turns = [*asked, {"role": "assistant", "content": _answer(llm, opening + asked, params)}]
            except NibbleLMError as error:  # this turn's alone
                print(f"nibblelm: error: {error}", file=sys.stderr)
    return 0


def _fitted(
    llm: "LLM", opening: list[dict[str, Any]], turns: list[dict[str, Any]], params: "SamplingParams"
) -> list[dict[str, Any]]:
    """`turns` without the oldest ones, until there is room for an answer, or for a quarter of the context; all where
    the last alone is too long."""
    wanted = llm.max_context if params.max_tokens in (None, -1) else params.max_tokens
    room, kept = min(wanted, llm.max_context // 4), turns
    while (free := llm.max_context - len(llm.encode_chat(opening + kept))) < room and len(kept) > 1:
        kept = kept[2:]  # a question and its answer
    if free <= 0:
        return turns
    if dropped := (len(turns) - len(kept)) // 2:
        print(f"(the context of {llm.max_context} tokens is full: forgot the oldest {dropped} turns)", file=sys.stderr)
    return kept


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
