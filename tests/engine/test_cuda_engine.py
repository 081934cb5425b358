"""Generation on the GPU: the CPU's tokens, and the same tokens however they are computed."""

import gc
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nibblelm import LLM, SamplingParams, convert, decode_steps, ops
from nibblelm.engine import STEP_TOKENS
from nibblelm.errors import DeviceError
from nibblelm.executor import STEP_ROWS
from nibblelm.memory import require_memory
from nibblelm.models import family
from nibblelm.ops import SamplingState, cuda
from nibblelm.pages import page_count
from nibblelm.prompt_steps import Prompt, program_bytes
from nibblelm.random_weights import RandomWeights
from nibblelm.runner import Runner

USABLE, REASON = ops.cuda_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=REASON)]

DEMO = Path(__file__).resolve().parents[2] / "demo" / "stories-7m"
PROMPTS = ["Once upon a time", "The dog", "Lily and Ben went to the park. They saw", "A", "One day, a big red ball"]
UNSEEN = 4000
"""A token of the demo model that no story of these tests comes to."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not DEMO.is_dir():
        pytest.skip("the demo checkpoint is not beside these tests")
    folder = tmp_path_factory.mktemp("demo") / "int4"
    convert(DEMO, folder, bits=4)
    return folder


@pytest.fixture(scope="module")
def stories(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stories") / "int8"
    convert(data_dir / "checkpoints" / "stories260K", folder, bits=8)
    return folder


@pytest.mark.parametrize("name", ["demo", "stories"])
def test_same_tokens_as_the_cpu(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    cpu, gpu = (LLM(folder, device=d, dtype="fp32") for d in ("cpu", "cuda"))
    want = cpu.generate("Once upon a time", params).token_ids
    assert gpu.generate("Once upon a time", params).token_ids == want

    # bf16: the same until the CPU's two best logits are closer than the error of bf16 there
    rough = LLM(folder, device="cuda", dtype="bf16")
    got = rough.generate("Once upon a time", params).token_ids
    ids = cpu.encode("Once upon a time")
    exact, half = cpu.logits(ids + want), rough.logits(ids + want).cpu()
    error = (exact - half).abs().max(-1).values
    top = exact.topk(2).values
    near = [
        i
        for i in range(len(want))
        if top[len(ids) + i - 1, 0] - top[len(ids) + i - 1, 1] <= 2 * error[len(ids) + i - 1]
    ]
    first = near[0] if near else len(want)
    print(f"{name}: bf16 follows the CPU for at least {first} of {len(want)} tokens")
    assert got[:first] == want[:first]

    # and wherever they part, decode is as near to the CPU's logits as prefill is, in the mean of all positions
    rough.runner.set_pages(0, range(page_count(len(ids) + len(want))))
    with torch.inference_mode():
        rough.runner.prefill(ids)
        steps = torch.cat([rough.runner.decode([token], [0]).clone() for token in want]).cpu()
    error_of = [((logits - exact[len(ids) :]).norm(dim=-1)).mean() for logits in (steps, half[len(ids) :])]
    print(f"{name}: mean error of bf16 logits by decode {error_of[0]:.2e}, by prefill {error_of[1]:.2e}")
    assert 0 < error_of[0] <= 1.5 * error_of[1]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_graph_batch_and_stream_change_nothing(demo: Path, dtype: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    llm, eager = LLM(demo, device="cuda", dtype=dtype), LLM(demo, device="cuda", dtype=dtype, graph=False)
    alone = [eager.generate(p, params).token_ids for p in PROMPTS]
    for _ in range(20):
        assert [o.token_ids for o in llm.generate(PROMPTS, params)] == alone
        assert llm.generate(PROMPTS[2], params).token_ids == alone[2]
    for prompt, want in zip(PROMPTS, alone, strict=True):
        assert [piece.token_id for piece in llm.stream(prompt, params)] == want
    assert [o.token_ids for o in eager.generate(PROMPTS, params)] == alone


def test_batches_with_different_ends(demo: Path) -> None:
    """More prompts than slots, stopping at different places: requests come and go while steps are in flight."""
    llm = LLM(demo, device="cuda")
    prompts = [PROMPTS[i % 5] + " " * (i % 2) + "she" * (i % 3) for i in range(23)]
    params = SamplingParams(temperature=0, max_tokens=60, stop=["and", "."])
    together = [o.token_ids for o in llm.generate(prompts, params)]
    assert together == [llm.generate(p, params).token_ids for p in prompts]


def test_streams_in_turns_and_threads_change_nothing(demo: Path) -> None:
    """Each live call has programs, sampling state and a step in flight of its own."""
    llm = LLM(demo, device="cuda")
    greedy, sampled = (SamplingParams(temperature=t, seed=3, max_tokens=60, ignore_eos=True) for t in (0.0, 0.9))
    calls = [(prompt, params) for prompt in PROMPTS for params in (greedy, sampled)]
    alone = [llm.generate(prompt, params).token_ids for prompt, params in calls]
    streams = [llm.stream(prompt, params) for prompt, params in calls]
    first = [[next(stream).token_id for _ in range(7)] for stream in streams]
    assert [o.token_ids for o in llm.generate(PROMPTS, greedy)] == alone[::2]
    rest = [[piece.token_id for piece in pieces] for pieces in zip(*streams, strict=True)]
    assert [a + [step[i] for step in rest] for i, a in enumerate(first)] == alone
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda i: llm.generate(*calls[i % len(calls)]).token_ids, range(40)))
    assert got == alone * 4


def test_sampling_on_the_device_repeats_and_follows_the_seed(demo: Path) -> None:
    llm = LLM(demo, device="cuda", dtype="fp32")
    params = SamplingParams(
        temperature=0.9,
        top_k=40,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        seed=5,
        max_tokens=80,
    )
    first = llm.generate(PROMPTS, params)
    assert [o.token_ids for o in llm.generate(PROMPTS, params)] == [o.token_ids for o in first]
    assert llm.generate(PROMPTS[1], params).token_ids == first[1].token_ids
    # an end to hold back makes the host sample: the same draws, up to ties at rounding
    host = llm.generate(PROMPTS[0], params, stop_token_ids=[UNSEEN], min_tokens=80, ignore_eos=True).token_ids
    same = next((i for i, (a, b) in enumerate(zip(host, first[0].token_ids, strict=False)) if a != b), len(host))
    print(f"device and host samplers agree for {same} of {len(host)} tokens")
    assert same >= 20


def test_log_probabilities_leave_a_sequence_where_it_is(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens with and without, drawn a step ahead; the host's values, to fp32; the same bits alone and among
    others, with drafts and with a grammar that allows all."""
    llm = LLM(demo, device="cuda")
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=60, ignore_eos=True)
    want = [output.token_ids for output in llm.generate(PROMPTS, params)]
    counts = [None, 0, 1, 5, 20]
    each = [replace(params, logprobs=count, prompt_logprobs=count) for count in counts]
    alone = [llm.generate([prompt], own)[0] for prompt, own in zip(PROMPTS, each, strict=True)]
    with monkeypatch.context() as patch:
        patch.delattr(Runner, "decode")
        together = llm.generate(PROMPTS, each)
    drafted = LLM(demo, device="cuda", speculate="ngram").generate(PROMPTS, each)
    for outputs in (together, alone, drafted):
        assert [output.token_ids for output in outputs] == want
        assert [output.logprobs for output in outputs] == [output.logprobs for output in alone]
        assert [output.prompt_logprobs for output in outputs] == [output.prompt_logprobs for output in alone]
    greedy = replace(params, temperature=0.0, logprobs=5)
    held = replace(greedy, stop_token_ids=[UNSEEN], min_tokens=60)  # which the host looks up
    pairs = zip(llm.generate(PROMPTS, greedy), llm.generate(PROMPTS, held), strict=True)
    for ours, host in ((a, b) for output, other in pairs for a, b in zip(output.logprobs, other.logprobs, strict=True)):
        assert (ours.token_id, [i for i, _ in ours.top]) == (host.token_id, [i for i, _ in host.top])
        values, exact = ([one.logprob, *(x for _, x in one.top)] for one in (ours, host))
        assert values == pytest.approx(exact, abs=2e-5)


