"""`nibblelm generate`: continue a prompt, streaming to standard output."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibblelm.cli.options import (
    add_load_arguments,
    add_sampling_arguments,
    load_model,
    print_footer,
    print_load,
    sampling_params,
    text_of,
    warn_unheard,
)

if TYPE_CHECKING:
    from nibblelm.engine import LLM

HELP = "continue a prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - reads standard input")
    source.add_argument("-f", "--file", metavar="PATH", help="read the prompt from a file (UTF-8)")
    parser.add_argument("--system", metavar="TEXT", help="system message, for models with a chat template")
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    parser.add_argument("--echo", action="store_true", help="print the prompt before its continuation")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--json-schema", type=Path, metavar="FILE", help="answer in JSON that follows this schema")
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    prompt, params = _prompt(args), sampling_params(args)
    if args.json_schema is not None:
        params = dataclasses.replace(params, schema=_schema(args.json_schema))
    llm = load_model(args)
    messages = _messages(llm, prompt, args)
    print_load(llm)
    pieces = llm.stream(prompt, params) if messages is None else llm.stream_chat(messages, params)
    if args.echo and not args.json:
        print(prompt, end="", flush=True)
    output = None
    for piece in pieces:
        if not args.json:
            print(piece.text, end="", flush=True)
        output = piece.output
    assert output is not None
    if args.json:
        print(json.dumps(dataclasses.asdict(output) | {"prompt": prompt}))
    else:
        print(flush=True)
        print_footer(output)
    if args.json_schema is not None and output.finish_reason == "length":
        print("nibblelm: warning: the answer is cut off before its JSON ends; raise --max-tokens", file=sys.stderr)
    return 0


def _schema(path: Path) -> Any:
    """What the file says: an object, or true for any JSON value."""
    from nibblelm.errors import RequestError

    try:
        schema = json.loads(text_of(path.read_bytes(), str(path)))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path} is not JSON: {error}") from error
    if schema is not True and not isinstance(schema, dict):
        raise RequestError(f"{path} is no JSON schema: an object, or true; it has {json.dumps(schema):.60}")
    return schema


def _prompt(args: argparse.Namespace) -> str:
    """The prompt. Of a file or standard input every byte counts, but for one line end at the very end: editors and
    `echo` add it, and a model goes on differently after it."""
    from nibblelm.errors import RequestError

    if args.prompt not in (None, "-"):
        try:
            args.prompt.encode()
        except UnicodeEncodeError as error:  # what the shell gave that Python could not read
            where = f"-p, character {error.start}"
            raise RequestError(f"{where}: not UTF-8; convert the text to UTF-8") from error
        return args.prompt
    if args.file is None and sys.stdin is None:
        raise RequestError("-p - reads standard input, which is closed; give -p TEXT or -f FILE")
    data = sys.stdin.buffer.read() if args.file is None else Path(args.file).read_bytes()
    text = text_of(data, args.file or "standard input")
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _messages(llm: "LLM", prompt: str, args: argparse.Namespace) -> list[dict[str, Any]] | None:
    """The conversation for the chat template, or None when the prompt goes in as it is."""
    template = llm.tokenizer is not None and llm.tokenizer.chat_template is not None
    if args.system is not None and (args.raw or not template):
        from nibblelm.errors import RequestError

        raise RequestError("--system needs a chat template; this model has none (or --raw was given)")
    if args.raw or not template:
        return None
    if args.system is not None:
        warn_unheard(llm, args.system)
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": prompt}]
