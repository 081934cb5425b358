"""gpu_check.sh where no GPU is: what it asks for, what a failed part leaves, what it records."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TREE = "csrc=a runtime=b models=c"
RUNNER = """
import json
print(json.dumps({"test": "setup", "vllm": "0.25.0", "gpu": "a card"}))
print(json.dumps({"test": "decode", "quant": "int4", "batch": 1, "tok_s": 273.0}))
raise SystemExit(3)
"""
ENDED = {"a": "", "b": "", "c": "", "d": "<failure/>", "e": "<error/>", "f": "<skipped/>", "g": "<skipped/>"}


def junit(file: str, cases: dict[str, str]) -> str:
    body = "".join(f'<testcase classname="{file}" name="{name}">{ended}</testcase>' for name, ended in cases.items())
    return f"<testsuites><testsuite>{body}</testsuite></testsuites>"


@pytest.fixture
def check(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`check(*arguments)`: gpu_check.sh in a folder of its own."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    for name, command in (("python3", f'exec {sys.executable} "$@"'), ("nvidia-smi", "echo a card, 1")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{command}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [str(tmp_path / "scripts" / "gpu_check.sh"), *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


def test_what_a_failed_part_measured_is_recorded(check: Callable[..., Any], tmp_path: Path) -> None:
    vllm, state, record = tmp_path / "vllm", tmp_path / "out" / "gpu_check", tmp_path / "benchmarks" / "h200"
    vllm.mkdir()
    (vllm / "run_vllm.py").write_text(RUNNER)
    with tarfile.open(vllm / "site.tar.xz", "w:xz") as archive:
        archive.add(vllm / "run_vllm.py", "package.py")
    state.mkdir(parents=True)
    for name in ("tests", "cards"):
        (state / f"{name}.xml").write_text(junit("tests.ops.test_x.TestY", ENDED))
    (state / "wheel.txt").write_text("dist/a.whl 1234")
    (state / "e2e.jsonl").write_text('{"shape": "x", "batch": 1, "tree": null}\n')
    (state / "e2e.families.jsonl").write_text('{"shape": "y", "activations": 16, "tree": null}\n')
    older = [{"shape": "y", "tree": "old"}, {"shape": "x", "batch": 2, "tree": "old"}]
    record.mkdir(parents=True)
    (record / "e2e.json").write_text(json.dumps(older))
    result = check("--tree", TREE, "--vllm", vllm, "peers", "record")
    assert result.returncode == 1, result.stderr
    assert "exit code 1" in result.stdout
    assert (state / "vllm" / "package.py").exists()
    counts = {"passed": 3, "failed": 2, "skipped": 2}
    tests, peers, e2e = (json.loads((record / f"{name}.json").read_text()) for name in ("tests", "peers", "e2e"))
    assert tests["files"] == {"tests/ops/test_x.py": {**counts, "tree": TREE}}
    assert tests["cards"] == {**counts, "tree": TREE}
    assert [(row["tok_s"], row["tree"]) for row in peers] == [(273.0, TREE)]
    measured = [{"shape": "x", "batch": 1, "tree": TREE}, {"shape": "y", "activations": 16, "tree": TREE}]
    assert e2e == [*measured, older[1]], "rows that were not measured again stay"
    wheel = json.loads((record.parent / "wheel.json").read_text())["gpu_tests"]
    assert wheel == {"wheel": "a.whl", "wheel_bytes": 1234, **counts, "gpu": "a card, 1", "tree": TREE}


def test_files_that_did_not_run_keep_their_results(check: Callable[..., Any], tmp_path: Path) -> None:
    state, record = tmp_path / "out" / "gpu_check", tmp_path / "benchmarks" / "h200"
    state.mkdir(parents=True)
    record.mkdir(parents=True)
    older = {
        f"tests/{name}.py": {"passed": 9, "failed": 0, "skipped": 0, "tree": "old"} for name in ("test_a", "test_b")
    }
    before = {name: {"result": "5 of 5 cases", "tree": "old"} for name in ("memcheck.test_a", "racecheck")}
    (record / "tests.json").write_text(json.dumps({"tree": "old", "files": older, "sanitizer": before}))
    assert check("--tree", TREE, "record").returncode == 0
    assert json.loads((record / "tests.json").read_text())["tree"] == "old"
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text("")
    for name, line in (
        ("memcheck", "3 of 3 cases"),
        ("racecheck.test_a", "2 of 3 cases"),
        ("racecheck", "0 of 9 cases in 0 processes, exit 124: "),
        ("racecheck.test_b", "0 of 9 cases in 3 processes, exit 9: 9 failed"),
    ):
        (state / f"{name}.txt").write_text(line)
    (state / "tests.part.xml").write_text(junit("tests.test_b", ENDED))
    (state / "tests.part.again.xml").write_text(junit("tests.test_b", {"d": "", "e": "<failure/>"}))
    (state / "tests.other.xml").write_text(junit("tests.ops.test_c", {"a": ""}))
    assert check("--tree", TREE, "record").returncode == 0
    tests = json.loads((record / "tests.json").read_text())
    assert tests["tree"] == TREE
    assert tests["sanitizer"] == {
        "memcheck": {"result": "3 of 3 cases", "tree": TREE},  # of all files, not that of some any more
        "racecheck": before["racecheck"],  # none that ended say nothing
        "racecheck.test_b": {"result": "0 of 9 cases in 3 processes, exit 9: 9 failed", "tree": TREE},
        "racecheck.test_a": {"result": "2 of 3 cases", "tree": TREE},
    }
    assert tests["files"] == {
        "tests/test_a.py": older["tests/test_a.py"],
        "tests/test_b.py": {"passed": 4, "failed": 1, "skipped": 2, "tree": TREE, "run again": 2},
        "tests/ops/test_c.py": {"passed": 1, "failed": 0, "skipped": 0, "tree": TREE},
    }


# The marker in two pieces, lest `--stale` take this file for one with GPU tests.
SLOW = """
import time
import pytest