@pytest.mark.parametrize(("bits", "batch"), [(4, 1), (8, 3)])
def test_programmatic_launches_change_nothing(bits: int, batch: int) -> None:
    """A kernel that touches what a step changes before the kernel ahead is done shows here, and in no tool."""
    raw = {
        "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu", "hidden_size": 256,
        "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
        "vocab_size": 5000, "max_position_embeddings": 4096, "rope_theta": 10000.0,
    }  # fmt: skip
    device, steps = torch.device("cuda"), 2000
    module = family(raw)
    config = module.read_config(raw)
    model = module.Model(RandomWeights(device, torch.bfloat16, 24, bits, -1), config, steps + 8)
    prompts = [[3 + i, 1, 4, 1, 5] for i in range(batch)]
    state = SamplingState.greedy(batch, torch.device("cpu"))
    state.temperature.fill_(1.0)
    state.top_p.fill_(0.95)

    def generate(runner: Runner) -> list[list[int]]:
        for slot, prompt in enumerate(prompts):
            runner.prefill(prompt, slot)
        sampled = runner.sampled_steps([7] * batch, list(range(batch)), state)
        return [sampled.next(last=i == steps - 1) for i in range(steps)]

    runners = [Runner(model, device, torch.bfloat16, steps + 8) for _ in range(2)]
    with torch.inference_mode():
        for runner in runners:
            runner.reserve(batch)
        with cuda.programmatic_launch(False):
            want = generate(runners[0])
        assert len({token for step in want for token in step}) > 500
        for _ in range(20):
            assert generate(runners[1]) == want


