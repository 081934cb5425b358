"""The sampler against transformers' logits processors, full sorts in float64, and published random numbers."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nibblelm.errors import ConfigError, RequestError
from nibblelm.sampler import Sampler, device_sampling, kept_tokens, philox, token_logprobs, uniform
from nibblelm.sampling_params import SamplingParams

SIZES = [1, 3, 17, 63, 331, 4099, 151_936]


def logits_of(size: int, seed: int, scale: float = 4.0, ties: bool = False) -> torch.Tensor:
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale
    return (x * 2).round() / 2 if ties else x


def test_philox_known_answers() -> None:
    """The three vectors published with the Random123 library for philox4x32, 10 rounds."""
    ones = 0xFFFFFFFF
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((ones, ones, ones, ones), (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    counter = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(counter, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


def test_uniform_is_uniform_and_depends_on_seed_and_position_only() -> None:
    draws = np.array([uniform(7, i) for i in range(20_000)])
    assert draws.min() >= 0
    assert draws.max() < 1
    assert stats.kstest(draws, "uniform").pvalue > 1e-4
    across = np.array([uniform(i, 0) for i in range(20_000)])
    assert stats.kstest(across, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03
    assert uniform(2**64 - 1, 2**40) != uniform(2**32 - 1, 2**40) != uniform(2**32 - 1, 0)


# The processed logits and the kept set, against transformers


def apply(processors: list[Any], tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
    chain: Any = LogitsProcessorList(processors)
    return chain(torch.tensor([tokens]), logits[None])[0]


def processed(logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    sampler = Sampler(params, logits.numel(), prompt)
    for token in output:
        for counts in (sampler._seen, sampler._output):
            if counts is not None:
                counts.add(token)
    return sampler._processed(logits)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_bias_and_repetition_penalty_equal_transformers(size: int, penalty: float) -> None:
    rng = np.random.default_rng(size)
    for seed in range(5):
        logits = logits_of(size, seed)
        prompt, output = rng.integers(0, size, 40).tolist(), rng.integers(0, size, 90).tolist()
        bias = {int(i): float(v) for i, v in zip(rng.integers(0, size, 5), rng.normal(0, 5, 5), strict=True)}
        by_sequence: Any = {(i,): v for i, v in bias.items()}
        biased = SequenceBiasLogitsProcessor(by_sequence)
        theirs = apply([biased, RepetitionPenaltyLogitsProcessor(penalty)], prompt + output, logits)
        before = logits.clone()
        params = SamplingParams(repetition_penalty=penalty, logit_bias=bias)
        assert torch.equal(processed(logits, params, prompt, output), theirs)
        assert torch.equal(logits, before)  # the caller's logits stay


def test_min_tokens_holds_end_tokens_back_as_transformers_does() -> None:
    logits, ends = logits_of(331, 3), [5, 17, 330]
    theirs = MinNewTokensLengthLogitsProcessor(4, 3, ends, device="cpu")
    sampler = Sampler(SamplingParams(min_tokens=3, temperature=0), 331, [1, 2, 3, 4], [*ends, 4099])
    for drawn in range(5):
        want = apply([theirs], [7] * (4 + drawn), logits)
        assert torch.equal(sampler._processed(logits), want)
        assert sampler.on_host is (drawn < 3)
        assert sampler.takes_argmax is (drawn >= 3)
        sampler.accept(7)


def test_frequency_and_presence_penalties_count_output_only() -> None:
    logits = logits_of(17, 0)
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=-0.25)
    expected = logits.double().numpy()
    for token, count in {3: 2, 5: 1}.items():
        expected[token] += 0.25 - 0.5 * count
    ours = processed(logits, params, [3, 7, 7, 9], [3, 5, 3])
    np.testing.assert_allclose(ours.numpy(), expected, rtol=1e-6, atol=1e-6)


def transformers_kept(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Logits after the warpers in the order in which generate applies them, -inf where removed."""
    warpers: list[Any] = []
    if params.temperature != 1:
        warpers.append(TemperatureLogitsWarper(float(params.temperature or 0)))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p is not None and params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return apply(warpers, [0], logits)


