"""Run the tests marked `sanitize` under a tool of compute-sanitizer, in many short processes.

    python scripts/sanitize.py memcheck tests/ops [--limit S] [--result memcheck.txt] [--logs DIR]

Only this project's kernels are looked at: torch's reductions have what racecheck calls hazards. A process has --batch
cases, since a tool says what it found when its process ends: a few minutes' limit then costs those that are under way
and leaves a random sample of all others. Cards are those that CUDA_VISIBLE_DEVICES names, in turn. The result is one
line: how many cases of how many ended, and each process's summary. Exits with 9 where a case failed or something was
found, and 124 where time was up before all had ended.
"""

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

ENDS = re.compile(r"^\d+ (?:passed|failed).*$|^=+ .*SUMMARY.*$", re.MULTILINE)
PLACES = re.compile(r"^.*(?:Error: |Warning: |Invalid|Uninit).*$", re.MULTILINE)
VARYING = re.compile(r"(?<=0x)[0-9a-f]+|\[\d+ hazards\]")
CLEAN = "SUMMARY: 0 "


def collected(paths: Sequence[str]) -> list[str]:
    """Names of the marked cases, shuffled, the same way every time."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-m", "sanitize"]
    listed = subprocess.run([*command, *paths], capture_output=True, text=True, check=False)
    cases = [line for line in listed.stdout.splitlines() if "::" in line]
    if not cases:
        raise SystemExit(f"sanitize.py: no case marked `sanitize` in {' '.join(paths)}\n{listed.stdout}{listed.stderr}")
    random.Random(0).shuffle(cases)
    return cases


RUNNING: set[subprocess.Popen[str]] = set()


def end(process: subprocess.Popen[str]) -> None:
    """Kill the tool and its child."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def sanitized(tool: str, cases: Sequence[str], card: str, until: float, least: float) -> tuple[int, str] | None:
    """Exit code and output of one process; None where it had not ended in time, or had less than `least` seconds."""
    command = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=nibblelm", "--error-exitcode", "9"]
    if until - time.monotonic() < least:
        return None
    process = subprocess.Popen(
        [*command, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *cases],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": card, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    RUNNING.add(process)
    try:
        output, _ = process.communicate(timeout=until - time.monotonic())
    except subprocess.TimeoutExpired:
        end(process)
        process.communicate()
        return None
    finally:
        RUNNING.remove(process)
    return process.returncode, output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=("memcheck", "racecheck", "initcheck", "synccheck"))
    parser.add_argument("path", nargs="+")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="cases of a process (4)")
    parser.add_argument("--processes", type=int, metavar="N", help="at a time (as many as processors)")
    parser.add_argument("--limit", type=float, default=86400, metavar="S", help="seconds of all")
    parser.add_argument("--least", type=float, default=20, metavar="S", help="begin none with less, of all, left (20)")
    parser.add_argument("--result", type=Path, metavar="FILE", help="where the line goes (it is printed, too)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="where outputs of processes with findings go")
    args = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        raise SystemExit("sanitize.py: no compute-sanitizer on the path; it comes with the CUDA toolkit")
    until = time.monotonic() + args.limit
    cases = collected(args.path)
    shares = [cases[i : i + args.batch] for i in range(0, len(cases), args.batch)]
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ThreadPoolExecutor(args.processes or len(os.sched_getaffinity(0))) as pool:
        runs = [
            pool.submit(sanitized, args.tool, share, cards[i % len(cards)], until, args.least)
            for i, share in enumerate(shares)
        ]
        try:
            results = [run.result() for run in runs]
        except BaseException:  # Ctrl-C, say: they have sessions of their own, and would stay on the card
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(RUNNING):
                end(process)
            raise
    ended = [(share, *result) for share, result in zip(shares, results, strict=True) if result is not None]
    found = [(code or 9, output) for _, code, output in ended if code != 0 or CLEAN not in output]
    code = max((code for code, _ in found), default=0 if len(ended) == len(shares) else 124)
    ran = sum(len(share) for share, *_ in ended)
    ends = " ".join(line for _, _, output in ended for line in ENDS.findall(output) or output.splitlines()[-3:])
    line = f"{ran} of {len(cases)} cases in {len(ended)} processes, exit {code}: {ends}"
    print(f"{args.tool}: {line}")
    if args.result:
        args.result.write_text(line + "\n")
    late = [case for share, result in zip(shares, results, strict=True) if result is None for case in share]
    print("".join(f"not ended: {case}\n" for case in late[:40]), end="")
    if found:  # which places, the most frequent first: summaries alone do not say
        places = Counter(VARYING.sub("", line) for _, output in found for line in PLACES.findall(output))
        print("\n".join(f"{count:7} {place}" for place, count in places.most_common(40)))
        if args.logs:
            args.logs.mkdir(parents=True, exist_ok=True)
            for i, (_, output) in enumerate(found):
                (args.logs / f"{i}.log").write_text(output)
    return code


if __name__ == "__main__":
    sys.exit(main())
