"""`nibblelm serve`: an OpenAI-compatible server."""

import argparse
import sys
from pathlib import Path

from nibblelm.cli.options import add_load_arguments, load_model, needing_extra, number, positive, print_load

HELP = "serve a model over HTTP, as OpenAI's API has it"

SWITCH_S = 0.0005
"""Seconds after which a Python thread makes way for another that waits, 0.005 by default: so long the engine's would
wait for the event loop, several times a step."""

_PORT = number(int, "0 to 65535", lambda value: 0 <= value <= 65535)
_COUNT = number(int, "a whole number of at least 0", lambda value: value >= 0)
_SECONDS = number(float, "0 to 1000000 seconds", lambda value: 0 <= value <= 1e6)
_TIME = number(float, "more than 0 and at most 1000000 seconds", lambda value: 0 < value <= 1e6)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_load_arguments(parser)
    parser.add_argument(
        "--max-sequences", type=positive, metavar="N", help="outputs computed together (64 on the CPU, 256 on CUDA)"
    )
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine alone)")
    group.add_argument("--port", type=_PORT, default=8000, metavar="N", help="0 takes one that is free (8000)")
    group.add_argument("--api-key", action="append", default=[], metavar="KEY", help="ask for it; may be repeated")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys, one a line, that `ps` does not show")
    group.add_argument(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="its name (default: MODEL); may be repeated",
    )
    group.add_argument("--cors", action="append", default=[], metavar="ORIGIN", help="allow pages of ORIGIN, * for all")
    group.add_argument("--max-queue", type=_COUNT, default=256, metavar="N", help="outputs that may wait (256)")
    group.add_argument("--timeout", type=_TIME, default=3600, metavar="S", help="seconds of one request (3600)")
    group.add_argument("--drain", type=_SECONDS, default=30, metavar="S", help="seconds to end in, after SIGTERM (30)")
    group.add_argument("--log-requests", action="store_true", help="a line for each request on standard error")


def run(args: argparse.Namespace) -> int:
    from nibblelm.engine import MAX_SEQUENCES
    from nibblelm.engine_core import MOST_REQUESTS
    from nibblelm.errors import RequestError

    with needing_extra("serve"):
        from nibblelm.server.listen import Options, bound, serve
        from nibblelm.server.service import Limits
    keys = [*args.api_key, *_keys(args.api_key_file)]
    limits = Limits(args.max_queue, args.timeout)
    limits.check(args.max_sequences or min(MAX_SEQUENCES.values()), MOST_REQUESTS)
    names = args.served_model_name or [args.model]
    if "" in names or len(set(names)) < len(names):
        raise RequestError(f"--served-model-name gives {names}; supported: names that differ, none of them empty")
    log = sys.stderr if args.log_requests else None
    options = Options(args.host, args.port, keys, args.cors, limits, args.drain, log)
    listening = bound(options.host, options.port)
    llm = load_model(args, args.max_sequences)
    llm.resolve(None, {})  # what is wrong in generation_config.json is no request's fault
    print_load(llm)
    sys.setswitchinterval(SWITCH_S)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    line = f"nibblelm: serving {names[0]} on http://{shown}:{port}"
    return serve(llm, names, listening, options, lambda: print(line, file=sys.stderr, flush=True))


def _keys(path: Path | None) -> list[str]:
    from nibblelm.errors import RequestError

    if path is None:
        return []
    try:
        keys = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is no text in UTF-8: {error}; write keys in it, one a line") from error
    if not keys:
        raise RequestError(f"{path} has no key; write one a line")
    return keys