def ours_kept(logits: torch.Tensor, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    ids, weights = kept_tokens(logits, float(logits.max()), params)
    ids = np.arange(logits.numel()) if ids is None else ids
    return ids, weights.numpy() / weights.numpy().sum()


WARPERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 40},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.8, "top_p": 0.3},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 1.2, "top_k": 7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 300, "top_p": 0.9, "min_p": 0.1},
    {"temperature": 3.0, "top_p": 0.999},
    {"temperature": 0.05, "top_k": 1},
    {"temperature": 1.0, "top_k": 10**6, "min_p": 1.0},
    {"temperature": 1.0, "top_p": 0.0},
]


@pytest.mark.parametrize("options", [dict(top_p=0.95), dict(top_k=50), dict(min_p=0.01)])
def test_of_tokens_that_are_ruled_out_none_is_looked_at(options: dict[str, Any]) -> None:
    """A guide leaves few of many: sorting all the others would take longer than the model does."""
    logits = torch.full((151_936,), -math.inf)
    logits[[7, 900, 90_000]] = torch.tensor([1.0, 0.5, 2.0])
    params = SamplingParams(temperature=1, **{"top_p": 1.0} | options).resolve({})
    ids, weights = kept_tokens(logits, 2.0, params)
    assert ids is not None
    assert set(ids.tolist()) == {7, 900, 90_000}
    assert len(weights) == 3


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("options", WARPERS, ids=json.dumps)
def test_kept_tokens_equal_transformers(size: int, options: dict[str, Any]) -> None:
    params = SamplingParams(**{"top_p": 1.0, **options}).resolve({})
    for seed in range(2 if size > 5000 else 6):
        logits = logits_of(size, seed, scale=(0.5, 4.0)[seed % 2])
        theirs = transformers_kept(logits, params)
        probabilities = theirs.double().softmax(0).numpy()
        ids, weights = ours_kept(logits, params)
        ours = np.zeros(size)
        ours[ids] = weights
        # transformers sums fp32 probabilities over the vocabulary; a token whose removal hangs on the last bits of
        # such a sum (error up to size * 2**-24, in practice its root) may differ, if it weighs no more than that
        slack = 4 * 2**-24 * math.sqrt(size) + 1e-6
        differs = (ours > 0) != (theirs > -torch.inf).numpy()
        assert np.maximum(ours, probabilities)[differs].sum() <= slack
        np.testing.assert_allclose(ours, probabilities, rtol=2e-5, atol=2 * slack)


def test_top_k_keeps_ties_as_transformers_does() -> None:
    for size in (17, 331, 4099, 151_936):
        logits = logits_of(size, 1, ties=True)
        params = SamplingParams(temperature=1.0, top_k=5, top_p=1.0).resolve({})
        kept = np.flatnonzero(transformers_kept(logits, params) > -torch.inf)
        assert sorted(ours_kept(logits, params)[0]) == sorted(kept)


@pytest.mark.parametrize("size", [3, 331, 4099, 20_011])
@pytest.mark.parametrize("scale", [0.01, 0.5, 3.0, 20.0])
@pytest.mark.parametrize("ties", [False, True])
def test_top_p_equals_its_definition_by_full_sort(size: int, scale: float, ties: bool) -> None:
    for seed, top_p in enumerate([0.05, 0.5, 0.9, 0.95, 0.999]):
        logits = logits_of(size, seed, scale, ties)
        params = SamplingParams(temperature=0.9, top_p=top_p).resolve({})
        x = logits.double().numpy()
        order = np.lexsort((np.arange(size), -x))
        weights = np.exp((x[order] - x.max()) / 0.9)
        before = np.concatenate([[0], weights.cumsum()[:-1]]) / weights.sum()
        kept, _ = ours_kept(logits, params)
        # the total is summed over fp32 exponentials: right to about 1e-7
        at_least, at_most = (before < top_p - 1e-6).sum(), (before < top_p + 1e-6).sum()
        assert at_least <= kept.size <= at_most
        assert sorted(kept) == sorted(order[: kept.size].tolist())


# Drawing


