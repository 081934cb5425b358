"""Run the tests marked `sanitize` under a tool of compute-sanitizer, in many short processes.

    python scripts/sanitize.py memcheck tests/ops [--limit S] [--kernels FILE] [--result memcheck.txt] [--logs DIR]

Only this project's kernels are looked at: torch's reductions have what racecheck calls hazards. racecheck follows
neither `__syncwarp` nor who waits for whom across blocks, so kernels say more for it than they need to (`for_racecheck`
in common.cuh: numbers that a launch passes on, the same machine code, whose usual form memcheck alone sees). A process
has --batch cases, in an order drawn once and for all: a limit costs those that are under way then, and leaves a sample
of all others. With --kernels, what each case launches (FILE, or else a first run without the tool, which writes it
there), the first are a few that together launch every instantiation of a kernel that any launches; --covering runs
these alone. With --again FILE, the output of such a run of the same tree and --kernels that time cut off, only what had
not ended there runs, and the rest of that run counts. Cards are those that CUDA_VISIBLE_DEVICES names, in turn. The
result is one line: how many cases of how many passed, of how many of the extension's kernels nothing was found (in
processes without a finding), and each process's summary. Exits with 9 where something was found or a case did not pass
(one that is skipped, too), else with 124 where time was up before all that it runs had ended.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

PER_CARD = 16
"""Processes at a time, at most: each has a context and buffers of its own."""

ENDS = re.compile(r"^\d+ (?:passed|failed|skipped|error).*$|^=+ .*SUMMARY.*$", re.MULTILINE)
PASSED = re.compile(r"^(?:\d+ failed, )?(\d+) passed", re.MULTILINE)
PLACES = re.compile(r"^=+ .*(?:Error: |Warning: |Invalid|Uninit|Potential|exited).*$", re.MULTILINE)
VARYING = re.compile(r"(?<=0x)[0-9a-f]+|\[\d+ hazards\]")
CLEAN = "SUMMARY: 0 "

CASE_NS = 3_000_000
"""What a case takes under a tool besides its kernels, in nanoseconds of kernels without: a second or two, and kernels
take several hundred times as long under racecheck."""

Kernels = dict[str, dict[str, int]]
"""By case, nanoseconds of each kernel that it launches."""

Result = tuple[Sequence[str], int | None, str]
"""Cases of a process, its exit code (None where it did not end in time), its output."""


def collected(paths: Sequence[str]) -> list[str]:
    """Names of the marked cases."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", "sanitize"]
    listed = subprocess.run([*command, *paths], capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        raise SystemExit(f"sanitize.py: no cases from {' '.join(paths)}:\n{listed.stdout}{listed.stderr}")
    return [line for line in listed.stdout.splitlines() if "::" in line]


def list_kernels(paths: Sequence[str], file: Path, until: float) -> None:
    """Run the marked cases without the tool, for what each launches."""
    here = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    partial = file.with_name(f"{file.name}.{os.getpid()}").resolve()  # another run may be at it, too
    partial.write_text("")
    environment = os.environ | {"KERNELS_OF_CASES": str(partial), "PYTHONPATH": here, "OMP_NUM_THREADS": "1"}
    plugins = ["-p", "no:cacheprovider", "-p", "kernels_of_cases"]
    workers = str(min(len(os.sched_getaffinity(0)), PER_CARD))
    left = max(until - time.monotonic(), 0)
    backstop = ["timeout", "--signal=KILL", str(int(left) + 10)]  # should this process be killed itself
    process = subprocess.Popen(
        [*backstop, sys.executable, "-m", "pytest", "-q", *plugins, "-n", workers, "-m", "sanitize", *paths],
        env=environment, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=left)
        if process.returncode not in (0, 1):  # what fails does so with the tool, too
            raise SystemExit(f"sanitize.py: which kernels do cases launch?\n{output[-3000:]}")
        partial.replace(file)
    except subprocess.TimeoutExpired:
        print("sanitize.py: time was up before it was known which kernels cases launch")
        sys.exit(124)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        partial.unlink(missing_ok=True)


def kernels_of(paths: Sequence[str], cases: Sequence[str], file: Path, until: float) -> Kernels:
    """What each case launches, from the file, which is made where there is none."""
    if not file.exists():
        list_kernels(paths, file, until)
    launched = {row["case"]: row["kernels"] for row in map(json.loads, file.read_text().splitlines())}
    if lacks := sum(case not in launched for case in cases):
        print(f"sanitize.py: {file} lacks {lacks} of {len(cases)} cases, which come last; remove it if it is old")
    return launched


def covering(cases: Sequence[str], launched: Kernels) -> tuple[list[str], list[str]]:
    """A few of the cases that together launch all kernels, those with the most for their time first; and the others."""
    rest, missing = list(cases), {name for case in cases for name in launched.get(case, ())}
    first: list[str] = []
    while missing:  # the one with the most new kernels for its time
        kernels = [launched.get(case, {}) for case in rest]
        worth = [len(missing & own.keys()) / (CASE_NS + sum(own.values())) for own in kernels]
        best = worth.index(max(worth))
        missing -= kernels[best].keys()
        first.append(rest.pop(best))
    return first, rest


class Before(NamedTuple):
    """Of a run that time cut off: the cases of which nothing was found, how many processes ended, their last lines."""

    fine: list[str]
    processes: int
    ends: str


def cut_off(output: str, cases: Sequence[str]) -> Before:
    """What such a run's output says of these cases, which it was to run."""
    line = re.search(r"^\w+: (\d+) of .* in (\d+) processes, exit 124: (.*)$", output, re.MULTILINE)
    late = set(re.findall(r"^not ended: (.*)$", output, re.MULTILINE))
    fine = [case for case in cases if case not in late]
    if not line or int(line[1]) != len(fine):
        raise SystemExit("sanitize.py: --again: no output of a run of these cases that only time has ended")
    return Before(fine, int(line[2]), line[3])


def compiled_kernels() -> int:
    """How many the installed extension has. Of cuobjdump's rows of symbols theirs say ENTRY."""
    spec = find_spec("nibblelm._cuda")
    library = [spec.origin] if spec and spec.origin else []
    listed = subprocess.run(["cuobjdump", "-symbols", *library], capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        raise SystemExit(f"sanitize.py: the CUDA extension's kernels, {library}: {listed.stdout}{listed.stderr}")
    return len({row.split()[-1] for row in listed.stdout.splitlines() if re.search(r"\b(STO_)?ENTRY\b", row)})


class Processes:
    """Those of the tool that run. They have sessions of their own, so that their children end with them."""

    def __init__(self, tool: str, until: float, least: float) -> None:
        self._command = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=nibblelm", "--error-exitcode", "9"]
        self._says_more = {"NIBBLELM_FOR_RACECHECK": str(int(tool == "racecheck"))}
        self._until, self._least = until, least
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def run(self, cases: Sequence[str], card: str) -> tuple[int | None, str]:
        """Exit code, None where it did not end in time, and output."""
        left = self._until - time.monotonic()
        if left < self._least:
            return None, ""
        backstop = ["timeout", "--signal=KILL", str(int(left) + 10)]  # should this process be killed itself
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        options: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": card, "OMP_NUM_THREADS": "1", **self._says_more}
        with self._lock:
            if self._stopped:
                return None, ""
            process = subprocess.Popen(
                [*backstop, *self._command, *pytest, *cases], env=environment, start_new_session=True, **options
            )
            self._running.add(process)
        try:
            output, _ = process.communicate(timeout=left)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            self._end(process)
            return None, process.communicate()[0]
        finally:
            self._running.discard(process)

    def stop(self) -> None:
        """End all, and begin no more."""
        with self._lock:
            self._stopped = True
            for process in list(self._running):
                self._end(process)

    def _end(self, process: subprocess.Popen[str]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def judged(results: Sequence[Result]) -> tuple[int, list[str], list[str], list[str], list[str]]:
    """How many cases passed; cases of the processes with nothing in them; each process's last lines; the cases that did
    not end; outputs with something in them."""
    passed, fine, ends, late, found = 0, [], [], [], []
    for share, code, output in results:
        if code is None:
            late += share
            clean = not PLACES.search(output)
        else:
            own = sum(int(count) for count in PASSED.findall(output))
            passed += own
            ends += ENDS.findall(output) or output.splitlines()[-3:]
            clean = code == 0 and CLEAN in output and own == len(share)
            fine += share if clean else ()
        if not clean:
            found.append(output)
    return passed, fine, ends, late, found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=("memcheck", "racecheck", "initcheck", "synccheck"))
    parser.add_argument("path", nargs="+")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="cases of a process (4)")
    parser.add_argument("--processes", type=int, metavar="N", help="at a time (a processor's each, 16 a card at most)")
    parser.add_argument("--limit", type=float, default=86400, metavar="S", help="seconds of all")
    parser.add_argument("--least", type=float, default=20, metavar="S", help="begin none with less, of all, left (20)")
    parser.add_argument("--kernels", type=Path, metavar="FILE", help="what cases launch; made if it is not there")
    parser.add_argument("--covering", action="store_true", help="no cases beyond those that launch every kernel")
    parser.add_argument("--again", type=Path, metavar="FILE", help="output of a run that was cut off: the rest of it")
    parser.add_argument("--result", type=Path, metavar="FILE", help="where the line goes (it is printed, too)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where outputs of processes with findings go")
    args = parser.parse_args()
    if args.covering and not args.kernels:
        parser.error("--covering: pass --kernels FILE, which says what cases launch")
    return args


def main() -> int:
    args = arguments()
    until = time.monotonic() + args.limit
    if args.result:
        args.result.unlink(missing_ok=True)  # an older one must not seem to be this run's
    if args.logs:
        shutil.rmtree(args.logs, ignore_errors=True)
    for name in ("compute-sanitizer", "cuobjdump") if args.kernels else ("compute-sanitizer",):
        if shutil.which(name) is None:
            raise SystemExit(f"sanitize.py: no {name} on the path; it comes with the CUDA toolkit")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    cases = collected(args.path)
    random.Random(0).shuffle(cases)
    count = compiled_kernels() if args.kernels else 0
    launched = kernels_of(args.path, cases, args.kernels, until) if args.kernels else {}
    first, rest = covering(cases, launched)
    to_run = first if args.covering else first + rest
    before = cut_off(args.again.read_text(), to_run) if args.again else Before([], 0, "")
    to_run = [case for case in to_run if case not in before.fine]
    shares = [to_run[i : i + args.batch] for i in range(0, len(to_run), args.batch)]
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    processes = Processes(args.tool, until, args.least)
    most = min(len(os.sched_getaffinity(0)), PER_CARD * len(cards))
    with ThreadPoolExecutor(args.processes or most) as pool:
        try:
            runs = [pool.submit(processes.run, share, cards[i % len(cards)]) for i, share in enumerate(shares)]
            results: list[Result] = [(share, *run.result()) for share, run in zip(shares, runs, strict=True)]
        except BaseException:  # Ctrl-C, say
            processes.stop()
            raise
    passed, fine, ends, late, found = judged(results)
    passed, fine = passed + len(before.fine), fine + before.fine
    code = 9 if found else 124 if late else 0
    ended = before.processes + sum(code is not None for _, code, _ in results)
    seen = {name for case in fine for name in launched.get(case, ())}
    kernels = f", {len(seen)} of {count} kernels," if count else ""
    told = " ".join([before.ends, *ends]).strip()
    line = f"{passed} of {len(cases)} cases{kernels} in {ended} processes, exit {code}: {told}"
    print(f"{args.tool}: {line}")
    if args.result:
        args.result.write_text(line + "\n")
    print("".join(f"not ended: {case}\n" for case in late), end="")
    # Which places, the most frequent first: summaries alone do not say.
    places = Counter(VARYING.sub("", place) for output in found for place in PLACES.findall(output))
    print("".join(f"{count:7} {place}\n" for place, count in places.most_common(40)), end="")
    if args.logs and found:
        args.logs.mkdir(parents=True)
        for i, output in enumerate(found):
            (args.logs / f"{i}.log").write_text(output)
    return code


if __name__ == "__main__":
    sys.exit(main())
