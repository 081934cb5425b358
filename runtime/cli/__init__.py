"""`nibblelm COMMAND`: one file per command, each with `HELP`, `add_arguments(parser)` and `run(args) -> int`.

Text alone goes to standard output, everything else to standard error. Exit codes: 0; 1 for an expected failure, with
one readable line; 2 for usage; 130 after Ctrl-C.
"""

import argparse
import io
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from nibblelm import __version__
from nibblelm.cli.options import settle_arguments
from nibblelm.errors import NibbleLMError, printable

_HEEDS_INTERRUPTS = {"chat": "nibblelm.engine", "convert": "nibblelm.converter"}
"""Commands that end an answer, or leave things in order, at a KeyboardInterrupt; and what they import first."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Command files import what is heavy inside `run`, so that this stays quick."""
    from nibblelm.cli import bench, chat, convert, doctor, eval, generate, info, serve

    parser = argparse.ArgumentParser(
        prog="nibblelm", description="Run decoder language models with int4 and int8 weights on CPU and CUDA."
    )
    parser.add_argument("--version", action="version", version=f"nibblelm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (generate, chat, serve, convert, eval, info, doctor, bench):
        name = module.__name__.rpartition(".")[2]
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.add_argument("--debug", action="store_true", help="show the traceback of a failure")
        command.set_defaults(run=module.run, parser=command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    for stream in (sys.stdout, sys.stderr):  # what a terminal's encoding has no character for is shown by its number
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    args = build_parser().parse_args(argv)
    settle_arguments(args.parser, args)
    if not args.debug:
        warnings.showwarning = _plain_warning
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # torch's threads, where they wait, leave cores to others
    try:
        with _interrupts(args.command):
            return args.run(args)
    except KeyboardInterrupt:
        print("\nnibblelm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (NibbleLMError, OSError, MemoryError) as error:
        if args.debug:
            raise
        print(f"nibblelm: error: {printable(str(error)) or type(error).__name__}", file=sys.stderr)
        return 1


@contextmanager
def _interrupts(command: str) -> Iterator[None]:
    """KeyboardInterrupt for commands that heed it; for others Ctrl-C stays what it was (`nibblelm.__main__.leave`)."""
    handler = signal.getsignal(signal.SIGINT)
    if command not in _HEEDS_INTERRUPTS or not callable(handler):
        yield
        return
    import_module(_HEEDS_INTERRUPTS[command])
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _plain_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"nibblelm: warning: {printable(str(message))}", file=sys.stderr)
