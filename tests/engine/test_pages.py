"""A runner on pages that are handed out one by one: the logits of one whose slots have all of theirs in order."""

from pathlib import Path

import pytest
import torch

from nibblelm import LLM
from nibblelm.ops import PAGE, cuda
from nibblelm.runner import Runner

DEMO = Path(__file__).resolve().parents[2] / "demo" / "stories-7m"
USABLE, REASON = cuda.available()
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=f"no CUDA: {REASON}")]),
]
pytestmark = pytest.mark.skipif(not DEMO.is_dir(), reason=f"no demo checkpoint at {DEMO}")


def runners(device: str, pages: int) -> tuple[Runner, Runner]:
    """Two runners of one model with two slots of 4 pages: with all of them, and with a pool of so many."""
    llm = LLM(DEMO, device=device)
    made = [Runner(llm.runner.model, llm.device, llm.kv_dtype, 200) for _ in range(2)]
    made[0].reserve(2)
    made[1].reserve(2, pages)
    return made[0], made[1]


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 4000, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_pages_are_handed_out_as_sequences_grow(device: str) -> None:
    """Two sequences, a page at a time in no order, under programs that were captured before."""
    whole, paged = runners(device, 7)
    prompts = tokens(60, 0), tokens(130, 1)
    held = [[4], [6, 0, 3]]
    for slot in range(2):
        paged.set_pages(slot, held[slot])
        want, got = (runner.prefill(prompts[slot], slot).clone() for runner in (whole, paged))
        assert torch.equal(got, want)
    for step in range(60):
        for slot, page in ((0, 1), (1, 5)):
            if len(paged.history[slot]) == len(held[slot]) * PAGE:
                held[slot].append(page)
                paged.set_pages(slot, held[slot])
        ids = tokens(2, 2 + step)
        want, got = (runner.decode(ids, [0, 1]).clone() for runner in (whole, paged))
        assert torch.equal(got, want), step
    assert held == [[4, 1], [6, 0, 3]]


@pytest.mark.parametrize("device", DEVICES)
@torch.inference_mode()
def test_slots_may_share_the_pages_of_a_prefix(device: str) -> None:
    whole, paged = runners(device, 4)
    prefix = tokens(2 * PAGE, 0)
    prompts = prefix + tokens(40, 1), prefix + tokens(50, 2)
    paged.set_pages(0, [3, 1, 0])
    paged.set_pages(1, [3, 1, 2])
    want = [whole.prefill(ids, slot, 0).clone() for slot, ids in enumerate(prompts)]
    assert torch.equal(paged.prefill(prompts[0], 0), want[0])
    assert torch.equal(paged.prefill(prompts[1], 1, start=2 * PAGE), want[1])  # of the prefix it computed nothing
    ids = tokens(2, 3)
    assert torch.equal(paged.decode(ids, [0, 1]), whole.decode(ids, [0, 1]))


def test_pages_that_are_not_there_are_refused() -> None:
    _, paged = runners("cpu", 3)
    for pages in ([3], [-2], [0, 1, 2, 0, 1]):
        with pytest.raises(ValueError, match="takes at most 4 of the pages 0 to 2"):
            paged.set_pages(0, pages)
    with torch.inference_mode(), pytest.raises(ValueError, match="outside the cache"):
        paged.prefill(tokens(5, 0))
    paged.set_pages(0, [2])
    with torch.inference_mode(), pytest.raises(ValueError, match="outside the cache"):
        paged.prefill(tokens(PAGE + 1, 0))
