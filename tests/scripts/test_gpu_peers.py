"""vLLM's rows beside ours: read as they come, kept when the rest fails, shown and drawn beside the same load."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Figures of one run of vLLM 0.25 on an H200: tok/s of decoding at a batch, of a prompt of 2,048, of the mixed load.
INT4 = {1: 273, 4: 1079, 8: 2128, 16: 4180, 32: 7281, 64: 10874, 128: 17619, 256: 22787}
FP8 = {1: 295, 16: 4503, 64: 14350, 256: 29290}
TREE = "csrc=a runtime=b models=c"

RUNNER = """
import argparse, json, os, time
parser = argparse.ArgumentParser()
for name in ("quant", "dir", "site", "tests", "batches"):
    parser.add_argument("--" + name)
parser.add_argument("--mp", action="store_true")
args = parser.parse_args()
assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == args.site
print("loading ...")
print(json.dumps({"test": "setup", "vllm": "0.25.0", "gpu": "a card", "quant": args.quant}))
print(json.dumps({"test": "decode", "quant": args.quant, "batch": 1, "tok_s": 273.0}), flush=True)
print(json.dumps({"test": "mixed", "quant": args.quant, "requests": 256, "output_tok_s": 8322.0}), flush=True)
if args.quant == "fp8":
    time.sleep(60)
"""


def peer_rows() -> list[dict[str, Any]]:
    rows = [("int4", "decode", *pair) for pair in INT4.items()] + [("fp8", "decode", *pair) for pair in FP8.items()]
    rows += [("int4", "prefill", 1, 37700), ("fp8", "prefill", 1, 65400)]
    rows += [("int4", "mixed", 256, 8322), ("fp8", "mixed", 256, 11638)]
    facts = {"engine": "vLLM", "version": "0.25.0", "device": "NVIDIA H200", "tree": TREE}
    return [{**facts, "quant": quant, "test": test, "batch": batch, "tok_s": rate} for quant, test, batch, rate in rows]


def our_row(**changes: Any) -> dict[str, Any]:
    row = {"shape": "llama-3-8b", "bits": 4, "group_size": -1, "activations": 16, "batch": 1, "depth": 0}
    row |= {"prompt_tokens": 128, "generated_tokens": 256, "achieved_gb_s": 1.0, "tree": TREE}
    row |= {"decode_tok_s": {"mean": 700.0}, "prefill_tok_s": {"mean": 20000.0}}
    return row | changes


def test_rows_stay_when_a_format_fails(tmp_path: Path, script: Callable[..., Any]) -> None:
    runner, site, record = tmp_path / "runner.py", tmp_path / "site", tmp_path / "peers.json"
    runner.write_text(RUNNER)
    site.mkdir()
    options = ["--runner", runner, "--site", site, "--json", record, "--tree", TREE, "--limit", 20]
    result = script("bench_gpu_peers.py", *options)
    assert result.returncode == 1, result.stderr
    assert "ended with -9" in result.stderr
    rows = json.loads(record.read_text())
    assert [(row["quant"], row["test"], row["batch"]) for row in rows] == [
        (quant, *load) for quant in ("int4", "fp8") for load in (("decode", 1), ("mixed", 256))
    ]
    assert {(row["engine"], row["version"], row["tree"]) for row in rows} == {("vLLM", "0.25.0", TREE)}
    assert [row["tok_s"] for row in rows] == [273, 8322] * 2
    assert script("bench_gpu_peers.py", *options, "--quant", "int4").returncode == 0
    again = json.loads(record.read_text())
    assert sorted(map(str, again)) == sorted(map(str, rows)), "a row takes the place of the one before"


def test_each_row_stands_beside_the_same_load() -> None:
    import show_record

    mixed = our_row(load="mixed", requests=256, prompt_tokens=1, output_tokens=1, output_tok_s={"mean": 8000.0})
    rows = [
        our_row(),
        our_row(batch=256),
        our_row(batch=4),
        our_row(depth=8192),
        our_row(prompt_tokens=2048, generated_tokens=16),
        our_row(shape="llama-3.2-1b"),
        our_row(tree="another"),
        mixed,
    ]
    lines = show_record.gpu(rows, peer_rows()).splitlines()
    assert lines[0].endswith("| vLLM 0.25.0 int4 / fp8 |")
    assert [line.split(" | ")[-1].removesuffix("|").strip() for line in lines[2:]] == [
        "273 / 295",
        "22,787 / 29,290",
        "1,079 / -",
        "",
        "37,700 / 65,400",
        "",
        "273 / 295",
        "8,322 / 11,638",
    ]
    header = show_record.gpu([our_row(tree="another")], peer_rows()).splitlines()[0]
    assert header.endswith("| vLLM 0.25.0 int4 / fp8, an earlier run |")
    assert "vLLM" not in show_record.gpu(rows)
    assert "| vLLM 0.25.0 int4 | mixed | 256 | 8,322 |" in show_record.vllm(peer_rows())


def test_lines_of_the_picture(tmp_path: Path) -> None:
    import plot_batches

    ours = [our_row(batch=b, decode_tok_s={"mean": 700.0 * b}) for b in (256, 1)]
    ours += [our_row(batch=16, activations=8), our_row(batch=256, activations=8), our_row(bits=8)]
    ours += [our_row(bits=8, batch=b, tree="another") for b in (64, 1)] + [our_row(batch=32, prompt_tokens=2048)]
    assert plot_batches.our_lines(ours) == {
        "NibbleLM int4 per row": [(1, 700.0), (256, 179200.0)],
        "NibbleLM int4 per row, 8-bit activations": [(16, 700.0), (256, 700.0)],
        "NibbleLM int8 per row (another tree)": [(1, 700.0), (64, 700.0)],
    }
    assert plot_batches.peer_lines(peer_rows()) == {
        "vLLM 0.25.0 int4": list(INT4.items()),
        "vLLM 0.25.0 fp8": list(FP8.items()),
    }
    pytest.importorskip("matplotlib", reason="the extra plot is not installed")
    for name, rows in (("e2e", ours), ("peers", peer_rows())):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
    picture = plot_batches.draw(tmp_path).read_text()
    assert "vLLM 0.25.0 fp8" in picture
    assert plot_batches.draw(tmp_path).read_text() == picture
