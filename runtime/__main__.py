"""`python -m nibblelm`, and what the command `nibblelm` runs."""

import os
import signal
import sys
from typing import NoReturn


def leave(*_: object) -> NoReturn:
    """Ctrl-C from the first moment on: exit code 130 and one line.

    Not a KeyboardInterrupt: inside an import it is swallowed by some libraries and shows the traceback of others.
    """
    try:
        os.write(2, b"\nnibblelm: interrupted\n")
    finally:
        os._exit(130)


def run() -> NoReturn:
    """The command line, as a process of its own."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where the shell had it ignored
        signal.signal(signal.SIGINT, leave)
    from nibblelm.cli import main

    sys.exit(main())


if __name__ == "__main__":
    run()
