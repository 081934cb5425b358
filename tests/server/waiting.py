"""How long the tests wait for what has to come: a limit only ends what hangs, so it bears the slowest machine."""

import time
from collections.abc import Callable

PATIENCE_S = 300


def wait_for(condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (true := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return true
