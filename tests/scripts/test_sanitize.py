"""Sanitized tests where there is no card: a tool that finds what a case asks it to, and time that is up."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Notes what it was asked for, runs the command behind its options, and finds an error for each FOUND in its output.
TOOL = f"""#!{sys.executable}
import json, os, re, subprocess, sys
command = sys.argv[sys.argv.index("9") + 1 :]
with open(os.environ["ASKED"], "a") as file:
    cases = [word.split("::")[1] for word in command if "::" in word]
    tool = sys.argv[2] + " says more" * (os.environ["NIBBLELM_FOR_RACECHECK"] == "1")
    file.write(json.dumps([tool, os.environ["CUDA_VISIBLE_DEVICES"], cases]) + "\\n")
done = subprocess.run([*command, "-s"], capture_output=True, text=True)
errors = len(re.findall("FOUND", done.stdout))
print(done.stdout)
print("========= Invalid __global__ write at 0x1f\\n" * errors + f"========= RACECHECK SUMMARY: {{errors}} hazards")
sys.exit(9 if errors else done.returncode)
"""
# What the extension has, wherever it is; `sh` since a test may run without the extension.
SYMBOLS = """#!/bin/sh
echo "symbols:"
for name in a b b c; do echo "FUNC  LOCAL  DEFAULT  ENTRY  _Z1${name}v"; done
echo "FUNC  LOCAL  DEFAULT  helper"
"""
# The marker in two pieces, lest `gpu_check.sh` take this file for one with such tests.
CASES = """
import time
import pytest
pytestmark = pytest.MARKER

@pytest.mark.parametrize("i", range(6))
def test_fine(i): pass

def test_found(): print("FOUND", "FOUND")

def test_wrong(): assert False

@pytest.mark.skip
def test_skipped(): pass

def test_endless():
    open("begun", "w").close()
    time.sleep(600)
