"""How linears are cut into tiles on cards that are not here: what the kernels assume, checked without one."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[1] / "csrc"


@pytest.mark.skipif(not (SOURCES / "cuda/tiles.h").exists(), reason="the sources are not beside these tests")
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_plans_hold_what_kernels_assume(tmp_path: Path) -> None:
    program = tmp_path / "plans"
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-Wall",
        "-Wextra",
        f"-I{SOURCES}",
        str(HERE / "plans.cpp"),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    result = subprocess.run([program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    assert int(result.stdout.split()[0]) > 100_000
