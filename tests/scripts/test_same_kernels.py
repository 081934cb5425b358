"""Which kernels two builds share, told from what cuobjdump prints of them."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

TOOL = '#!/bin/sh\n[ "$1" = -sass ] && cat "$2"\n'


def listing(**kernels: str) -> str:
    """As cuobjdump -sass prints kernels of one architecture, one instruction a line."""
    lines = ["Fatbin elf code:", "arch = sm_90a"]
    for name, code in kernels.items():
        lines.append(f"\t\tFunction : {name}")
        for i, instruction in enumerate(code.split("|")):
            lines.append(f"        /*{16 * i:04x}*/                   {instruction} ;    /* 0x00000a00ff017b82 */")
    return "\n".join(lines) + "\n"


@pytest.fixture
def compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Callable[..., subprocess.CompletedProcess[str]]
) -> Callable[[str, str], tuple[int, list[str]]]:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "cuobjdump").write_text(TOOL)
    (tmp_path / "bin" / "cuobjdump").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    def run(old: str, new: str) -> tuple[int, list[str]]:
        (tmp_path / "old").write_text(old)
        (tmp_path / "new").write_text(new)
        done = script("same_kernels.py", tmp_path / "old", tmp_path / "new")
        return done.returncode, (done.stdout + done.stderr).splitlines()

    return run


def test_other_names_are_no_other_kernels(compare: Callable[[str, str], tuple[int, list[str]]]) -> None:
    old = listing(a="MOV R1, R2|EXIT", b="EXIT")
    new = listing(a_of_other_arguments="MOV R1, R2|EXIT", b="EXIT", c="NOP|EXIT")
    assert compare(old, new) == (0, ["2 of 2 kernels have an equal; 1 of 3 are new", "new: c sm_90a"])


def test_another_operand_is_another_kernel(compare: Callable[[str, str], tuple[int, list[str]]]) -> None:
    code, lines = compare(listing(a="MOV R1, R2|EXIT"), listing(a="MOV R1, R3|EXIT"))
    assert (code, lines) == (1, ["0 of 1 kernels have an equal; 1 of 1 are new", "lost: a sm_90a", "new: a sm_90a"])


def test_what_has_no_kernels_is_an_error(compare: Callable[[str, str], tuple[int, list[str]]]) -> None:
    code, lines = compare("", listing(a="EXIT"))
    assert code == 1
    assert "cuobjdump finds no kernels" in lines[-1]