""".replace("MARKER", "mark" + ".sanitize")


def some(*names: str) -> str:
    """The cases of these names."""
    head, *rest = CASES.split("\n\n")
    return "\n\n".join([head, *(case for case in rest if any(f"test_{name}(" in case for name in names))])


@pytest.fixture
def sanitize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Callable[..., subprocess.CompletedProcess[str]]
) -> Callable[..., tuple[int, str, str]]:
    """`sanitize(cases, *arguments)`: exit code, output, and the result's line."""
    (tmp_path / "bin").mkdir()
    for name, text in (("compute-sanitizer", TOOL), ("cuobjdump", SYMBOLS)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = sanitize\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")

    def run(cases: str, *arguments: object) -> tuple[int, str, str]:
        (tmp_path / "test_cases.py").write_text(cases)
        (tmp_path / "line").write_text("of another run")
        done = script("sanitize.py", "racecheck", "test_cases.py", "--result", "line", "--logs", "logs", *arguments)
        line = tmp_path / "line"
        return done.returncode, done.stdout + done.stderr, line.read_text() if line.exists() else ""

    return run


def test_all_cases_run_in_processes_of_some(sanitize: Callable[..., Any], tmp_path: Path) -> None:
    code, output, line = sanitize(some("fine"), "--batch", 4)
    assert (code, line[: line.index(":")]) == (0, "6 of 6 cases in 2 processes, exit 0"), output
    assert line.count(" passed") == line.count("SUMMARY: 0 ") == 2
    asked = [json.loads(word) for word in (tmp_path / "asked").read_text().splitlines()]
    assert {tool for tool, _, _ in asked} == {"racecheck says more"}
    assert {card for _, card, _ in asked} == {"3", "5"}
    assert sorted(case for _, _, cases in asked for case in cases) == [f"test_fine[{i}]" for i in range(6)]
    assert not (tmp_path / "logs").exists()


def test_cases_that_launch_all_kernels_come_first(sanitize: Callable[..., Any], tmp_path: Path) -> None:
    launched = [{"a": 9_000_000}, {"a": 1_000, "b": 1_000}, {"b": 9_000}, {"a": 1, "c": 1}, {"c": 10**12}, {}]
    lines = [json.dumps({"case": f"test_cases.py::test_fine[{i}]", "kernels": own}) for i, own in enumerate(launched)]
    (tmp_path / "kernels").write_text("\n".join(lines))
    code, output, line = sanitize(some("fine"), "--batch", 1, "--processes", 1, "--kernels", "kernels")
    assert (code, line[: line.index(":")]) == (0, "6 of 6 cases, 3 of 3 kernels, in 6 processes, exit 0"), output
    asked = [json.loads(word)[2][0] for word in (tmp_path / "asked").read_text().splitlines()]
    assert set(asked[:2]) == {"test_fine[1]", "test_fine[3]"}

    code, output, line = sanitize(some("fine"), "--batch", 1, "--kernels", "kernels", "--covering")
    assert (code, line[: line.index(":")]) == (0, "2 of 6 cases, 3 of 3 kernels, in 2 processes, exit 0"), output
    code, output, _ = sanitize(some("fine"), "--covering")
    assert code == 2
    assert "--covering: pass --kernels FILE" in output


def test_kernels_of_what_did_not_pass_do_not_count(sanitize: Callable[..., Any], tmp_path: Path) -> None:
    launched = {"fine[0]": {"a": 1}, "wrong": {"a": 1, "b": 1}}
    lines = [json.dumps({"case": f"test_cases.py::test_{case}", "kernels": own}) for case, own in launched.items()]
    (tmp_path / "kernels").write_text("\n".join(lines))
    code, output, line = sanitize(some("fine", "wrong"), "--batch", 1, "--kernels", "kernels")
    assert "kernels lacks 5 of 7 cases" in output
    assert (code, line[: line.index(":")]) == (9, "6 of 7 cases, 1 of 3 kernels, in 7 processes, exit 9"), output


def test_cases_that_do_not_run_launch_nothing(sanitize: Callable[..., Any]) -> None:
    code, output, line = sanitize(some("skipped"), "--kernels", "kernels")
    assert (code, line[: line.index(":")]) == (9, "0 of 1 cases, 0 of 3 kernels, in 1 processes, exit 9"), output


def test_what_cases_launch_is_found_out_where_it_is_not_known(sanitize: Callable[..., Any], tmp_path: Path) -> None:
    code, output, line = sanitize(some("fine", "found"), "--kernels", "kernels")  # which print without the tool, too
    assert (code, line[: line.index(":")]) == (9, "7 of 7 cases, 0 of 3 kernels, in 2 processes, exit 9"), output
    rows = [json.loads(row) for row in (tmp_path / "kernels").read_text().splitlines()]
    names = ["test_found", *(f"test_fine[{i}]" for i in range(6))]
    assert sorted(row["case"] for row in rows) == sorted(f"test_cases.py::{name}" for name in names)
    assert all(row["kernels"] == {} for row in rows)  # without a card


@pytest.mark.parametrize(
    ("name", "told"), [("found", "SUMMARY: 2 hazards"), ("wrong", "1 failed"), ("skipped", "1 skipped")]
)
def test_what_was_found_or_did_not_pass_is_told(
    sanitize: Callable[..., Any], tmp_path: Path, name: str, told: str
) -> None:
    code, output, line = sanitize(some(name))
    passed = int(name == "found")
    assert (code, line[: line.index(":")]) == (9, f"{passed} of 1 cases in 1 processes, exit 9"), output
    assert told in line
    assert ("      2 ========= Invalid __global__ write at 0x\n" in output) == (name == "found")
    assert len(list((tmp_path / "logs").iterdir())) == 1


def test_time_that_is_up_costs_what_is_under_way(sanitize: Callable[..., Any]) -> None:
    code, output, line = sanitize(some("endless"), "--limit", 8, "--least", 0.1)
    assert (code, line) == (124, "0 of 1 cases in 0 processes, exit 124: \n"), output
    assert "\nnot ended: test_cases.py::test_endless\n" in output


def test_what_time_cut_off_can_be_made_up_for(sanitize: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text(json.dumps({"case": "test_cases.py::test_fine[2]", "kernels": {"a": 1}}) + "\n")
    before = "racecheck: 4 of 6 cases, 1 of 3 kernels, in 2 processes, exit 124: 4 passed\n"
    late = "".join(f"not ended: test_cases.py::test_fine[{i}]\n" for i in (1, 5))
    (tmp_path / "before").write_text(before + late)
    code, output, line = sanitize(some("fine"), "--kernels", "kernels", "--again", "before")
    assert (code, line[: line.index(":")]) == (0, "6 of 6 cases, 1 of 3 kernels, in 3 processes, exit 0"), output
    assert line.count(" passed") == 2
    (asked,) = [json.loads(word)[2] for word in (tmp_path / "asked").read_text().splitlines()]
    assert sorted(asked) == ["test_fine[1]", "test_fine[5]"]
    for wrong in (before.replace("exit 124", "exit 9") + late, before):
        (tmp_path / "before").write_text(wrong)
        code, output, line = sanitize(some("fine"), "--kernels", "kernels", "--again", "before")
        assert (code, line) == (1, "")
        assert "no output of a run of these cases that only time has ended" in output


def test_time_that_is_up_before_the_tool_runs_is_said(sanitize: Callable[..., Any], tmp_path: Path) -> None:
    code, output, line = sanitize(some("endless"), "--limit", 10, "--kernels", "kernels")
    assert (code, line) == (124, ""), output
    assert "sanitize.py: time was up before it was known which kernels" in output
    assert not list(tmp_path.glob("kernels*"))


@pytest.mark.parametrize("cases", ["def test_other(): pass\n", "import what_is_not_there\n"])
def test_no_cases_are_an_error(sanitize: Callable[..., Any], cases: str) -> None:
    code, output, line = sanitize(cases)
    assert (code, line) == (1, ""), output
    assert "sanitize.py: no cases from test_cases.py:\n" in output


@pytest.mark.parametrize("name", ["compute-sanitizer", "cuobjdump"])
def test_a_tool_that_is_not_there_is_named(
    sanitize: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "bin" / name).unlink()
    without = [folder for folder in os.environ["PATH"].split(os.pathsep) if not (Path(folder) / name).exists()]
    monkeypatch.setenv("PATH", os.pathsep.join(without))  # a toolkit may be installed
    code, output, line = sanitize(some("fine"), "--kernels", "kernels")
    assert (code, line) == (1, ""), output
    assert f"no {name} on the path" in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("lists", [False, True])
def test_a_run_that_is_ended_leaves_nothing_behind(
    tmp_path: Path, sanitize: Callable[..., Any], number: signal.Signals, lists: bool
) -> None:
    """Also one that is still finding out which kernels cases launch."""
    assert callable(sanitize)  # which has put the tool on the path
    (tmp_path / "test_cases.py").write_text(some("endless", "fine"))
    command = [sys.executable, str(SCRIPT), "memcheck", "test_cases.py", "--batch", "1", "--processes", "8"]
    command += ["--kernels", "kernels"] if lists else []
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        wait_for((tmp_path / ("begun" if lists else "asked")).exists)  # some have just begun, others have not
        process.send_signal(number)
        assert process.wait(60) not in (0, None)
        wait_for(lambda: not [path for path in Path("/proc").glob("[0-9]*/cwd") if where(path) == tmp_path])
    finally:
        process.kill()


SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sanitize.py"


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def where(link: Path) -> Path | None:
    """Of a process, which may end meanwhile."""
    try:
        return link.readlink()
    except OSError:
        return None
