"""A request whose logits are not finite ends with an error, greedy or sampled, alone or in a batch that goes on."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nibblelm import LLM, SamplingParams, ops
from nibblelm.errors import RequestError

POISON = 100
"""The token whose embedding is NaN: after it every logit of its sequence is NaN, of no other sequence."""

WAYS = {
    "greedy": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True),
    "scored": SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1),
}


USABLE, REASON = ops.cuda_available()
CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=REASON)])


@pytest.fixture(scope="module", params=["cpu", CUDA])
def llm(request: pytest.FixtureRequest, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("poisoned") / "model"
    shutil.copytree(data_dir / "checkpoints" / "stories260K", folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, folder / "model.safetensors")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    return LLM(folder, device=request.param, dtype="fp32")


@pytest.mark.parametrize("way", WAYS)
def test_alone_it_raises(way: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match="largest logit is n"):
        llm.generate([1, POISON], WAYS[way])
    seen: list[int | None] = []
    stream = llm.stream("Once upon", WAYS[way], logit_bias={POISON: 1000.0})
    with pytest.raises(RequestError, match="largest logit is n"):
        seen.extend(piece.token_id for piece in stream)
    assert seen == [POISON]


def test_errors_that_are_kept_hold_no_cache(llm: LLM) -> None:
    kept: list[RequestError] = []
    for _ in range(20):  # more than calls that may be live
        try:
            llm.generate([1, POISON], WAYS["greedy"])
        except RequestError as error:
            kept.append(error)
    found = "nan" if llm.device.type == "cpu" else "not finite"
    assert {str(error).split(":")[0] for error in kept} == {f"the largest logit is {found}"}


@pytest.mark.parametrize("way", WAYS)
def test_in_a_batch_only_that_request_ends(way: str, llm: LLM) -> None:
    prompts = [llm.encode("Once upon"), [1, POISON], llm.encode("The dog"), [1, 5, POISON, 6]]
    outputs = llm.generate(prompts, WAYS[way])
    assert [output.finish_reason for output in outputs] == ["length", "error", "length", "error"]
    for prompt, output in zip(prompts, outputs, strict=True):
        if POISON in prompt:
            assert output.error is not None
            assert "largest logit is n" in output.error
            assert (output.text, output.token_ids) == ("", [])
        else:
            assert output.error is None
            assert output.token_ids == llm.generate(prompt, WAYS[way]).token_ids
