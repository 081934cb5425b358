"""The recorded losses of every format and method meet what is promised of them."""

import json
from pathlib import Path

import pytest

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "quality.json"


@pytest.fixture(scope="module")
def kl():
    """(format, method) -> mean KL divergence of the demo model."""
    if not RECORD.is_file():
        pytest.skip("no benchmarks beside these tests")
    rows = json.loads(RECORD.read_text())
    return {(row["format"], row["method"]): row["kl_mean"] for row in rows if row["checkpoint"] == "demo"}


def best(kl, form):
    return min(value for (name, _), value in kl.items() if name == form)


def test_floors(kl):
    assert best(kl, "int8 per-row") <= kl["Q8_0", "default"]
    assert best(kl, "int4 per-row") <= 0.5 * kl["int4 per-row", "minmax"]
    assert best(kl, "int4 per-row") <= kl["Q4_0", "default"]
    assert best(kl, "int4 g32") <= kl["Q4_1", "default"]


def test_all_is_there():
    if not RECORD.is_file():
        pytest.skip("no benchmarks beside these tests")
    rows = json.loads(RECORD.read_text())
    for checkpoint in ("demo", "stories260K", "tinystories656K"):
        forms = {row["format"] for row in rows if row["checkpoint"] == checkpoint}
        assert forms == {"int8 per-row", "int4 per-row", "int4 g128", "int4 g32", "Q8_0", "Q4_K_M", "Q4_1", "Q4_0"}
