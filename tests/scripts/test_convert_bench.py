"""The time of a calibrated conversion, measured on a small random shape: some layers, a killed one, one cut short."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LAYERS = 6
TINY = {
    "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 5000,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def bench(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """`bench(*arguments)`: the rows that the script records."""
    from nibblelm.shapes import SHAPES

    monkeypatch.setitem(SHAPES, "tiny", TINY)
    record = tmp_path / "convert.json"

    def run(*arguments: str) -> list[dict[str, Any]]:
        import bench_convert

        fixed = ["--shape", "tiny", "--device", "cpu", "--samples", "2", "--work", str(tmp_path), "--json", str(record)]
        monkeypatch.setattr(sys, "argv", ["bench_convert.py", *fixed, *arguments])
        assert bench_convert.main() == 0
        return json.loads(record.read_text())

    return run


@pytest.mark.slow
def test_time_of_some_layers_and_a_killed_conversion(bench: Callable[..., list[dict[str, Any]]]) -> None:
    import show_record

    rows = bench("--layers", "3", "--resume-layers", "2", "--method", "gptq")
    assert [(row["test"], row["layers"]) for row in rows] == [("time", 3), ("resume", 2)]
    some, killed = rows
    assert (some["finished"], some["layers_done"], some["extrapolated"]) == (True, 3, True)
    assert some["whole_s"] == pytest.approx(some["seconds"] + (LAYERS - 3) * some["layer_s"])
    assert some["host_VmRSS_bytes"] >= some["host_RssAnon_bytes"] > 50e6
    assert killed["identical"]
    shown = show_record.conversions(rows)
    assert f"{some['whole_s']:.0f} s, extrapolated from 3 layers" in shown
    assert "resumed: identical" in shown


@pytest.mark.slow
def test_a_conversion_that_takes_too_long_is_ended(bench: Callable[..., list[dict[str, Any]]]) -> None:
    (row,) = bench("--resume-layers", "0", "--method", "awq", "--limit", "1")
    assert not row["finished"]
    assert row["extrapolated"]
    assert row["layers_done"] < LAYERS