def test_programs_of_rows_that_reach_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose rows grow goes from program to program, each captured when it is wanted, with the same tokens."""
    raw = {
        "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu", "hidden_size": 256,
        "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
        "vocab_size": 5000, "max_position_embeddings": 4096, "rope_theta": 10000.0,
    }  # fmt: skip
    device, module = torch.device("cuda"), family(raw)
    model = module.Model(RandomWeights(device, torch.bfloat16, 24, 4, -1), module.read_config(raw), 300)
    prompts, state = [[3 + i, 1, 4] * (1 + 9 * i) for i in range(3)], SamplingState.greedy(3, torch.device("cpu"))
    state.temperature.fill_(1.0)
    found = list[list[list[int]]]()
    with torch.inference_mode():
        for reaches, wanted in (((), {}), ((64, 128), {}), ((64, 128), {1: 2})):
            monkeypatch.setattr(decode_steps, "REACHES", reaches)
            runner = Runner(model, device, torch.bfloat16, 300)
            runner.reserve(3)
            for slot, prompt in enumerate(prompts):
                runner.prefill(prompt, slot)
            run = runner.sampled_steps([7] * 3, [0, 1, 2], state, wanted)
            assert run.step.programs is not None
            found.append([run.next(last=i == 199) for i in range(200)])
            assert [*run.step.programs._captured] == ([64, 128, 300] if reaches else [300])
    assert found[1] == found[0] == found[2]
    assert len({token for step in found[0] for token in step}) > 100


def test_prompts_one_behind_the_other_change_nothing() -> None:
    """Programs of two sizes, each launched before the device has read the inputs of those before; tables go with the
    prompts, of which others have the pages next."""
    raw = {
        "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu", "hidden_size": 256,
        "intermediate_size": 768, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
        "vocab_size": 5000, "max_position_embeddings": 4096, "rope_theta": 10000.0,
    }  # fmt: skip
    device, capacity = torch.device("cuda"), 2048
    model = family(raw).Model(RandomWeights(device, torch.bfloat16, 24, 4, -1), family(raw).read_config(raw), capacity)
    ids = torch.randint(5000, (24, capacity), generator=torch.Generator().manual_seed(0)).tolist()
    pages = page_count(capacity)
    held = [range(i % 3 * pages, (i % 3 + 1) * pages) for i in range(len(ids))]
    lengths = [(700, 130)[i % 5 == 4] for i in range(len(ids))]

    def logits(runner: Runner, wait: bool) -> list[torch.Tensor]:
        runner.reserve(2, 3 * pages)
        results = []
        for row, length, own in zip(ids, lengths, held, strict=True):
            results.append(runner.prefill_together([Prompt(row[:length], 1, 0, list(own))]))
            if wait:
                torch.cuda.synchronize()
        return results

    with torch.inference_mode():
        want, got = (
            logits(Runner(model, device, torch.bfloat16, capacity, graph), not graph) for graph in (False, True)
        )
    assert len({float(row[0, 0]) for row in want}) > len(ids) // 2
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_programs_keep_what_is_planned(demo: Path) -> None:
    """All numbers of rows, with drafts, log-probabilities and prompts among them, in memory that they have in common:
    no more than was planned, and what each gives stays the same."""
    llm = LLM(demo, device="cuda", max_context=256, speculate="ngram")
    runner, results = llm.runner, list[list[torch.Tensor]]()
    with torch.inference_mode():
        runner.set_tables({slot: [slot] for slot in range(1, 256)} | {0: [0, 256]})
        for _ in range(3):  # the second time steps of prompts are captured, the third all are there
            results.append([])
            for rows in STEP_ROWS["cuda"]:
                for wanted in ({}, {rows - 1: 3}):
                    for history in runner.history:
                        history.clear()
                    state = SamplingState.greedy(rows, torch.device("cpu"))
                    steps = runner.sampled_steps([5] * rows, list(range(rows)), state, wanted)
                    results[-1].append(torch.tensor(steps.next(last=True)))
                    results[-1].append(torch.tensor([value for one in steps.logprobs.values() for _, value in one.top]))
                apart = runner.decode([7] * rows, range(rows), [1] * rows).clone()
                few = min(rows, 128)
                related = runner.decode([9] * few, [0] * few, range(few)).clone()
                short = [11] * min(64, 2048 // rows)
                results[-1] += [apart, related, runner.prefill_together([Prompt(short, slot) for slot in range(rows)])]
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], again, strict=True))
    pool = tuple(runner._pool.handle)
    held = sum(part["total_size"] for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) == pool)
    held += sum(result.nbytes for result in runner._results.values())
    planned = program_bytes(llm.config, llm.device, llm._kept_logits(128))
    print(f"programs keep {held / 2**20:.1f} MiB of {planned / 2**20:.1f} planned")
    assert 0 < held <= planned


def test_prompts_find_their_programs_prepared(demo: Path) -> None:
    """An engine that nobody asks anything makes what the first prompts of all lengths would wait for, and those that
    then generate."""
    llm, eager = LLM(demo, device="cuda"), LLM(demo, device="cuda", graph=False)
    prompts = [PROMPTS[2] * count for count in (1, 2, 5, 11, 23, 40)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=1.0)
    want = [eager.generate(prompt, params).token_ids for prompt in prompts]
    llm.engine.start()
    deadline = time.monotonic() + 60
    while not llm.engine.prepared and time.monotonic() < deadline:
        time.sleep(0.01)
    assert llm.engine.prepared
    made = {key: list(steps) for key, steps in llm.runner._prompt_steps.items()}
    assert {len(steps) for steps in made.values()} == {2}
    assert max(made)[0] == STEP_TOKENS["cuda"][1]
    steps = dict(llm.runner._steps)
    assert {count for count, _ in steps} == set(STEP_ROWS["cuda"])
    assert [llm.generate(prompt, params).token_ids for prompt in prompts] == want
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda prompt: llm.generate(prompt, params).token_ids, prompts)) == want
    assert {key: set(map(id, llm.runner._prompt_steps[key])) for key in made} == {
        key: set(map(id, steps)) for key, steps in made.items()
    }
    assert all(llm.runner._steps[key] is step for key, step in steps.items())
    assert len(llm.runner._steps) == len(steps)


def test_context_limit(demo: Path) -> None:
    llm = LLM(demo, device="cuda", max_context=48)
    output = llm.generate("Once upon a time", max_tokens=-1, temperature=0, ignore_eos=True)
    assert (output.finish_reason, output.limit) == ("length", "context")
    assert output.timings.prompt_tokens + output.timings.generated_tokens == 48


def test_a_dropped_model_gives_its_memory_back_at_once(demo: Path) -> None:
    """Without a garbage collection: the next model may need that memory."""
    gc.disable()
    try:
        held = torch.cuda.memory_allocated()
        llm = LLM(demo, "cuda")
        llm.generate(PROMPTS * 2, max_tokens=40, logprobs=1)
        llm.generate(PROMPTS, max_tokens=40, repetition_penalty=1.1)
        next(llm.stream(PROMPTS[0], max_tokens=40))
        assert torch.cuda.memory_allocated() > held
        del llm
        assert torch.cuda.memory_allocated() == held
    finally:
        gc.enable()


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other processes use the cards: run it without -n")
def test_a_card_has_all_its_memory_back(demo: Path) -> None:
    """By the driver's count, when one model after another is dropped and what torch keeps of them is given back."""
    LLM(demo, "cuda").generate(PROMPTS[0], max_tokens=40)
    ops.backend(torch.device("cuda", 0)).reclaim(torch.device("cuda", 0))
    free = torch.cuda.mem_get_info()[0]
    pages = [LLM(demo, "cuda").kv_pages for _ in range(3)]
    assert pages == pages[:1] * 3, "what torch keeps of the one before counts as free"
    ops.backend(torch.device("cuda", 0)).reclaim(torch.device("cuda", 0))
    assert torch.cuda.mem_get_info()[0] >= free


