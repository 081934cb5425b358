"""What `generate` and its neighbours accept, and the one line they answer with to the rest."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nibblelm import LLM, SamplingParams
from nibblelm.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(data_dir: Path) -> LLM:
    return LLM(data_dir / "checkpoints" / "stories260K", device="cpu", dtype="fp32")


@pytest.mark.parametrize(
    "made",
    [
        tuple,
        np.array,
        torch.tensor,
        lambda ids: list(np.array(ids)),
        lambda ids: list(torch.tensor(ids)),
        lambda ids: np.array(ids, np.uint16),
    ],
)
def test_numpy_and_tensor_ids_are_ids(made: Any, llm: LLM) -> None:
    ids = llm.encode("Once upon a time")
    want = llm.generate(ids, GREEDY).token_ids
    assert llm.generate(made(ids), GREEDY).token_ids == want
    assert [piece.token_id for piece in llm.stream(made(ids), GREEDY)] == want
    assert torch.equal(llm.logits(made(ids)), llm.logits(ids))
    assert llm.generate([made(ids), "The"], GREEDY)[0].token_ids == want


def test_an_empty_array_is_an_empty_prompt_and_an_empty_list_none(llm: LLM) -> None:
    for empty in (np.array([], np.int64), torch.tensor([], dtype=torch.int64)):
        assert llm.generate(empty, GREEDY).token_ids == [piece.token_id for piece in llm.stream(empty, GREEDY)]
    assert llm.generate([], GREEDY) == llm.generate(np.zeros((0, 3), np.int64), GREEDY) == []
    assert len(llm.generate(np.array(["Once", "The"]), GREEDY)) == 2


def test_a_matrix_of_ids_is_a_list_of_prompts(llm: LLM) -> None:
    rows = [[1, 5, 6], [1, 7, 8]]
    want = [llm.generate(row, GREEDY).token_ids for row in rows]
    for matrix in (np.array(rows), torch.tensor(rows), [np.array(rows[0]), torch.tensor(rows[1])]):
        assert [output.token_ids for output in llm.generate(matrix, GREEDY)] == want


def test_parameters_for_each_prompt(llm: LLM) -> None:
    prompts = ["Once", "The dog", "A"]
    each = [GREEDY, SamplingParams(seed=3, max_tokens=5), SamplingParams(temperature=0, max_tokens=60, stop=["."])]
    want = [llm.generate(prompt, params) for prompt, params in zip(prompts, each, strict=True)]
    got = llm.generate(prompts, each)
    assert [(o.token_ids, o.finish_reason) for o in got] == [(o.token_ids, o.finish_reason) for o in want]
    assert [len(o.token_ids) for o in llm.generate(prompts, each, max_tokens=2)] == [2, 2, 2]
    with pytest.raises(RequestError, match="2 SamplingParams for 3 prompts"):
        llm.generate(prompts, each[:2])


def test_n_outputs_for_each_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=10, ignore_eos=True)
    want = {p: [llm.generate(p, params, seed=7 + i).token_ids for i in range(3)] for p in ("Once", "The")}
    assert [output.token_ids for output in llm.generate("Once", params, n=3)] == want["Once"]
    both = llm.generate(["Once", "The"], params, n=3)
    assert [[output.token_ids for output in outputs] for outputs in both] == list(want.values())
    assert [len(outputs) for outputs in llm.generate(["Once", "The"], GREEDY, n=1)] == [1, 1]
    free = llm.generate("Once", max_tokens=10, n=4)
    assert len({output.seed for output in free}) == 4
    with pytest.raises(RequestError, match="n is 0"):
        llm.generate("Once", n=0)


def test_stop_none_is_no_stop(llm: LLM) -> None:
    want = llm.generate("Once", GREEDY).token_ids
    assert llm.generate("Once", GREEDY, stop=None, stop_token_ids=None).token_ids == want


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.logits([10**6]), "1000000 is outside the vocabulary of 512"),
        (lambda llm: llm.logits([-1]), "-1 is outside"),
        (lambda llm: llm.logits([]), "prefill of 0 tokens"),
        (lambda llm: llm.logits([0.5]), "integers"),
        (lambda llm: llm.generate(torch.tensor([0.5])), "integers"),
        (lambda llm: llm.generate([["Once"]]), "integers"),
        (lambda llm: llm.generate(None), "prompts is None"),
        (lambda llm: llm.generate([5, "a"]), "prompts has numbers beside others"),
        (lambda llm: llm.stream(7.5), "integers"),
        (lambda llm: LLM(llm.folder, threads=0), "threads is 0"),
        (lambda llm: LLM(llm.folder, threads=-3), "threads is -3"),
        (lambda llm: LLM(llm.folder, threads=1.5), r"threads is 1\.5"),
    ],
)
def test_what_is_refused_in_one_line(call: Any, message: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=message):
        call(llm)


def test_a_template_that_renders_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{% if false %}{{ messages }}{% endif %}")
    with pytest.raises(RequestError, match="renders nothing"):
        llm.chat([{"role": "user", "content": "Hello"}])


@pytest.mark.parametrize("count", [100_000, 10**11])
def test_more_threads_than_cores_are_capped_with_one_warning(count: int, llm: LLM) -> None:
    from nibblelm import _cpu

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        many = LLM(llm.folder, device="cpu", dtype="fp32", threads=count)
    assert [str(w.message).split(";")[0] for w in caught] == [f"{count} threads were asked for"]
    assert _cpu.threads() == _cpu.usable_cores()
    assert many.generate("Once", GREEDY).token_ids == llm.generate("Once", GREEDY).token_ids


@pytest.mark.parametrize("prompt", [{"a": 1}, b"abc", [True, False], [[True]]])
def test_what_only_looks_like_ids_is_refused(prompt: Any, llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"supported|integers"):
        llm.generate(prompt, GREEDY)
