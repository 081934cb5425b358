"""Run by test_resume.py: conversions that are killed with SIGKILL everywhere, then resumed.

A process of its own, single-threaded when it forks: every child is one conversion, which kills itself at its n-th
event (any open, rename, mkdir, truncate or removal beside the destination, and every block written) or is killed by
a timer.
"""

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from nibblelm.converter import convert
from nibblelm.errors import NibbleLMError

FILE_EVENTS = (
    "open",
    "os.rename",
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "shutil.rmtree",
    "shutil.copyfile",
)


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def start(source: Path, out: Path, die_at: int = -1, **options) -> int:
    """Fork a conversion; it exits with 0, with 3 on a typed error, and dies at event `die_at`."""
    child = os.fork()
    if child:
        return child
    events = itertools.count()

    def event(*_: object) -> None:
        if next(events) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(name: str, arguments: tuple) -> None:
        # truncations name a descriptor, everything else a path
        if name == "os.truncate" or (name in FILE_EVENTS and str(out.parent) in str(arguments)):
            event()

    if die_at >= 0:
        sys.addaudithook(audit)
    code = 0
    try:
        convert(source, out, threads=1, progress=event, **options)
    except NibbleLMError as error:
        print(error, file=sys.stderr)
        code = 3
    os._exit(code)


def finish(child: int) -> int:
    """The exit code of a child, -9 if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check_every_event(source: Path, place: Path, options: dict, old: Path | None) -> int:
    """Kill at event 0, 1, 2 ... until a conversion outlives them; every one must resume to the same bytes."""
    expected = hashes(place / "expected")
    before = None if old is None else hashes(old)
    more = {} if old is None else {"overwrite": True}
    for die_at in itertools.count():
        work = place / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        out = work / "out"
        if old is not None:
            shutil.copytree(old, out)
        killed = finish(start(source, out, die_at, **options, **more)) == -signal.SIGKILL
        if out.exists():  # the old folder as it was, or the new one
            found = hashes(out)
            found.pop("journal.jsonl", None)
            assert found in (before, expected), f"event {die_at}: {sorted(found)}"
        elif old is not None:
            assert hashes(work / ".out.replaced") == before, f"event {die_at}: the old folder is lost"
        if not killed:
            return die_at
        again = {} if out.exists() and old is None else {"resume": True, **more}
        if again or old is not None:
            assert finish(start(source, out, **options, **again)) == 0, f"event {die_at} cannot be resumed"
        found = hashes(out)
        found.pop("journal.jsonl", None)
        assert found == expected, f"event {die_at}: other bytes after resuming"
    raise AssertionError("unreachable")


def check_random_times(source: Path, place: Path, options: dict, kills: int) -> int:
    """Kill one and the same conversion again and again after random times; then let it finish."""
    out = place / "random"
    started = time.monotonic()
    assert finish(start(source, place / "timed", **options)) == 0
    duration = time.monotonic() - started
    generator, done = random.Random(7), 0
    for _ in range(kills):
        child = start(source, out, **options, resume=True)
        time.sleep(generator.uniform(0.0, 0.7 * duration))
        os.kill(child, signal.SIGKILL)
        finish(child)
        if out.exists():
            break
        journal = place / ".random.partial" / "journal.jsonl"
        lines = journal.read_text().count("\n") if journal.exists() else 0
        assert lines >= done, "finished tensors were lost"
        done = lines
    if not out.exists():
        assert finish(start(source, out, **options, resume=True)) == 0
    assert hashes(out) == hashes(place / "timed")
    return done


def main() -> None:
    small, large, place = (Path(argument) for argument in sys.argv[1:])
    torch.set_num_threads(1)  # no thread pool may exist when this forks
    options = {"bits": 4, "group_size": 32, "max_shard_size": 30_000}
    convert(small, place / "expected", threads=1, **options)  # in this process: children inherit all imports
    assert finish(start(small, place / "old", bits=8)) == 0
    events = check_every_event(small, place, options, None)
    overwriting = check_every_event(small, place, options, place / "old")
    journaled = check_random_times(large, place, {"bits": 4, "group_size": 32}, kills=12)
    print(json.dumps({"events": events, "overwriting": overwriting, "journaled": journaled}))


if __name__ == "__main__":
    main()