def test_draws_follow_the_processed_distribution() -> None:
    logits = logits_of(63, 5, scale=1.5)
    cases: list[dict[str, Any]] = [{}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.1, "repetition_penalty": 1.5}]
    for case in cases:
        options = {"temperature": 1.1, "top_p": 1.0, **case}
        params = SamplingParams(**options)
        prompt = [int(logits.argmax())]
        expected = processed(logits, params, prompt, [])
        expected = transformers_kept(expected, params.resolve({})).double().softmax(0).numpy()
        draws = Counter()
        for seed in range(4000):
            sampler = Sampler(SamplingParams(seed=seed, **options), 63, prompt)
            draws[sampler.sample(logits).token_id] += 1
        observed = np.array([draws[i] for i in range(63)])
        assert observed[expected == 0].sum() == 0
        rare = expected * 4000 < 5
        bins = [(observed[~rare], expected[~rare] * 4000)]
        if expected[rare].sum() * 4000 >= 5:
            bins.append((observed[rare].sum(keepdims=True), expected[rare].sum(keepdims=True) * 4000))
        found = np.concatenate([b[0] for b in bins])
        wanted = np.concatenate([b[1] for b in bins])
        assert stats.chisquare(found, wanted * found.sum() / wanted.sum()).pvalue > 1e-4


def test_draw_is_the_inverse_of_the_distribution_in_id_order() -> None:
    logits = torch.tensor([0.0, 2.0, -torch.inf, 1.0, 2.5])
    for top_k, top_p in [(0, 1.0), (3, 1.0), (0, 0.9)]:
        weights = np.exp(logits.double().numpy())
        if top_k or top_p < 1:
            weights[0] = 0
        edges = weights.cumsum() / weights.sum()
        for seed in range(200):
            params = SamplingParams(temperature=1.0, top_p=top_p, seed=seed, top_k=top_k)
            expected = int(np.flatnonzero(edges > uniform(seed, 0))[0])
            assert Sampler(params, 5).sample(logits).token_id == expected


@pytest.mark.parametrize("top_k", [0, 5])
def test_forbidden_tokens_are_not_drawn_at_the_edges(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf, 1.0, -torch.inf])
    params = SamplingParams(temperature=1.0, top_p=1.0, top_k=top_k)
    for u, expected in [(0.0, 1), (0.5, 3), (1 - 2.0**-32, 3)]:
        monkeypatch.setattr("nibblelm.sampler.uniform", lambda *_, value=u: value)
        assert Sampler(params, 5).sample(logits).token_id == expected


def sequence(params: SamplingParams, vocab: int, steps: int, offset: int = 0) -> list[int]:
    sampler = Sampler(params, vocab, [1, 2])
    return [sampler.sample(logits_of(vocab, 100 + offset + i)).token_id for i in range(steps)]


def test_a_seed_repeats_a_sequence_whatever_else_is_drawn() -> None:
    params = SamplingParams(temperature=1.5, top_p=0.9, repetition_penalty=1.1, seed=9)
    alone = sequence(params, 331, 20)
    a, b = Sampler(params, 331, [1, 2]), Sampler(SamplingParams(seed=3), 331)
    mixed = []
    for i in range(20):
        torch.manual_seed(i)
        b.sample(logits_of(331, i))
        mixed.append(a.sample(logits_of(331, 100 + i)).token_id)
    assert mixed == alone
    assert sequence(SamplingParams(temperature=1.5, top_p=0.9, seed=10), 331, 20) != alone
    free = Sampler(SamplingParams(temperature=1.5), 331)
    again = Sampler(SamplingParams(temperature=1.5, seed=free.seed), 331)
    assert free.seed < 2**48
    for i in range(20):
        assert free.sample(logits_of(331, i)) == again.sample(logits_of(331, i))


def test_penalties_follow_the_output_step_by_step() -> None:
    """A long run, so that the counts grow past their first arrays; checked against the processors every step."""
    params = SamplingParams(temperature=2.0, top_p=1.0, repetition_penalty=1.2, frequency_penalty=0.1, seed=1)
    sampler = Sampler(params, 331, [5, 5, 8])
    tokens = [5, 5, 8]
    for i in range(250):
        logits = logits_of(331, i, scale=0.5)
        theirs = apply([RepetitionPenaltyLogitsProcessor(1.2)], tokens, logits)
        counts = torch.bincount(torch.tensor(tokens[3:], dtype=torch.long), minlength=331)
        np.testing.assert_allclose(sampler._processed(logits), theirs - 0.1 * counts, rtol=1e-5, atol=1e-6)
        tokens.append(sampler.sample(logits).token_id)
    assert len(set(tokens)) > 130


