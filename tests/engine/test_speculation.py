"""Drafts change no token, whoever makes them: what a model says with them is what it says without.

`--schedules N` compares N / 2 prompts (`make check-long`: 1,000).
"""

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nibblelm import LLM, GenerationOutput, SamplingParams, choosing, convert, ops
from nibblelm.engine import STEP_TOKENS
from nibblelm.engine_core import Engine
from nibblelm.errors import RequestError
from nibblelm.sampler import Sampler
from nibblelm.scheduler import Scheduler, Sequence
from nibblelm.speculation import STEP_COST, Drafter, PromptLookup, Speculation

DEMO = Path(__file__).resolve().parents[2] / "demo" / "stories-7m"
USABLE, REASON = ops.cuda_available()
DEVICES = [
    "cpu",
    "cpu-draws",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=REASON)]),
]
WORDS = ["the dog", "a little girl", "Lily", "the sea ☀", "one day", "\n", "was very", "happy", ".", "Ben ran", "and"]
FREE = dict.fromkeys(range(1, 65), 1.0)
"""Costs of rows that take no time: drafts are as long as drafters make them."""


# ---------------------------------------------------------------------------------------------- drafts


def looked_up(ids: list[int], most: int, places: int, longest: int) -> list[int]:
    """What PromptLookup promises, place by place."""
    ends = [end for end in range(1, len(ids) - 1) if ids[end - 1 : end + 1] == ids[-2:]][-places:]
    best: tuple[int, int] | None = None
    for end in ends:
        common = 2
        while common < min(longest, end + 1) and ids[end - common] == ids[-1 - common]:
            common += 1
        best = max(best or (0, 0), (common, end))
    if best is None:
        return []
    text = list(ids)
    for i in range(most):
        text.append(text[best[1] + 1 + i])
    return text[len(ids) :]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(1, 9), st.integers(1, 4), st.integers(2, 5))
