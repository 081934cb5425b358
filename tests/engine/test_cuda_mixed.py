"""Steps that compute prompts and the next tokens of a run together: the bits of the two steps."""

from typing import Any

import pytest
import torch

from nibblelm import ops
from nibblelm.decode_steps import SampledSteps
from nibblelm.executor import STEP_ROWS
from nibblelm.mixed_steps import PREPARED
from nibblelm.models import family
from nibblelm.ops import SamplingState
from nibblelm.pages import page_count
from nibblelm.prompt_steps import MIXED_ROWS, Prompt
from nibblelm.random_weights import RandomWeights
from nibblelm.runner import Runner

USABLE, REASON = ops.cuda_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=REASON)]

RAW: dict[str, Any] = {
    "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu", "hidden_size": 256,
    "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 5001, "max_position_embeddings": 4096, "rope_theta": 10000.0,
}  # fmt: skip
DEVICE, CAPACITY, VOCABULARY = torch.device("cuda"), 1024, 5001
PROMPTS = [[40], [64], [65, 30], [30, 30, 30, 30], [150, 200], [500], [1], [512]]
"""Tokens of prompts that are computed in one step, some of them as the second part of theirs."""


def runner(kv: torch.dtype, slots: int, dtype: torch.dtype = torch.bfloat16) -> Runner:
    module = family(RAW)
    model = module.Model(RandomWeights(DEVICE, dtype, 24, 4, -1), module.read_config(RAW), CAPACITY)
    made = Runner(model, DEVICE, kv, CAPACITY)
    made.reserve(slots, slots * page_count(CAPACITY))
    made.set_tables(
        {slot: range(slot * page_count(CAPACITY), (slot + 1) * page_count(CAPACITY)) for slot in range(slots)}
    )
    return made


def sampling(rows: int, wide: bool) -> SamplingState:
    state = SamplingState.greedy(rows, torch.device("cpu"), VOCABULARY if wide else 0)
    state.temperature.fill_(1.0)
    state.top_p.fill_(0.95)
    state.seeds.copy_(torch.arange(rows))
    if wide:
        state.presence.fill_(0.5)
    return state


@pytest.mark.parametrize("rows", [1, 3, 16, 48])
@pytest.mark.parametrize(
    ("kv", "dtype", "scored", "wide"),
    [
        (torch.bfloat16, torch.bfloat16, False, False),
        (torch.int8, torch.bfloat16, True, False),
        (torch.bfloat16, torch.bfloat16, False, True),
        (torch.float32, torch.float32, False, False),
    ],
)
def test_prompts_beside_a_run_have_the_bits_of_both(
    kv: torch.dtype, dtype: torch.dtype, scored: bool, wide: bool, rows: int
) -> None:
    draw = torch.Generator().manual_seed(rows)
    texts = torch.randint(5000, (rows + 4, CAPACITY), generator=draw).tolist()
    wanted = {rows - 1: 3} if scored else {}
    made = runner(kv, rows + 4, dtype)

    def outcome(together: bool) -> tuple[list[Any], int]:
        found, steps = list[Any](), list[bool]()
        for history in made.history:
            history.clear()
        for slot in range(rows):
            made.prefill(texts[slot][: 5 + 7 * slot % 300], slot)
        run = made.sampled_steps([7] * rows, list(range(rows)), sampling(rows, wide), wanted)
        run.launch()
        for at, counts in enumerate(PROMPTS):
            starts = [(at % 2) * 3 * n for n in range(len(counts))]
            for n, start in enumerate(starts):
                if start:
                    made.prefill(texts[rows + n][:start], rows + n)
            prompts = [
                Prompt(texts[rows + n][: start + count], rows + n, start)
                for n, (start, count) in enumerate(zip(starts, counts, strict=True))
            ]
            found.append([run.next(last=True), run.logprobs.get(rows - 1)])
            logits = made.prefill_beside(prompts, run) if together else None
            steps.append(logits is not None)
            found.append((made.prefill_together(prompts) if logits is None else logits).clone())
            run.launch()
        found += [[run.next(last=True), run.logprobs.get(rows - 1)] for _ in range(3)]
        return found, sum(steps)

    with torch.inference_mode():
        (want, none), *others = [outcome(together) for together in (False, True, True, True)]
    assert none == 0
    assert [joined for _, joined in others][1:] == [len(PROMPTS)] * 2, "the second time all sizes are captured"
    for got, _ in others:
        for ours, alone in zip(got, want, strict=True):
            assert torch.equal(ours, alone) if isinstance(ours, torch.Tensor) else ours == alone


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_a_run_is_followed_before_the_host_has_its_tokens(rows: int) -> None:
    """By one of the same step, whose rows are in another order and one of which is another's."""
    made, plain = runner(torch.bfloat16, rows + 1), sampling(rows, False)
    texts = torch.randint(5000, (rows + 1, 90), generator=torch.Generator().manual_seed(rows)).tolist()

    def begun() -> SampledSteps:
        for slot, history in enumerate(made.history):
            history.clear()
            made.prefill(texts[slot][: 20 + 3 * slot], slot)
        run = made.sampled_steps([7] * rows, list(range(rows)), sampling(rows, False))
        run.launch(last=True)
        return run

    with torch.inference_mode():
        run = begun()
        want = [run.next(last=True) for _ in range(4)]
        for _ in range(5):
            run = begun()
            order = [*range(1, rows), rows]  # the first leaves, one joins
            fed = torch.cat([run.hand_over(), torch.tensor([9], dtype=torch.int32, device=DEVICE)])[order]
            state = SamplingState.greedy(rows, torch.device("cpu"))
            for name in ("temperature", "top_p", "seeds"):
                getattr(state, name)[:-1] = getattr(plain, name)[1:]
            state.steps.fill_(1)
            positions = [len(made.history[slot]) + (slot < rows) for slot in order]
            after = made.sampled_steps([0] * rows, order, state, None, positions, fed)
            after.launch(last=True)
            got = [run.next(last=True)]
            after.fed = [*got[0][1:], 9]
            got += [after.next(last=True) for _ in range(3)]
            assert got[0] == want[0]
            assert [tokens[:-1] for tokens in got[1:]] == [tokens[1:] for tokens in want[1:]]
            assert [len(made.history[slot]) for slot in order] == [20 + 3 * s + (4 if s < rows else 3) for s in order]


def test_an_idle_engine_prepares_them() -> None:
    made, counts = runner(torch.bfloat16, 17), [count for count in STEP_ROWS["cuda"] if count <= 16]
    with torch.inference_mode():
        while made.prepare_sampled(counts, 16):
            pass
        free, _ = torch.cuda.mem_get_info()
        captured = 0
        while made.prepare_beside(counts):
            captured += 1
        print(f"{captured} programs took {(free - torch.cuda.mem_get_info()[0]) / 2**20:.1f} MiB")
        assert captured == len(counts) * len(PREPARED)
        assert set(PREPARED) <= set(MIXED_ROWS)
        run = made.sampled_steps([7] * 8, list(range(8)), sampling(8, False))
        assert made.prefill_beside([Prompt([5] * PREPARED[-1], 9)], run) is not None
        assert made.prefill_beside([Prompt([5] * (PREPARED[-1] + 1), 9)], run) is None
        assert made.prefill_beside([Prompt([5] * (MIXED_ROWS[-1] + 1), 9)], run) is None
