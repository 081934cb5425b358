"""`kv`: what it means, what it takes, and what int8 costs in perplexity."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nibblelm import LLM, SamplingParams, ops
from nibblelm.cli import main
from nibblelm.engine import numeric_types
from nibblelm.errors import RequestError
from nibblelm.evaluation import score, tokenize, windows
from nibblelm.kv_cache import KVCache, bytes_per_page, bytes_per_token
from nibblelm.ops import PAGE, Int8Pages

FP32, BF16, INT8 = torch.float32, torch.bfloat16, torch.int8
DEMO = Path(__file__).resolve().parents[2] / "demo" / "stories-7m"
SEPARATOR = "<|endoftext|>"
USABLE, REASON = ops.cuda_available()
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")]),
]


@pytest.fixture(scope="module")
def stories(data_dir: Path) -> Path:
    return data_dir / "checkpoints" / "stories260K"


@pytest.mark.parametrize(
    ("dtype", "kv", "cache"),
    [
        ("auto", "auto", BF16),
        ("bf16", "auto", BF16),
        ("fp32", "auto", FP32),
        ("fp32", "bf16", BF16),
        ("auto", "bf16", BF16),
        ("auto", "int8", INT8),
        ("fp32", "int8", INT8),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_it_means(device: str, dtype: str, kv: str, cache: torch.dtype) -> None:
    hidden, _, bits = numeric_types(dtype, torch.device(device))
    assert numeric_types(dtype, torch.device(device), None, kv) == (hidden, cache, bits)


@pytest.mark.parametrize("kv", ["int4", "fp8", "INT8", "", None, 8])
def test_others_are_refused(kv: Any, stories: Path) -> None:
    with pytest.raises(RequestError, match=rf"kv {kv!r} is not supported; use auto .*, bf16 or int8"):
        LLM(stories, "cpu", kv=kv)


@pytest.mark.usefixtures("quick_bench")
def test_flag_of_every_command(stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("Once upon a time there was a dog.")
    commands = {
        "bench": ["bench", "-m", str(stories), "--prompt-tokens", "70", "--gen-tokens", "4", "--json"],
        "eval": ["eval", str(stories), "--text", str(tmp_path / "text.txt"), "--json"],
        "generate": ["generate", "-m", str(stories), "-p", "Once", "-n", "8", "--temp", "0", "--json"],
    }
    found: dict[str, list[Any]] = {name: [] for name in commands}
    for kv in ("auto", "int8"):
        for name, command in commands.items():
            assert main([*command, "--device", "cpu", "--kv", kv]) == 0
            found[name].append(json.loads(capsys.readouterr().out))
    assert [row["kv"] for row in found["bench"]] == ["bf16", "int8"]
    assert [figures["protocol"]["kv"] for figures in found["eval"]] == ["auto", "int8"]
    assert found["eval"][0]["ppl"] != found["eval"][1]["ppl"]
    for command in (*commands.values(), ["chat", "-m", str(stories)], ["serve", str(stories)]):
        with pytest.raises(SystemExit, match="2"):
            main([*command, "--kv", "int4"])
        assert "--kv: invalid choice" in capsys.readouterr().err


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [FP32, BF16, INT8])
def test_a_cache_takes_what_is_planned(dtype: torch.dtype, device: str) -> None:
    layers, heads, width, pages = 3, 2, 64, 50
    on = torch.device(device)
    cache = KVCache(layers, 2, heads, 200, width, dtype, on, pages)  # what a first one takes besides does not count
    del cache
    gc.collect()
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    cache = KVCache(layers, 2, heads, 200, width, dtype, on, pages)
    planned = pages * bytes_per_page(layers, heads, width, dtype, on)
    if device == "cuda":
        assert torch.cuda.memory_allocated() - before == pytest.approx(planned, rel=0.03)
    else:
        pools = [
            t for p in cache.keys + cache.values for t in ([p.codes, p.scales] if isinstance(p, Int8Pages) else [p])
        ]
        assert sum(pool.nbytes for pool in pools) == planned
    stored = bytes_per_token(layers, heads, width, dtype)
    assert stored == {FP32: 1536 * 2, BF16: 1536, INT8: 768 + 2 * layers * heads * 4}[dtype]
    assert planned - pages * PAGE * stored == (
        pages * PAGE * 2 * heads * width * 2 if (device, dtype) == ("cuda", INT8) else 0
    )


def test_the_same_memory_holds_more_tokens(stories: Path) -> None:
    """4 thirds of them for heads of 8 values, whose scales weigh most; fewer pages than are wanted change nothing."""
    alone = LLM(stories, "cpu", kv="int8")
    memory = 12 * PAGE * alone.kv_bytes_per_token
    small, wide = (LLM(stories, "cpu", kv=kv, kv_memory=memory) for kv in ("int8", "auto"))
    assert (small.kv_pages, wide.kv_pages) == (12, 9)
    assert small.kv_bytes == memory
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=150, ignore_eos=True)
    prompts = [f"{start} {i}" for i in range(4) for start in ("Once upon a time", "The dog", "Lily and Ben")]
    want = [alone.generate(prompt, params).token_ids for prompt in prompts]
    assert [output.token_ids for output in small.generate(prompts, params)] == want
    assert want != [output.token_ids for output in wide.generate(prompts, params)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["demo", "stories260K"])
def test_perplexity_is_that_of_bf16(name: str, device: str, data_dir: Path) -> None:
    """Within 0.3 %, on the stories that the demo model was not trained on."""
    folder = DEMO if name == "demo" else data_dir / "checkpoints" / name
    if not folder.is_dir():
        pytest.skip(f"no checkpoint at {folder}")
    text = (data_dir / "text" / "tinystories_sample_2MiB.txt").read_text().split(SEPARATOR)
    held_out = [story for story in text if story.strip()][-115:]
    int8, bf16 = (LLM(folder, device, "bf16", kv=kv) for kv in ("int8", "auto"))
    prefix, documents = tokenize(int8.tokenizer, SEPARATOR.join(held_out), SEPARATOR)
    figures = score(windows(prefix, documents, 512, None), int8.logits, bf16.logits)
    print(f"{name} on {device}: {figures['against_ppl']:.4f} to {figures['ppl']:.4f}, KL {figures['kl_mean']:.2g}")
    assert figures["kl_mean"] > 0
    assert figures["ppl"] == pytest.approx(figures["against_ppl"], rel=0.003)
