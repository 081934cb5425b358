"""Sanitized tests where there is no card: a tool that finds what a case asks it to, and time that is up."""

import json
import os
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
    file.write(json.dumps([sys.argv[2], os.environ["CUDA_VISIBLE_DEVICES"], cases]) + "\\n")
done = subprocess.run([*command, "-s"], capture_output=True, text=True)
errors = len(re.findall("FOUND", done.stdout))
print(done.stdout)
print("========= Invalid __global__ write at 0x1f\\n" * errors + f"========= ERROR SUMMARY: {{errors}} errors")
sys.exit(9 if errors else done.returncode)
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

def test_endless(): time.sleep(600)
""".replace("MARKER", "mark" + ".sanitize")


@pytest.fixture
def sanitize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Callable[..., subprocess.CompletedProcess[str]]
) -> Callable[..., tuple[int, str, str, list[Any]]]:
    """`sanitize(file of cases, *arguments)`: exit code, output, the result's line and what the tool was asked for."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "compute-sanitizer").write_text(TOOL)
    (tmp_path / "bin" / "compute-sanitizer").chmod(0o755)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = sanitize\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")

    def run(cases: str, *arguments: object) -> tuple[int, str, str, list[Any]]:
        (tmp_path / "test_cases.py").write_text(cases)
        done = script("sanitize.py", "racecheck", "test_cases.py", "--result", "line", "--logs", "logs", *arguments)
        line, asked = tmp_path / "line", tmp_path / "asked"
        words = asked.read_text().splitlines() if asked.exists() else []
        return (
            done.returncode,
            done.stdout + done.stderr,
            line.read_text() if line.exists() else "",
            [json.loads(word) for word in words],
        )

    return run


def test_all_cases_run_in_processes_of_some(sanitize: Callable[..., Any], tmp_path: Path) -> None:
    code, output, line, asked = sanitize(CASES.partition("def test_found")[0], "--batch", 4)
    assert (code, line[: line.index(":")]) == (0, "6 of 6 cases in 2 processes, exit 0"), output
    assert line.count(" passed") == line.count("SUMMARY: 0 ") == 2
    assert {tool for tool, _, _ in asked} == {"racecheck"}
    assert {card for _, card, _ in asked} == {"3", "5"}
    assert sorted(case for _, _, cases in asked for case in cases) == [f"test_fine[{i}]" for i in range(6)]
    assert not (tmp_path / "logs").exists()


def test_what_was_found_or_failed_is_told(sanitize: Callable[..., Any], tmp_path: Path) -> None:
    code, output, line, _ = sanitize(CASES.partition("def test_endless")[0], "--batch", 1)
    assert (code, line[: line.index(":")]) == (9, "8 of 8 cases in 8 processes, exit 9"), output
    assert line.count("SUMMARY: 2 ") == line.count("1 failed") == 1
    assert "      2 ========= Invalid __global__ write at 0x\n" in output
    assert len(list((tmp_path / "logs").iterdir())) == 2


def test_time_that_is_up_costs_what_is_under_way(sanitize: Callable[..., Any]) -> None:
    endless = CASES.replace("def test_found(): print", "def not_now(): print").replace("def test_wrong", "def nor")
    code, output, line, _ = sanitize(endless, "--batch", 1, "--limit", 12, "--least", 1)
    assert (code, line[: line.index(":")]) == (124, "6 of 7 cases in 6 processes, exit 124"), output
    assert "\nnot ended: test_cases.py::test_endless\n" in output


def test_no_cases_are_an_error(sanitize: Callable[..., Any]) -> None:
    code, output, line, _ = sanitize("def test_other(): pass\n")
    assert (code, line) == (1, ""), output
    assert "no case marked `sanitize` in test_cases.py" in output


def test_a_run_that_is_ended_leaves_nothing_behind(tmp_path: Path, sanitize: Callable[..., Any]) -> None:
    assert sanitize(CASES.partition("def test_found")[0])[0] == 0
    (tmp_path / "asked").unlink()
    (tmp_path / "test_cases.py").write_text(
        CASES.replace("def test_found", "def found").replace("range(6)", "range(1)")
    )
    script = Path(__file__).resolve().parents[2] / "scripts" / "sanitize.py"
    command = [sys.executable, str(script), "memcheck", "test_cases.py", "--batch", "1"]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        while not (tmp_path / "asked").exists() or "endless" not in (tmp_path / "asked").read_text():
            time.sleep(0.1)
        process.terminate()
        assert process.wait(30) == 143
    own = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"test_cases.py::test_endless" in read(path)]
    assert own == []


def read(path: Path) -> bytes:
    """Of a process that may end meanwhile."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
