"""The cost of HTTP, measured on a small random shape: every row is there, and counts what the server counted."""

import json
import sys
from pathlib import Path

import pytest
import torch

import nibblelm
import nibblelm.benchmark

TINY = {
    "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a shape that is measured in no time."""
    from nibblelm.shapes import SHAPES

    monkeypatch.setitem(SHAPES, "tiny", TINY)
    return "tiny"


@pytest.mark.slow
def test_every_row_of_a_shape(tiny: str, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_serve
    import show_record

    record = tmp_path / "serve.json"
    options = ["--shape", tiny, "--device", "cpu", "--kv-memory", "16M", "--requests", "4", "--repeats", "1"]
    options += ["--seconds", "0.5", "--places", "8", "--work", str(tmp_path), "--json", str(record), "--tree", "a tree"]
    monkeypatch.setattr(sys, "argv", ["bench_serve.py", *options])
    assert bench_serve.main() == 0
    rows = {(row["test"], row["model"], row.get("kind")): row for row in json.loads(record.read_text())}
    assert set(rows) == {
        ("ready", "stories-7m", None),
        *((test, "tiny", None) for test in ("ready", "first token", "saturation", "steady")),
        *(("mixed", "tiny", kind) for kind in ("whole", "streams")),
    }
    assert all(row["tree"] == "a tree" and row["device"] == "cpu" for row in rows.values())
    steady = rows["steady", "tiny", None]
    assert steady["rate"] == pytest.approx(0.8 * rows["saturation", "tiny", None]["requests_s"])
    assert steady["itl_p99_of_p50"] == pytest.approx(steady["itl_p99_ms"] / steady["itl_p50_ms"])
    shown = show_record.serve(list(rows.values()))
    assert [line.split(" | ")[1] for line in shown.splitlines()[2:5]] == ["ready", "ready", "first token"]
    assert shown.count("p99") == 2
    record.unlink()
    monkeypatch.setattr(sys, "argv", ["bench_serve.py", *options, "--test", "mixed", "--limit", "0"])
    assert bench_serve.main() == 1, "what there was no time for is not silent"
    assert not record.exists(), "of the start, which was not asked for"
    monkeypatch.setattr(bench_serve.nibblelm, "LLM", None)  # what starts alone needs no engine beside it
    monkeypatch.setattr(sys, "argv", ["bench_serve.py", *options, "--test", "ready"])
    assert bench_serve.main() == 0
    assert {row["test"] for row in json.loads(record.read_text())} == {"ready"}


def test_a_pretended_card_has_tests_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    import bench_serve

    monkeypatch.setattr(sys, "argv", ["bench_serve.py", "--pretend", "--test", "mixed"])
    with pytest.raises(SystemExit, match="2"):
        bench_serve.main()
    assert "--pretend has tests of its own" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_card_that_is_pretended(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench_serve

    record = tmp_path / "pretended.json"
    options = ["--pretend", "--requests", "4", "--repeats", "1", "--work", str(tmp_path), "--json", str(record)]
    monkeypatch.setattr(sys, "argv", ["bench_serve.py", *options])
    assert bench_serve.main() == 0
    mixed, first = json.loads(record.read_text())
    assert mixed["output_tokens"] == sum(output for _, output in nibblelm.benchmark.mixed_lengths(4))
    assert mixed["cost"] == pytest.approx(1 - mixed["http_tok_s"] / mixed["engine_tok_s"])
    assert mixed["http_loop_us"] > mixed["engine_loop_us"], "streams are written by the loop"
    assert 0 < mixed["http_card_busy"] <= 1
    assert min(first["http_ms"], first["engine_ms"]) > 0


def test_every_token_of_the_made_vocabulary_has_text(tmp_path: Path) -> None:
    import bench_cpu_peers
    import bench_serve

    bench_cpu_peers.make_checkpoint(TINY, tmp_path, max_shard=100_000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    (tmp_path / "tokenizer.json").write_text(bench_serve.word_tokenizer(TINY["vocab_size"]))
    llm = nibblelm.LLM(tmp_path, device="cpu")
    output = llm.generate([1, 500, 37], max_tokens=40, temperature=1.0, seed=1, ignore_eos=True)
    assert len(output.text.split()) == 40
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(llm.encode("time room right")) == " time room right"
    assert torch.isfinite(llm.logits(range(50))).all()