def test_memory_is_refused_with_numbers() -> None:
    with pytest.raises(DeviceError, match=r"100000\.00 GiB are needed .* free"):
        require_memory(torch.device("cuda"), "Ask for less.", cache=100000 << 30)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one card: the second one is not there")
def test_everything_is_on_the_card_that_was_asked_for(demo: Path) -> None:
    """The same tokens on both cards, one after another and at the same time, and nothing of one on the other."""
    options = dict(max_tokens=32, temperature=0)
    held = [torch.cuda.memory_allocated(card) for card in (0, 1)]
    second = LLM(demo, "cuda:1")
    texts = [out.text for out in second.generate(PROMPTS, **options)]
    assert second.device == torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == held[0]
    assert torch.cuda.memory_allocated(1) > held[1]
    first = LLM(demo, "cuda:0")
    assert [out.text for out in first.generate(PROMPTS, **options)] == texts
    assert torch.equal(first.logits(range(1, 60)).cpu(), second.logits(range(1, 60)).cpu())
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda llm: [out.text for out in llm.generate(PROMPTS * 4, **options)], (first, second)))
    assert both == [texts * 4] * 2


FRESH = """
import sys
import torch
from nibblelm import LLM
for card in (0, 1):
    torch.zeros(1, device=f"cuda:{card}")  # a context takes memory of its own
before = [torch.cuda.mem_get_info(card)[0] for card in (0, 1)]
llm = LLM(sys.argv[1], "cuda:1")
llm.generate(["Once upon a time", "The dog"] * 8, max_tokens=64, temperature=0.8, seed=1)
llm.logits(range(1, 300))
print(*(free - torch.cuda.mem_get_info(card)[0] for card, free in zip((0, 1), before)))
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one card: the second one is not there")
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other processes use the cards: run it without -n")
def test_the_other_card_loses_no_memory(demo: Path) -> None:
    """By the driver's count, which has what torch did not allocate as well: programs, graphs, weights and pages."""
    result = subprocess.run([sys.executable, "-c", FRESH, str(demo)], capture_output=True, text=True, check=True)
    other, own = map(int, result.stdout.split())
    assert own > 400 << 20, "pages for 256 sequences alone are 512 MiB"
    assert other < 4 << 20, "the driver counts in pages of 2 MiB"