def test_lookup_finds_the_newest_of_the_longest_matches(ids: list[int], most: int, places: int, longest: int) -> None:
    drafter = PromptLookup(places, longest)
    for length in range(1, len(ids) + 1, 1 + len(ids) // 7):
        assert drafter.draft(ids[:length], most) == looked_up(ids[:length], most, places, longest)


# ---------------------------------------------------------------------------------------------- when it pays


class Told:
    """Drafts what it is told comes, each token right with a chance: those are the tokens of a sequence of 7s."""

    def __init__(self, chance: float, seed: int = 0) -> None:
        self._chance, self._rng = chance, random.Random(seed)

    def draft(self, ids: list[int], most: int) -> list[int]:
        return [7 if self._rng.random() < self._chance else 0 for _ in range(min(most, 40))]


def simulated(kernels: str, chance: float, sequences: int, tokens: int, host: float = 0.0) -> float:
    """Tokens a unit of time with drafts beside without, by STEP_COST; `host`: what a step with drafts takes besides."""
    costs = STEP_COST[kernels]
    seeds = iter(range(sequences))
    speculation = Speculation(lambda _: Told(chance, next(seeds)), costs)
    running = [Sequence([7] * 9, 8, 9 + tokens, slot=i, computed=8) for i in range(sequences)]
    one, spent = next((cost for count, cost in costs.items() if count >= sequences), 1.0), 0.0
    while any(len(s.ids) < s.limit for s in running):
        speculation.propose(running)
        rows = sum(1 + len(s.draft) for s in running)
        spent += one if rows == sequences else host + next(cost for count, cost in costs.items() if count >= rows)
        for s in running:
            right = next((i for i, token in enumerate(s.draft) if token != 7), len(s.draft))
            s.ids += [7] * min(right + 1, s.limit - len(s.ids))
            s.computed, s.draft = len(s.ids) - 1, []
    return tokens * one / spent


@pytest.mark.parametrize(("kernels", "all_right", "half"), [("avx512", 4, 1.1), ("avx2", 3, 1.0), ("cuda", 4, 1.1)])
def test_never_much_slower_and_twice_as_fast_where_most_is_right(kernels: str, all_right: float, half: float) -> None:
    host = 0.15 if kernels == "cuda" else 0.0  # nothing is ahead of a step with drafts
    for tokens in (128, 256, 1000):
        for chance in (0.0, 0.1):
            for sequences in (1, 2, 8, 16):
                assert simulated(kernels, chance, sequences, tokens, host) > 0.97, (chance, sequences, tokens)
    assert simulated(kernels, 0.8, 1, 1000, host) > 2
    assert simulated(kernels, 1.0, 1, 1000, host) > all_right
    assert simulated(kernels, 0.5, 2, 1000, host) > half
    assert simulated(kernels, 0.9, 200, 20) == 1  # too many sequences


class Silent:
    def draft(self, ids: list[int], most: int) -> list[int]:
        return []


def test_one_sequence_s_drafts_must_pay_for_all() -> None:
    """A long step for one of many is a loss for the others."""
    drafters = iter([Told(1.0), *[Silent()] * 7])
    speculation = Speculation(lambda _: next(drafters), {1: 1.0, 8: 1.1, 16: 2.0})
    running = [Sequence([7] * 9, 8, 500, slot=i, computed=8) for i in range(8)]
    for _ in range(30):
        assert speculation.propose(running) == (False, [])
        assert not any(s.draft for s in running)
        for s in running:
            s.ids.append(7)
            s.computed += 1
    assert speculation.propose(running[:1]) == (True, [])
    assert running[0].draft == [7] * 7


def test_nothing_is_drafted_while_the_device_is_ahead() -> None:
    speculation = Speculation(lambda _: Told(1.0), STEP_COST["cuda"])
    s = Sequence([7] * 9, 8, 500, slot=0, computed=8)
    assert speculation.propose([s], ahead=True) == (True, [])
    assert s.draft == []
    s.ids.append(5)  # what came is not what would have been drafted
    s.computed += 1
    assert speculation.propose([s]) == (True, [])
    assert s.draft != []
    assert speculation._histories[s].acceptance < 0.5


def test_what_is_no_kind_of_drafts_is_refused() -> None:
    with pytest.raises(RequestError, match=r"speculate is 'draft'; supported: \"ngram\""):
        LLM(DEMO, device="cpu", speculate="draft")  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------- no token changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not DEMO.is_dir():
        pytest.skip("the demo checkpoint is not beside these tests")
    target = tmp_path_factory.mktemp("speculation") / "demo"
    convert(DEMO, target, bits=4, group_size=-1, method="minmax")
    defaults = target / "generation_config.json"  # its penalty, a default of all requests, would keep drafts off CUDA
    defaults.write_text(json.dumps({**json.loads(defaults.read_text()), "repetition_penalty": 1.0}))
    return target


@pytest.fixture(scope="module", params=DEVICES)
def plain(request: pytest.FixtureRequest, folder: Path) -> Iterator[LLM]:
    """Without drafts. "cpu-draws": tokens are drawn as on CUDA, by the definition of the kernel that does so there."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cpu-draws":
            patch.setattr(choosing, "draws", lambda logits: True)
        yield LLM(folder, device=request.param.removesuffix("-draws"))


@pytest.fixture(scope="module")
def drafting(plain: LLM, folder: Path) -> LLM:
    return LLM(folder, device=plain.device.type, speculate="ngram")


@pytest.fixture
def drafted_by(plain: LLM, folder: Path) -> Callable[[Callable[[list[int]], Drafter]], LLM]:
    """A model whose drafts somebody else makes, at no cost."""

    def make(drafter: Callable[[list[int]], Drafter]) -> LLM:
        llm = LLM(folder, device=plain.device.type)
        scheduler = Scheduler(llm.max_sequences, llm.kv_pages, STEP_TOKENS[llm.device.type])
        llm.engine = Engine(llm.runner, scheduler, speculation=Speculation(drafter, FREE))
        return llm

    return make


class Known:
    """Drafts the rest of a text that is known."""

    def __init__(self, text: list[int]) -> None:
        self._text = text

    def draft(self, ids: list[int], most: int) -> list[int]:
        return self._text[len(ids) :][:most] if self._text[: len(ids)] == ids else []


def said(output: GenerationOutput) -> dict[str, Any]:
    """All of an output but its times."""
    return dataclasses.asdict(dataclasses.replace(output, timings=None))  # type: ignore[arg-type]


def pages_back(llm: LLM) -> bool:
    """Whether nobody holds a page."""
    return llm.engine.scheduler.pool.available == llm.kv_pages


SCHEMA = {"type": "array", "items": {"enum": ["a cat", "a dog"]}, "minItems": 4, "maxItems": 9}
KINDS: list[dict[str, Any]] = [
    dict(temperature=0),
    dict(temperature=1.0, top_p=1.0),
    dict(temperature=0, stop=["was", ". "]),
    dict(temperature=0.8, top_p=0.9, top_k=50),
    dict(temperature=0, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    dict(temperature=0.5, min_p=0.02, repetition_penalty=1.1, frequency_penalty=0.2),
    dict(temperature=0, logit_bias={66: 3.0, 9: float("-inf")}),
    dict(temperature=0.4, logprobs=2),
    dict(temperature=0, prompt_logprobs=1, logprobs=0),
    dict(temperature=0.6, stop_token_ids=[66, 67, 68, 300], min_tokens=9),
    dict(temperature=0, schema=SCHEMA),
    dict(temperature=1.0, schema=SCHEMA, logprobs=1),
    dict(temperature=0, ignore_eos=True),
]


def shortened(params: SamplingParams, most: int) -> SamplingParams:
    return dataclasses.replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))


def asked(count: int) -> list[tuple[str, SamplingParams]]:
    """Prompts that say things twice, in all kinds of sampling."""
    rng, made = random.Random(3), []
    for i in range(count):
        phrase = " ".join(rng.choices(WORDS, k=rng.randrange(2, 9)))
        prompt = " ".join([rng.choice(WORDS), *[phrase] * rng.randrange(1, 4), *rng.choices(WORDS, k=rng.randrange(2))])
        made.append((prompt, shortened(SamplingParams(seed=i, **KINDS[i % len(KINDS)]), rng.choice((1, 2, 3, 30, 80)))))
    return made


def test_no_token_changes(plain: LLM, drafting: LLM, request: pytest.FixtureRequest) -> None:
    """Alone, streamed, and a few at a time."""
    prompts = asked(max(52, request.config.getoption("--schedules") // 2))
    want = [plain.generate([prompt], params)[0] for prompt, params in prompts]
    rng, first = random.Random(4), 0
    right = drafted = 0
    while first < len(prompts):
        some = prompts[first : first + rng.choice((1, 1, 2, 4))]
        outputs = drafting.generate([prompt for prompt, _ in some], [params for _, params in some])
        for (prompt, params), output, alone in zip(some, outputs, want[first:], strict=False):
            assert said(output) == said(alone), (prompt, params)
            right += output.timings.accepted_tokens
            drafted += output.timings.drafted_tokens
        if rng.random() < 0.3:
            prompt, params = prompts[first]
            pieces = list(drafting.stream(prompt, params))
            assert [piece.token_id for piece in pieces] == want[first].token_ids
            assert "".join(piece.text for piece in pieces) == want[first].text
        first += len(some)
    tokens = sum(len(output.token_ids) for output in want)
    print(f"{tokens} tokens, {drafted} drafted, {right} of them right")
    assert right > tokens / 20
    stats = drafting.engine.stats
    assert stats.drafts > 0
    assert stats.draft_tokens >= drafted
    assert stats.accepted_tokens >= right
    assert pages_back(drafting)


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_an_end_anywhere_in_a_draft(
    kind: int, plain: LLM, drafted_by: Callable[[Callable[[list[int]], Drafter]], LLM]
) -> None:
    """Of a text that is known to the end all is drafted: lengths, stop strings and end tokens cut it where they would
    without, also where the draft goes on behind them."""
    prompt = "Once upon a time"
    ids = plain.encode(prompt)
    params = SamplingParams(seed=kind, max_tokens=40, **KINDS[kind])
    whole = plain.generate(prompt, params)
    llm = drafted_by(lambda _: Known(ids + whole.token_ids + [5] * 20))
    got = llm.generate(prompt, params)
    assert said(got) == said(whole)
    if plain.device.type == "cuda" and Sampler(params, plain.config.vocab_size).wide:
        assert got.timings.drafted_tokens == 0
    else:
        assert got.timings.accepted_tokens >= (len(whole.token_ids) - 1) * 0.7
    for cut in (1, 2, 7, len(whole.token_ids) - 1):
        if 0 < cut < len(whole.token_ids):
            shorter = shortened(params, cut)
            assert said(llm.generate(prompt, shorter)) == said(plain.generate(prompt, shorter))
            if params.min_tokens == 0 and params.schema is None:
                stopped = dataclasses.replace(params, stop_token_ids=[whole.token_ids[cut]])
                assert said(llm.generate(prompt, stopped)) == said(plain.generate(prompt, stopped))
    assert pages_back(llm)
    llm.close()


def test_a_stream_that_is_left_in_a_draft(
    plain: LLM, drafted_by: Callable[[Callable[[list[int]], Drafter]], LLM]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    want = plain.generate("Once", params).token_ids
    llm = drafted_by(lambda prompt: Known(prompt + want))
    for after in (1, 5, 64):
        stream = llm.stream("Once", params)
        assert [next(stream).token_id for _ in range(after)] == want[:after]
        stream.close()
    handle = llm.submit("Once", params)  # whose reader falls behind, and then reads on
    assert llm.generate("Once", params).token_ids == want
    assert [piece.token_id for piece in handle.tokens()] == want
    assert pages_back(llm)
    llm.close()


def test_a_drafter_that_fails_ends_its_own_request(
    plain: LLM, drafted_by: Callable[[Callable[[list[int]], Drafter]], LLM]
) -> None:
    class Broken:
        def draft(self, ids: list[int], most: int) -> list[int]:
            if len(ids) > 12:
                raise KeyError("lost")
            return []

    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    texts = ["Once upon a time", "The dog"]
    want = plain.generate(texts, params)
    broken = plain.encode(texts[0])
    llm = drafted_by(lambda prompt: Broken() if prompt == broken else PromptLookup())
    first, second = llm.generate(texts, params)
    assert first.error == "its drafter failed with KeyError: 'lost'"
    assert first.token_ids == want[0].token_ids[: len(first.token_ids)]
    assert 0 < len(first.token_ids) < 30
    assert second.token_ids == want[1].token_ids
    with pytest.raises(RequestError, match="its drafter failed"):
        llm.generate(texts[0], params)
    assert pages_back(llm)
    llm.close()
