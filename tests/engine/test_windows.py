"""Models whose layers all have a sliding window: pages before it are given back, and nothing of the output changes."""

import json
import sys
from pathlib import Path

import pytest
import torch

from nibblelm import LLM, SamplingParams
from nibblelm.errors import RequestError
from nibblelm.ops import PAGE, Int8Pages, cuda
from nibblelm.pages import NO_PAGE, page_count
from nibblelm.runner import Runner
from nibblelm.scheduler import most_pages

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
from oracle import load_reference, relative_error, save_random

USABLE, REASON = cuda.available()
GPU = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")]
WINDOW, CONTEXT = 150, 900
IDS = torch.randint(0, 331, (CONTEXT,), generator=torch.Generator().manual_seed(7)).tolist()
ERROR = 2e-4  # of logits, relative: as tests/models has it for fp32


def windowed(name: str, folder: Path) -> Path:
    """A random checkpoint with a window of a few pages."""
    save_random(name, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"sliding_window": WINDOW, "max_position_embeddings": CONTEXT}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return windowed("mistral", tmp_path_factory.mktemp("windows") / "mistral")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("speculate", [None, "ngram"])
def test_a_pool_that_holds_none_of_the_sequences_changes_nothing(folder: Path, device: str, speculate: str) -> None:
    """Prompts longer than window and pool, with a beginning in common; each ends with more tokens than the pool holds,
    and all together run out of pages."""
    prompts = [IDS[:500], IDS[:30], IDS[:400] + IDS[:90], IDS[:210], [*IDS[:500], 1]]
    params = [
        SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, max_tokens=330, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=4, max_tokens=250, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0.9, seed=5, max_tokens=200, ignore_eos=True, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, prompt_logprobs=1),
    ]
    alone = LLM(folder, device, "fp32", max_sequences=1)
    want = [alone.generate([prompt], own)[0] for prompt, own in zip(prompts, params, strict=True)]
    page = PAGE * alone.kv_bytes_per_token
    small = LLM(folder, device, "fp32", max_context=CONTEXT, kv_memory=6 * page, speculate=speculate)
    assert small.kv_pages == 6
    got = small.generate(prompts, params)
    assert [output.token_ids for output in got] == [output.token_ids for output in want]
    assert [(o.logprobs, o.prompt_logprobs) for o in got] == [(o.logprobs, o.prompt_logprobs) for o in want]
    scheduler = small.engine.scheduler
    assert scheduler.preemptions > 0
    assert scheduler.pool.available == 6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
def test_tokens_are_those_of_the_source(folder: Path, device: str) -> None:
    """Each token is transformers' first choice after the same tokens, or as good within the error of logits."""
    page = PAGE * LLM(folder, device, "fp32", max_context=PAGE).kv_bytes_per_token
    llm = LLM(folder, device, "fp32", max_context=CONTEXT, kv_memory=4 * page, max_sequences=1)
    output = llm.generate([IDS[:400]], temperature=0, max_tokens=300, ignore_eos=True, logprobs=0)[0]
    with torch.inference_mode():
        want = load_reference(folder)(torch.tensor([IDS[:400] + output.token_ids])).logits[0, 399:-1]
    assert relative_error(llm.logits(IDS[:400] + output.token_ids)[399:-1].cpu(), want).max() <= ERROR
    room = 2 * ERROR * want.norm(dim=-1)
    chosen = want.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    assert (want.amax(-1) - chosen <= room).all()
    assert output.logprobs is not None
    reported = torch.tensor([sampled.logprob for sampled in output.logprobs])
    assert ((chosen - want.logsumexp(-1) - reported).abs() <= room).all()


@pytest.mark.parametrize(
    ("name", "device", "dtype", "kv"),
    [
        ("mistral", "cpu", "fp32", "auto"),
        ("mistral", "cpu", "auto", "auto"),
        ("starcoder2", "cpu", "auto", "int8"),
        *[
            pytest.param(f"mistral-of-{size}", "cuda", "bf16", kv, marks=GPU)
            for size in (64, 128)
            for kv in ("auto", "int8")
        ],
        pytest.param("mistral", "cuda", "fp32", "auto", marks=GPU),
    ],
)
@torch.inference_mode()
def test_pages_before_the_window_are_not_read(name: str, device: str, dtype: str, kv: str, tmp_path: Path) -> None:
    """Chunks of a prompt, tokens and drafts, with NaN where pages were given back and where CUDA would read instead."""
    llm = LLM(windowed(name, tmp_path / "model"), device, dtype, kv=kv, max_context=CONTEXT, max_sequences=1)
    whole, paged = (Runner(llm.runner.model, llm.device, llm.kv_dtype, CONTEXT) for _ in range(2))
    pages = page_count(CONTEXT) + 1
    whole.reserve(1)
    paged.reserve(1, pages)
    held = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(1)).tolist()
    poison(paged, [pages - 1])

    def give_back(position: int) -> None:
        unseen = max((position + 1 - WINDOW) // PAGE, 0)
        poison(paged, held[:unseen])
        paged.set_pages(0, [NO_PAGE] * unseen + held[unseen:])

    first = 0
    for last in (140, 149, 151, 300, 301, 337, 500):
        give_back(first)
        want, got = (runner.prefill(IDS[:last], start=first).clone() for runner in (whole, paged))
        assert torch.equal(got, want), last
        first = last
    while first + 4 < 700:
        give_back(first)
        rows = 1 if first % 9 else 4
        places = list(range(first, first + rows))
        want, got = (r.decode(IDS[first : first + rows], [0] * rows, places).clone() for r in (whole, paged))
        assert torch.equal(got, want), first
        first += rows


def poison(runner: Runner, pages: list[int]) -> None:
    for pool in [*runner.cache.keys, *runner.cache.values]:
        for tensor in [pool.scales, pool.unpacked] if isinstance(pool, Int8Pages) else [pool]:
            if tensor is not None:
                tensor[pages] = torch.nan


def test_the_pages_that_are_planned(folder: Path) -> None:
    """Unasked what a sequence has at a time; a context has to have its window, not all of itself."""
    llm = LLM(folder, "cpu", max_sequences=2)
    assert llm.config.window == WINDOW
    assert llm.kv_pages == 2 * most_pages(512, WINDOW) < 2 * page_count(CONTEXT)
    page = PAGE * llm.kv_bytes_per_token
    assert LLM(folder, "cpu", kv_memory=4 * page).max_context == CONTEXT
    assert LLM(folder, "cpu", kv_memory=3 * page).max_context == 3 * PAGE
    with pytest.raises(RequestError, match="hold 192 tokens"):
        LLM(folder, "cpu", kv_memory=3 * page, max_context=CONTEXT)
