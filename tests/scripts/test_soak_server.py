"""scripts/soak_server.py in little, and its table."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def test_bad_requests_and_a_soak(script: Callable[..., Any], demo: Path, tmp_path: Path) -> None:
    """One round of the load: whether memory grows in it says nothing, so that the rest is looked at."""
    import show_record

    options = ("--model", demo, "--bad", 100, "--minutes", 0, "--json", "serve.json", "--tree", "t")
    result = script("soak_server.py", *options)
    bad, soak = json.loads((tmp_path / "serve.json").read_text())
    assert bad["holds"], result
    assert sum(bad["statuses"].values()) == bad["requests"] == 100
    assert bad["statuses"]["401"] > 0
    assert set(bad["statuses"]) <= {"0", "200", "400", "401", "404", "408", "413", "415", "422"}
    assert (soak["requests"], soak["failed"], soak["pages_in_use"]) == (200, 0, 0)
    assert len(soak["memory_bytes"]) == 1
    assert result.returncode == 0, result
    shown = show_record.held_out([bad, soak])
    assert "| bad requests | 100 in" in shown
    assert "| soak | 200 in" in shown