@pytest.mark.parametrize("size", SIZES)
def test_greedy_takes_the_lowest_of_equals(size: int) -> None:
    logits = logits_of(size, 3, ties=True)
    sampler = Sampler(SamplingParams(temperature=0), size)
    assert sampler.takes_argmax
    expected = int(np.flatnonzero(logits.numpy() == logits.max().item())[0])
    assert sampler.sample(logits).token_id == sampler.accept(expected).token_id == expected
    assert sampler.position == 2
    banned = Sampler(SamplingParams(temperature=0, logit_bias={expected: -math.inf}), size)
    assert not banned.takes_argmax
    if size > 1:
        assert banned.sample(logits).token_id != expected
    else:
        with pytest.raises(RequestError, match="not usable"):
            banned.sample(logits)


def test_temperature_towards_zero_is_greedy() -> None:
    logits = logits_of(331, 3)
    for temperature in (1e-6, 1e-38, 5e-324):
        for top_p in (1.0, 0.9):
            params = SamplingParams(temperature=temperature, top_p=top_p, seed=1)
            assert Sampler(params, 331).sample(logits).token_id == int(logits.argmax())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ties", [False, True])
def test_logprobs_are_of_the_raw_logits(size: int, ties: bool) -> None:
    logits = logits_of(size, 2, ties=ties)
    expected = logits.double().log_softmax(0).numpy()
    top_n = min(size, 20)
    params = SamplingParams(temperature=0.5, top_k=1, logprobs=top_n, repetition_penalty=5.0, logit_bias={0: -9.0})
    sampled = Sampler(params, size, list(range(min(size, 30)))).sample(logits)
    order = np.lexsort((np.arange(size), -logits.numpy()))[:top_n]
    assert [token for token, _ in sampled.top] == order.tolist()
    np.testing.assert_allclose([p for _, p in sampled.top], expected[order], atol=1e-5)
    assert sampled.logprob == pytest.approx(expected[sampled.token_id], abs=1e-5)
    assert token_logprobs(logits, 0, 0).top == []
    assert Sampler(SamplingParams(), size).sample(logits).logprob is None


# Parameters


def test_resolution_order() -> None:
    default = SamplingParams().resolve({})
    assert (default.temperature, default.top_k, default.top_p, default.min_p) == (0.8, 0, 0.95, 0.0)
    assert (default.repetition_penalty, default.presence_penalty, default.max_tokens) == (1.0, 0.0, 256)
    file = {"temperature": 0.5, "top_k": 40, "top_p": 0.7, "repetition_penalty": 1.1, "do_sample": True}
    qwen2 = SamplingParams(top_k=5).resolve({**file, "eos_token_id": [1, 2], "max_new_tokens": 9, "min_p": None})
    assert (qwen2.temperature, qwen2.top_k, qwen2.top_p, qwen2.min_p) == (0.5, 5, 0.7, 0.0)
    assert (qwen2.repetition_penalty, qwen2.max_tokens) == (1.1, 9)
    assert SamplingParams().resolve({"do_sample": False, "temperature": 0.6}).temperature == 0
    assert SamplingParams(temperature=1.0).resolve({"do_sample": False}).temperature == 1.0
    assert SamplingParams(max_tokens=-1, seed=3).resolve({}) == SamplingParams(max_tokens=-1, seed=3).resolve(
        {}
    ).resolve({})
    assert SamplingParams(seed=3).resolve({}).seed == 3
    with pytest.raises(ConfigError, match=r"generation_config.json: temperature is -1"):
        SamplingParams().resolve({"temperature": -1})


