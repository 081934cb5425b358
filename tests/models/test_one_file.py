"""What belongs to one family stands in its file: nothing else of the runtime or the kernels knows its name."""

import re
from pathlib import Path

import pytest

from nibblelm.models import families

ROOT = Path(__file__).resolve().parents[2]

TABLES = {"runtime/shapes.py", "runtime/tokenizer/files.py"}
"""Shapes that `bench` knows, and tokenizer classes that transformers takes for a model_type."""


@pytest.mark.parametrize("name", families())
def test_a_family_is_one_file(name: str) -> None:
    if not (ROOT / "csrc").is_dir():
        pytest.skip("the sources are not beside these tests")
    files = [path for folder in ("runtime", "csrc") for path in (ROOT / folder).rglob("*.*") if path.suffix != ".pyc"]
    assert len(files) > 150
    named = re.compile(rf"[\"']{name}[\"']".encode())
    found = {path.relative_to(ROOT).as_posix() for path in files if named.search(path.read_bytes())}
    assert found <= TABLES
