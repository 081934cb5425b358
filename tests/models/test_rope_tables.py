"""The tables of rotary embedding take memory as positions are used, and are the same however they came to be."""

import json
import sys
from pathlib import Path

import pytest
import torch

from nibblelm import LLM, rope
from nibblelm.config import MAX_POSITIONS
from nibblelm.errors import ConfigError
from nibblelm.rope import Rope
from nibblelm.rope_scaling import tables

sys.path.insert(0, str(Path(__file__).parent))
from oracle import save_random


def with_context(folder: Path, positions: int) -> Path:
    save_random("llama", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
    return folder


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
@pytest.mark.parametrize("positions", [1_000_000, MAX_POSITIONS])
def test_a_long_context_costs_nothing_until_it_is_used(positions: int, tmp_path: Path) -> None:
    folder = with_context(tmp_path / "m", positions)
    LLM(with_context(tmp_path / "short", 512), device="cpu").logits([1, 2, 3])  # what any model takes
    before = resident()
    llm = LLM(folder, device="cpu")
    assert llm.max_context == positions
    assert llm.logits(list(range(300))).isfinite().all()
    assert resident() - before < 20 << 20


@pytest.mark.parametrize("positions", [MAX_POSITIONS + 1, 2**31 - 1])
def test_an_absurd_context_is_refused_by_name(positions: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"max_position_embeddings {positions} is more than the supported 16777216"):
        LLM(with_context(tmp_path / "m", positions), device="cpu")


def test_rows_do_not_depend_on_when_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a recorded program, which reads them at the addresses it was recorded with."""
    folder = with_context(tmp_path / "m", 512)
    whole = LLM(folder, device="cpu", dtype="fp32")
    ids = torch.randint(0, 331, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = whole.logits(ids)
    monkeypatch.setattr(rope, "BLOCK", 8)
    runner = LLM(folder, device="cpu", dtype="fp32").runner
    runner.set_pages(0, [0])
    with torch.inference_mode():
        runner.prefill(ids[:3])
        for position in range(3, len(ids)):
            assert torch.equal(runner.decode([ids[position]], [0])[0], expected[position]), position
        ropes = Rope(whole.config, 128, torch.device("cpu"))
        for count in (1, 8, 9, 64, 100, 200):
            ropes.reach(count)
    table = ropes.of(0)
    assert table is not None
    assert whole.config.rope is not None
    for got, want in zip((table.cos, table.sin), tables(whole.config.rope, whole.config.head_dim, 0, 128), strict=True):
        assert torch.equal(got, want)