def test_minus_one_is_off_or_random_as_elsewhere() -> None:
    params = SamplingParams(top_k=-1, seed=-1).resolve({"top_k": 5})
    assert (params.top_k, params.seed) == (0, None)
    assert SamplingParams().resolve({"top_k": -1}).top_k == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature is -0.1; supported: float, 0 \(greedy\) to 100"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": True}, "temperature is True"),
        ({"top_k": -2}, "top_k is -2"),
        ({"seed": -2}, "seed is -2"),
        ({"schema": True, "regex": "a"}, "schema and regex are given; supported: one of"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"min_p": -1}, "min_p is -1"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"repetition_penalty": 1e-60}, "repetition_penalty is 1e-60; supported: float, 0.01 to 100"),
        ({"presence_penalty": 2.5}, "presence_penalty is 2.5"),
        ({"frequency_penalty": -3}, "frequency_penalty is -3"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"seed": 2**64}, "seed is"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"prompt_logprobs": "5"}, "prompt_logprobs is '5'"),
        ({"stop": ["a", ""]}, "stop is"),
        ({"stop": 3}, "stop is 3"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids is"),
        ({"stop_token_ids": 7}, "stop_token_ids is 7"),
        ({"stop_token_ids": np.array([1, 2])}, "stop_token_ids is array"),
        ({"logit_bias": {2**70: 1.0}}, "logit_bias is"),
        ({"ignore_eos": 1}, "ignore_eos is 1"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias is"),
        ({"logit_bias": {5: math.inf}}, "logit_bias is"),
        ({"logit_bias": {5: 10**400}}, "logit_bias is"),
        ({"logit_bias": {5: 1e39}}, "logit_bias is .* numbers of at most 1e38, or minus infinity"),
        ({"logit_bias": [5]}, "logit_bias is"),
        ({"regex": "ab", "min_tokens": 50}, r"min_tokens is 50; supported: 0 with"),
        ({"schema": False}, "schema is False; .* or True for any JSON value"),
    ],
)
def test_parameters_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


def test_more_tokens_at_least_than_at_most() -> None:
    for params, file, most in (
        (SamplingParams(min_tokens=9, max_tokens=8), {}, 8),
        (SamplingParams(min_tokens=9), {"max_new_tokens": 7}, 7),
        (SamplingParams(min_tokens=300), {}, 256),
    ):
        with pytest.raises(RequestError, match=f"at most max_tokens, which is {most}"):
            params.resolve(file)
    assert SamplingParams(min_tokens=8, max_tokens=8).resolve({}).min_tokens == 8
    assert SamplingParams(min_tokens=300, max_tokens=-1).resolve({}).min_tokens == 300


def test_other_errors_and_forms() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # pyright: ignore[reportCallIssue]
    with pytest.raises(RequestError, match="logit_bias names token 17; supported: 0 to 16"):
        Sampler(SamplingParams(logit_bias={17: 1.0}), 17)
    with pytest.raises(RequestError, match="stop_token_ids names token 20; supported: 0 to 16"):
        Sampler(SamplingParams(stop_token_ids=[3, 20]), 17)
    with pytest.raises(RequestError, match="largest logit is nan"):
        Sampler(SamplingParams(), 3).sample(torch.tensor([0.0, math.nan, 1.0]))
    assert SamplingParams(stop="###").stop == ("###",)
    assert SamplingParams(stop=["a"], stop_token_ids=[3]).stop_token_ids == (3,)


@pytest.mark.parametrize("half", [Fraction(1, 2), np.longdouble(0.5), np.float32(0.5)])
def test_numbers_of_any_kind_become_plain_ones(half: Any) -> None:
    """What computes with parameters is a thread that serves all: a kind of number it does not know would end them."""
    params = SamplingParams(temperature=half, max_tokens=np.int64(7), logit_bias={np.int32(3): half})  # type: ignore[arg-type]
    plain = [params.temperature, params.max_tokens, *params.logit_bias.items()]  # type: ignore[union-attr]
    assert plain == [0.5, 7, (3, 0.5)]
    assert [type(value) for value in (*plain[:2], *plain[2])] == [float, int, int, float]


def timed(call: Callable[[], object]) -> float:
    """Processor time in seconds of the fastest of several calls: what the work takes when nothing else runs."""
    best = math.inf
    for _ in range(15):
        started = time.thread_time()
        call()
        best = min(best, time.thread_time() - started)
    return best


@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1}])
def test_sampling_a_large_vocabulary_takes_under_a_millisecond(options: dict[str, Any]) -> None:
    logits = logits_of(151_936, 0)
    logits[:50] += 12  # a peaked distribution, as trained models give
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sampler = Sampler(SamplingParams(temperature=0.8, seed=1, **options), 151_936, list(range(500)))
        assert timed(lambda: sampler.sample(logits)) < 4e-3  # 0.1 to 0.4 ms on an idle core; a full sort alone takes 10
    finally:
        torch.set_num_threads(threads)


def test_a_device_takes_any_top_k() -> None:
    state = device_sampling([Sampler(SamplingParams(temperature=1.0, top_k=k), 1000) for k in (0, 7, 2**31)], 1000)
    assert state.top_k.tolist() == [0, 7, 1000]