@pytest.MARKER
@pytest.mark.parametrize("seconds", [0, 600])
def test_that_takes(seconds): time.sleep(seconds)
""".replace("MARKER", "mark" + ".gpu")


def test_what_ran_until_time_was_up_is_recorded(check: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_slow.py").write_text(SLOW)
    result = check("--tree", TREE, "--limit", 8, "tests", "record")
    assert "exit code 124" in result.stdout, result.stdout + result.stderr
    files = json.loads((tmp_path / "benchmarks" / "h200" / "tests.json").read_text())["files"]
    assert files == {"tests/test_slow.py": {"passed": 1, "failed": 0, "skipped": 0, "tree": TREE, "cut off": True}}


def test_what_is_missing_is_named(check: Callable[..., Any]) -> None:
    for arguments, code, message in (
        (["peers"], 2, "pass --tree"),
        (["--tree", TREE, "nonsense"], 2, "unknown argument 'nonsense'"),
        (["--tree", TREE, "vllm-folders"], 1, "pass --vllm DIR"),
        (["--tree", TREE, "--only", "scripts", "tests"], 1, "no GPU tests in 'scripts'"),
        (["--tree", TREE, "--only", "scripts", "memcheck"], 1, "no tests for sanitizers in 'scripts'"),
        (["--tree", TREE, "--limit", "0", "serve", "cards"], 1, " of 0 seconds are over\n== cards: not run, "),
    ):
        result = check(*arguments)
        assert (result.returncode, message in result.stdout + result.stderr) == (code, True), result


def test_every_card_takes_the_next_row_and_one_that_fails_loses_no_other(
    check: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "bin" / "python3").write_text(
        "#!/bin/sh\ncase $* in *device_count*) echo 2 ;; *falcon*) exit 3 ;; *nibblelm*) "
        'sleep 0.5; echo "{\\"device\\": \\"$6\\", \\"shape\\": \\"$9\\"}" ;; esac\n'
    )
    result = check("--tree", TREE, "families")
    assert result.returncode == 1, result
    assert "bench falcon-7b 4 -1: failed" in result.stdout
    rows = [json.loads(line) for line in (tmp_path / "out" / "gpu_check" / "e2e.families.jsonl").open()]
    assert len({row["shape"] for row in rows}) == len(rows) == 10
    assert {row["device"] for row in rows} == {"cuda:0", "cuda:1"}


def test_stale_names_what_is_of_another_tree_or_a_sample(check: Callable[..., Any], tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    folders = ("csrc", "runtime", "models")
    for folder in folders:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file").write_text("")
    git("init")
    git("add", *folders)
    git("commit", "--message", "all")
    tree = " ".join(f"{folder}={git('rev-parse', f'HEAD:{folder}')}" for folder in folders)
    record = tmp_path / "benchmarks" / "h200"
    record.mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    whole = {"result": "9 of 9 cases in 3 processes, exit 0:", "tree": tree}
    summary = {"tree": tree, "files": {}, "sanitizer": {"memcheck": whole}, "schedules": {"passed": 1, "tree": tree}}
    (record / "tests.json").write_text(json.dumps(summary))
    assert check("--stale").stdout == f"the record in {record.relative_to(tmp_path)} is of this tree\n"
    sample = {"result": "4 of 9 cases, 3 of 8 kernels, in 2 processes, exit 124:", "tree": tree}
    summary |= {"sanitizer": {"memcheck": {**whole, "tree": TREE}, "racecheck": sample}, "cards": {"tree": TREE}}
    (record / "tests.json").write_text(json.dumps(summary))
    (record / "e2e.json").write_text(json.dumps([{"tree": tree}, {"tree": TREE}]))
    covering = {"result": "4 of 9 cases, 7 of 8 kernels, in 2 processes, exit 0:", "tree": tree}
    summary["sanitizer"]["synccheck"] = covering  # all that it was to run
    (record / "tests.json").write_text(json.dumps(summary))
    assert check("--stale").stdout.splitlines() == [
        "e2e.json: 1 of 2 rows are of another tree",
        "tests.json: of another tree: memcheck cards",
        "tests.json: racecheck: 4 of 9 cases passed, 3 of 8 kernels",
    ]
