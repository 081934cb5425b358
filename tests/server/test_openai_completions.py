"""The official client against /v1/completions and /v1/models: what it reads is what LLM gives in this process."""

import math
from typing import Any

import openai
import pytest

from nibblelm import LLM, GenerationOutput, SamplingParams

PROMPT = "Once upon a time"
GREEDY: dict[str, Any] = dict(model="demo", temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def alone(llm: LLM, prompt: Any = PROMPT, **options: Any) -> GenerationOutput:
    output = llm.generate(prompt, SamplingParams(**({"temperature": 0, "max_tokens": 12} | options)))
    assert isinstance(output, GenerationOutput)
    return output


def test_models(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == ["demo"]
    assert client.models.retrieve("demo").object == "model"
    with pytest.raises(openai.NotFoundError, match="not here"):
        client.models.retrieve("other/model")


def test_a_text(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(prompt=PROMPT, **GREEDY)
    want = alone(llm)
    assert answer.object == "text_completion"
    assert answer._request_id
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == (want.text, "length", 0, None)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == want.timings.prompt_tokens
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == 12 + want.timings.prompt_tokens


def test_ids_batches_and_several_outputs(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.encode(PROMPT)
    assert client.completions.create(prompt=ids, **GREEDY).choices[0].text == alone(llm).text
    for prompts in ([PROMPT, "The dog", "A"], [ids, llm.encode("The dog")]):
        answer = client.completions.create(prompt=prompts, **GREEDY)  # type: ignore[arg-type]
        assert [choice.text for choice in answer.choices] == [alone(llm, prompt).text for prompt in prompts]
        assert [choice.index for choice in answer.choices] == list(range(len(prompts)))
    sampled = dict(temperature=1.0, seed=5, max_tokens=12)
    answer = client.completions.create(model="demo", prompt=[PROMPT, "The"], n=3, **sampled)
    want = llm.generate([PROMPT, "The"], SamplingParams(**sampled), n=3)
    assert [choice.text for choice in answer.choices] == [output.text for outputs in want for output in outputs]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(llm.encode(prompt)) for prompt in (PROMPT, "The"))


@pytest.mark.parametrize(
    "options",
    [
        dict(temperature=0.9, seed=1),
        dict(temperature=0.9, seed=2**64 - 1, top_p=0.8),
        dict(temperature=1.2, seed=3, top_k=7),
        dict(temperature=1.2, seed=3, min_p=0.1),
        dict(presence_penalty=1.5, frequency_penalty=0.7),
        dict(repetition_penalty=1.3),
        dict(stop=["little", "time"]),
        dict(stop="named"),
        dict(max_tokens=40, ignore_eos=True),
        dict(temperature=2, seed=4, min_tokens=30, max_tokens=32),
        dict(stop_token_ids=[5, 266, 300, 400, 500]),
        dict(skip_special_tokens=False),
    ],
    ids=str,
)
def test_sampling_options_mean_what_they_mean_here(options: dict[str, Any], client: openai.OpenAI, llm: LLM) -> None:
    known = ("temperature", "seed", "top_p", "presence_penalty", "frequency_penalty", "stop", "max_tokens")
    plain = {name: value for name, value in options.items() if name in known}
    extra = {name: value for name, value in options.items() if name not in known}
    answer = client.completions.create(prompt=PROMPT, extra_body=extra, **(GREEDY | plain))
    want = alone(llm, **options)
    (choice,) = answer.choices
    ended: Any = choice.model_extra or {}
    assert (choice.text, choice.finish_reason) == (want.text, want.finish_reason)
    assert ended["stop_reason"] == want.stop_reason


def test_defaults_are_the_checkpoints_and_16_tokens(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(model="demo", prompt=PROMPT, seed=9)
    assert answer.choices[0].text == llm.generate(PROMPT, seed=9, max_tokens=16).text


def test_logit_bias(client: openai.OpenAI, llm: LLM) -> None:
    first = alone(llm).token_ids[0]
    answer = client.completions.create(prompt=PROMPT, logit_bias={str(first): -100}, **GREEDY)
    assert answer.choices[0].text == alone(llm, logit_bias={first: -100}).text != alone(llm).text


def test_log_probabilities(client: openai.OpenAI, llm: LLM) -> None:
    want = alone(llm, logprobs=3)
    answer = client.completions.create(prompt=PROMPT, logprobs=3, **GREEDY)
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.tokens is not None
    assert scores.text_offset is not None
    assert want.logprobs is not None
    assert "".join(scores.tokens) == want.text
    assert scores.token_logprobs == [one.logprob for one in want.logprobs]
    assert [len(top) for top in scores.top_logprobs or []] == [3] * 12
    assert [want.text[at:].startswith(token) for at, token in zip(scores.text_offset, scores.tokens, strict=True)]
    streamed: list[float] = []
    for chunk in client.completions.create(prompt=PROMPT, logprobs=3, stream=True, **GREEDY):
        if (part := chunk.choices[0].logprobs) is not None:
            streamed += part.token_logprobs or []
    assert streamed == scores.token_logprobs


def test_echo_scores_a_prompt_without_an_answer(client: openai.OpenAI, llm: LLM) -> None:
    ids = llm.encode("Once upon a time, there was")
    for prompt in ("Once upon a time, there was", ids):
        answer = client.completions.create(model="demo", prompt=prompt, echo=True, logprobs=0, max_tokens=0)
        choice = answer.choices[0]
        assert choice.text.strip() == "Once upon a time, there was"
        assert choice.logprobs is not None
        logprobs = choice.logprobs.token_logprobs
        assert logprobs is not None
        logits = llm.logits(ids).double().log_softmax(-1)
        want = [float(logits[i, token]) for i, token in enumerate(ids[1:])]
        assert logprobs[0] is None
        assert all(math.isclose(a, b, abs_tol=1e-5) for a, b in zip(logprobs[1:], want, strict=True))
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 0
    asked: Any = dict(model="demo", prompt=ids, echo=True, logprobs=0, max_tokens=0, logit_bias={"1": 100, "2": 100})
    assert client.completions.create(**asked).choices[0].finish_reason == "length", "of a token that is not shown"
    full = client.completions.create(model="demo", prompt=[7] * 512, echo=True, logprobs=0, max_tokens=0).choices[0]
    assert full.logprobs is not None
    assert full.logprobs.token_logprobs is not None
    want = llm.logits([7] * 512).double().log_softmax(-1)[:-1, 7]
    assert full.logprobs.token_logprobs[1:] == pytest.approx(want.tolist(), abs=1e-5)
    echoed = client.completions.create(prompt=PROMPT, echo=True, **GREEDY).choices[0].text
    assert echoed == PROMPT + alone(llm).text


def test_offsets_where_characters_take_several_tokens(client: openai.OpenAI, llm: LLM) -> None:
    """A token begins behind all characters that are whole in the bytes before it."""

    def raw(name: str) -> bytes:
        hidden = b"" if name == "<s>" else name.encode()
        return bytes.fromhex(name[6:].replace("\\x", "")) if name.startswith("bytes:") else hidden

    for prompt in ("☀😀 Lily", llm.encode("☀😀 Lily")):
        for echo in (True, False):
            asked: Any = dict(model="demo", prompt=prompt, echo=echo, logprobs=3, max_tokens=60, temperature=1, seed=1)
            asked["extra_body"] = {"regex": "(☀|😀|é| Lily|\\n){8}"}
            choice = client.completions.create(**asked).choices[0]
            assert choice.logprobs is not None
            names, offsets = choice.logprobs.tokens or [], choice.logprobs.text_offset or []
            before = [b"".join(map(raw, names[:i])).decode(errors="ignore") for i in range(len(names))]
            assert offsets == list(map(len, before))
            assert all(choice.text.startswith(text) for text in before)
            if echo:
                assert offsets[names.index(" Lily")] == 2
            streamed: list[int] = []
            for chunk in client.completions.create(stream=True, **asked):
                if (part := chunk.choices[0].logprobs) is not None:
                    streamed += part.text_offset or []
            assert streamed == offsets


def test_fields_with_the_value_that_changes_nothing(client: openai.OpenAI) -> None:
    """As clients of vLLM send them; with another one they are refused."""
    neutral: dict[str, Any] = dict(
        include_stop_str_in_output=False, length_penalty=1.0, spaces_between_special_tokens=True, use_beam_search=False,
        add_special_tokens=True,
    )  # fmt: skip
    want = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    assert client.completions.create(prompt=PROMPT, extra_body=neutral, **GREEDY).choices[0].text == want
    for name, value in neutral.items():
        other = {name: 2.0 if isinstance(value, float) else not value}
        with pytest.raises(openai.BadRequestError, match=f"{name} is"):
            client.completions.create(prompt=PROMPT, extra_body=other, **GREEDY)


def test_offsets_of_special_tokens_in_an_echoed_prompt(client: openai.OpenAI, llm: LLM) -> None:
    """As they are written in a text; in ids they are shown if the answer is to show them."""
    asked: Any = dict(model="demo", echo=True, logprobs=0, max_tokens=2, temperature=0)
    choice = client.completions.create(prompt="<s>Once</s> upon", **asked).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.tokens[:5] == ["<s>", "<s>", "Once", "</s>", " upon"]
    assert (choice.logprobs.text_offset or [])[:6] == [0, 0, 3, 7, 11, 16]
    assert choice.text.startswith("<s>Once</s> upon")

    ids = llm.encode("Once</s> upon")[1:]
    for skips, text, offsets in ((True, "Once upon", [0, 4, 4, 9]), (False, "Once</s> upon", [0, 4, 8, 13])):
        extra = {"skip_special_tokens": skips}
        choice = client.completions.create(prompt=ids, extra_body=extra, **asked).choices[0]
        assert choice.logprobs is not None
        assert choice.text.startswith(text)
        assert (choice.logprobs.text_offset or [])[:4] == offsets


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_is_the_answer_in_pieces(n: int, client: openai.OpenAI, llm: LLM) -> None:
    options: Any = dict(temperature=1.0, seed=8, max_tokens=20)
    chunks = list(client.completions.create(model="demo", prompt=PROMPT, n=n, stream=True, **options))
    texts, reasons = [""] * n, {}
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    want = llm.generate(PROMPT, SamplingParams(**options), n=n)
    assert texts == [output.text for output in want]
    assert reasons == {i: output.finish_reason for i, output in enumerate(want)}
    assert len(chunks) > 10
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_of_a_stream_and_what_was_found_in_the_cache(client: openai.OpenAI, llm: LLM) -> None:
    ids = [(7 * i) % 4000 + 4 for i in range(200)]
    for found in (0, 192):
        stream = client.completions.create(
            prompt=ids, stream=True, stream_options={"include_usage": True}, **(GREEDY | {"max_tokens": 3})
        )
        *_, last = stream
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.prompt_tokens_details is not None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (200, 3)
        assert last.usage.prompt_tokens_details.cached_tokens == found


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        (dict(extra_body={"guided_json": {}}), "guided_json", "not supported here"),
        (dict(temperature=3), "temperature", "a number, 0 to 2"),
        (dict(temperature="hot"), "temperature", '"hot"'),
        (dict(max_tokens=-1), "max_tokens", "an integer, 0 to"),
        (dict(max_tokens=0), "max_tokens", "only with echo"),
        (dict(n=0), "n", "an integer, 1 to 128"),
        (dict(n=100_000), "n", "an integer, 1 to 128"),
        (dict(best_of=2), "best_of", "2; supported: 1"),
        (dict(suffix="end"), "suffix", "not supported here"),
        (dict(stop=[""]), "stop", "1 to 1000 characters"),
        (dict(stop=["a"] * 17), "stop", "at most 16"),
        (dict(logprobs=21), "logprobs", "0 to 20"),
        (dict(logit_bias={"cat": 1}), "logit_bias", "token ids"),
        (dict(logit_bias={"013": 1}), "logit_bias", "token ids"),
        (dict(logit_bias={"5": 101}), "logit_bias", "-100 to 100"),
        (dict(prompt=[]), "prompt", "a string, a list of token ids"),
        (dict(prompt=[1, "a"]), "prompt", "a string, a list of token ids"),
        (dict(stream_options={"include_usage": True}), "stream_options", '{"include_usage": true}; supported: nothing'),
        (dict(logit_bias={"999999": 1}), "logit_bias", "0 to 4095"),
        (dict(extra_body={"stop_token_ids": [4096]}), "stop_token_ids", "0 to 4095"),
        (dict(stream_options={}), "stream_options", "{}; supported: nothing without stream"),
        (dict(prompt=[4096]), "prompt", "outside the vocabulary"),
        (dict(extra_body={"metadata": {"a": 1}}), "metadata", "an object of strings"),
        (dict(extra_body={"min_p": 2}), "min_p", "0 to 1"),
        (dict(extra_body={"stop_token_ids": [-1]}), "stop_token_ids", "token ids"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(options: Any, param: str, message: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**(dict(model="demo", prompt=PROMPT) | options))
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert message in str(caught.value)


def test_what_does_not_fit_is_an_error_and_no_cut(client: openai.OpenAI, llm: LLM) -> None:
    for ids, asked in ([5] * 512, 1), ([5] * 100, 413), ([5] * 10_000, 1):
        with pytest.raises(openai.BadRequestError, match="the context holds 512") as caught:
            client.completions.create(model="demo", prompt=ids, max_tokens=asked)
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError, match="the context holds 512"):
        client.completions.create(model="demo", prompt=[5] * 512, max_tokens=0, echo=True)
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary"):
        client.completions.create(model="demo", prompt=[4096], max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="outputs in one request"):
        client.completions.create(model="demo", prompt=["a"] * 100, n=100)
    with pytest.raises(openai.NotFoundError, match="served: demo") as missing:
        client.completions.create(model="gpt-5", prompt="a")
    assert missing.value.code == "model_not_found"
    assert client.completions.create(prompt=[5] * 100, **(GREEDY | {"max_tokens": 412})).usage is not None
