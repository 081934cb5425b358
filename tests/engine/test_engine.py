"""Generation on real checkpoints: golden text, batches, stops, limits, log-probabilities, chat's cache."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from nibblelm import LLM, SamplingParams, convert
from nibblelm.errors import CheckpointError, ConfigError, DeviceError, EngineError, RequestError
from nibblelm.models import family
from nibblelm.pages import PAGE
from nibblelm.prompt_steps import program_bytes
from nibblelm.shapes import SHAPES

GOLDEN = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw a big, red ball. She wanted to play with it, but it was too high."
)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def stories(data_dir: Path) -> Path:
    return data_dir / "checkpoints" / "stories260K"


@pytest.fixture(scope="module")
def llm(stories: Path) -> LLM:
    return LLM(stories, device="cpu", dtype="fp32")


def copied(source: Path, target: Path, **changes: object) -> Path:
    """A copy of a folder with keys of config.json changed (None removes a key)."""
    shutil.copytree(source, target)
    for file in (target, *target.iterdir()):
        file.chmod(0o755)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return target


def test_golden_text_from_int8(stories: Path, tmp_path: Path) -> None:
    convert(stories, tmp_path / "int8", bits=8)
    output = LLM(tmp_path / "int8", device="cpu", dtype="fp32").generate("", max_tokens=200, temperature=0)
    assert " ".join(output.text.split()).startswith(GOLDEN)


def test_what_ended_an_answer(llm: LLM) -> None:
    whole = llm.generate("Once upon a time", max_tokens=20, temperature=0)
    assert (whole.finish_reason, whole.stop_reason) == ("length", None)
    by_text = llm.generate("Once upon a time", max_tokens=20, temperature=0, stop="there was")
    assert (by_text.finish_reason, by_text.stop_reason) == ("stop", "there was")
    by_id = llm.generate("Once upon a time", max_tokens=20, temperature=0, stop_token_ids=[whole.token_ids[3]])
    assert (by_id.finish_reason, by_id.stop_reason) == ("stop", whole.token_ids[3])
    assert llm.generate("", temperature=0, max_tokens=-1).stop_reason is None
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    half = next(i for i in range(512) if tokenizer.piece(i) == "<0xC3>")  # of a character that does not come
    for most in (1, 2):
        output = llm.generate("Once", max_tokens=most, temperature=0, logit_bias={half: 1e4}, stop="\ufffd")
        assert (output.text, output.finish_reason, output.stop_reason) == ("", "stop", "\ufffd")


def test_a_with_block_ends_the_thread_that_computes(stories: Path) -> None:
    with LLM(stories, device="cpu", dtype="fp32", kv_memory="1M") as own:
        assert own.kv_bytes <= 2**20
        assert str(stories) in repr(own)
        own.generate("a", max_tokens=2)
    with pytest.raises(EngineError):
        own.generate("a", max_tokens=2)
    with pytest.raises(RequestError, match="kv_memory"):
        LLM(stories, device="cpu", kv_memory="much")


def test_errors_say_which_prompt(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompts\[1\]: the prompt has \d+ tokens"):
        llm.generate(["a", "a b " * 600], max_tokens=2)
    with pytest.raises(RequestError, match="logits takes token ids"):
        llm.logits("a")  # type: ignore[arg-type]


def test_batch_equals_one_by_one(llm: LLM) -> None:
    prompts = ["Once upon a time", "", "The dog", "Lily and Ben went to the park. They", "A"] * 4
    for params in (SamplingParams(temperature=0, max_tokens=40), SamplingParams(seed=3, max_tokens=40, logprobs=2)):
        together = llm.generate(prompts, params)
        for prompt, output in zip(prompts[:5], together, strict=False):
            alone = llm.generate(prompt, params)
            assert (alone.token_ids, alone.text, alone.finish_reason) == (
                output.token_ids,
                output.text,
                output.finish_reason,
            )


def test_stream_equals_generate(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=80)
    pieces = list(llm.stream("Once upon a time", params))
    whole = llm.generate("Once upon a time", params)
    assert "".join(p.text for p in pieces) == whole.text
    assert [p.token_id for p in pieces] == whole.token_ids
    assert [p.output is not None for p in pieces] == [False] * (len(pieces) - 1) + [True]


def test_same_seed_same_text(llm: LLM) -> None:
    first, again, other = (llm.generate("Once", seed=seed, max_tokens=60).token_ids for seed in (5, 5, 6))
    assert first == again != other


def test_seed_is_reported_and_repeats(llm: LLM) -> None:
    output = llm.generate("Once", max_tokens=30)
    assert llm.generate("Once", max_tokens=30, seed=output.seed).token_ids == output.token_ids


def test_stop_strings_and_ids(llm: LLM) -> None:
    free = llm.generate("Once upon a time", temperature=0, max_tokens=60)
    cut = llm.generate("Once upon a time", temperature=0, max_tokens=60, stop=["She loved"])
    assert cut.text == free.text[: free.text.index("She loved")]
    assert cut.finish_reason == "stop"
    stop_id = free.token_ids[5]
    by_id = llm.generate("Once upon a time", temperature=0, max_tokens=60, stop_token_ids=[stop_id])
    assert by_id.token_ids == free.token_ids[: free.token_ids.index(stop_id) + 1]
    assert by_id.finish_reason == "stop"


def test_context_limit_is_a_clear_finish(stories: Path) -> None:
    small = LLM(stories, device="cpu", max_context=32)
    output = small.generate("Once upon a time", max_tokens=-1, ignore_eos=True)
    assert (output.finish_reason, output.limit) == ("length", "context")
    assert output.timings.prompt_tokens + output.timings.generated_tokens == 32
    assert small.generate("Once", max_tokens=4, ignore_eos=True).limit == "max_tokens"
    with pytest.raises(RequestError, match="no room"):
        small.generate(list(range(3, 35)))
    with pytest.raises(RequestError, match="1 to 512"):
        LLM(stories, device="cpu", max_context=513)
    with pytest.raises(RequestError, match="a context of True positions"):
        LLM(stories, device="cpu", max_context=True)


def test_end_of_story_is_a_list_of_ids(llm: LLM) -> None:
    assert llm.eos_ids == {1, 2}
    output = llm.generate("", max_tokens=-1, temperature=0)
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] in llm.eos_ids
    longer = llm.generate("", max_tokens=len(output.token_ids) + 5, temperature=0, ignore_eos=True)
    assert longer.token_ids[: len(output.token_ids)] == output.token_ids
    assert len(longer.token_ids) == len(output.token_ids) + 5


def test_logprobs_are_of_the_raw_logits(llm: LLM) -> None:
    output = llm.generate(
        "Once upon a time", max_tokens=12, seed=1, temperature=2.0, top_k=5, logprobs=3, prompt_logprobs=2
    )
    ids = llm.encode("Once upon a time")
    want = torch.log_softmax(llm.logits(ids + output.token_ids).double(), -1)
    assert output.logprobs is not None
    for i, item in enumerate(output.logprobs):
        row = want[len(ids) + i - 1]
        assert item.token_id == output.token_ids[i]
        assert item.logprob == pytest.approx(row[item.token_id].item(), abs=2e-5)
        assert [t for t, _ in item.top] == row.topk(3).indices.tolist()
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(ids)
    for i, item in enumerate(output.prompt_logprobs[1:], 1):
        assert item is not None
        assert (item.token_id, len(item.top)) == (ids[i], 2)
        assert item.logprob == pytest.approx(want[i - 1, ids[i]].item(), abs=2e-5)


def test_token_ids_without_a_tokenizer(stories: Path, tmp_path: Path, llm: LLM) -> None:
    bare = copied(stories, tmp_path / "bare")
    for file in bare.glob("*token*"):
        file.unlink()
    (bare / "special_tokens_map.json").unlink(missing_ok=True)
    other = LLM(bare, device="cpu", dtype="fp32")
    ids = llm.encode("Once upon a time")
    output = other.generate(ids, temperature=0, max_tokens=20)
    assert output.token_ids == llm.generate("Once upon a time", temperature=0, max_tokens=20).token_ids
    assert output.text == ""
    with pytest.raises(RequestError, match="no tokenizer"):
        other.generate("Once")
    with pytest.raises(RequestError, match="512"):
        other.generate([1, 512])
    with pytest.raises(RequestError, match="stop needs a tokenizer"):
        other.generate(ids, stop="the")


def test_logits_are_a_tensor_of_the_callers_own(llm: LLM) -> None:
    logits = llm.logits([1, 2, 3])
    before = logits.clone()
    logits /= 0.5
    weight = torch.ones(logits.shape[1], requires_grad=True)
    (logits * weight).sum().backward()
    assert torch.equal(logits, before / 0.5)
    assert torch.equal(llm.logits([1, 2, 3]), before)


def test_chat_keeps_its_cache(stories: Path, tmp_path: Path) -> None:
    folder = copied(stories, tmp_path / "chat")
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = LLM(folder, device="cpu", dtype="fp32")
    messages = [{"role": "user", "content": "Tell me about a dog. " * 10}]
    first = model.chat(messages, temperature=0, max_tokens=20)
    assert first.timings.prefilled_tokens == first.timings.prompt_tokens
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And a cat?"}]
    second = model.chat(messages, temperature=0, max_tokens=20)
    kept = first.timings.prompt_tokens // PAGE * PAGE  # of the prompt's own full pages; the answer is a new prompt
    assert kept >= PAGE
    assert second.timings.prefilled_tokens == second.timings.prompt_tokens - kept
    fresh = LLM(folder, device="cpu", dtype="fp32").chat(messages, temperature=0, max_tokens=20)
    assert fresh.timings.prefilled_tokens == fresh.timings.prompt_tokens
    assert fresh.token_ids == second.token_ids


def test_unknown_options_raise(llm: LLM) -> None:
    with pytest.raises(RequestError, match="max_token"):
        llm.generate("Once", max_token=5)
    with pytest.raises(TypeError):
        LLM(llm.folder, precision="fp32")  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="dtype"):
        LLM(llm.folder, dtype="fp16")
    with pytest.raises(RequestError, match="device"):
        LLM(llm.folder, device="tpu")


def test_generation_config_gives_the_defaults(stories: Path, tmp_path: Path) -> None:
    folder = copied(stories, tmp_path / "greedy")
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False, "eos_token_id": [1, 2]}))
    model = LLM(folder, device="cpu", dtype="fp32")
    assert (
        model.generate("Once", max_tokens=20).token_ids
        == model.generate("Once", max_tokens=20, temperature=0).token_ids
    )


@pytest.mark.parametrize("case", ["tied", "tied-with-head", "head-only", "untied"])
def test_four_ways_to_tie(case: str, stories: Path, tmp_path: Path, llm: LLM) -> None:
    folder = copied(stories, tmp_path / case, tie_word_embeddings=case != "untied")
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    if case != "tied":
        tensors["lm_head.weight"] = table.clone()
    if case == "head-only":
        del tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    ids = list(range(3, 40))
    assert torch.equal(LLM(folder, device="cpu", dtype="fp32").logits(ids), llm.logits(ids))


def test_missing_and_unexpected_tensors_are_named(stories: Path, tmp_path: Path) -> None:
    folder = copied(stories, tmp_path / "broken")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    tensors["model.layers.9.extra.weight"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"missing: 'model\.layers\.3\.mlp\.up_proj\.weight'; unexpected: .*9\.extra"
    ):
        LLM(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"model_type 'mamba'.*llama"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"rope_type": "magic", "factor": 2.0}}, r"rope_type 'magic'.*llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "extra": 1}}, "extra"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size must be int"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps|finite|JSON"),
    ],
)
def test_config_is_refused_before_weights(changes: dict, message: str, stories: Path, tmp_path: Path) -> None:
    folder = copied(stories, tmp_path / "config", **changes)
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=message):
        LLM(folder)


def test_unknown_config_keys_warn_or_are_refused(stories: Path, tmp_path: Path) -> None:
    folder = copied(stories, tmp_path / "unknown", secret_multiplier=2.0)
    with pytest.warns(UserWarning, match="secret_multiplier"):
        LLM(folder, device="cpu")
    with pytest.raises(ConfigError, match="secret_multiplier"):
        LLM(folder, device="cpu", strict=True)


def test_both_config_layouts_agree(stories: Path, tmp_path: Path, llm: LLM) -> None:
    folder = copied(
        stories,
        tmp_path / "five",
        rope_theta=None,
        rope_scaling=None,
        torch_dtype=None,
        dtype="float32",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    ids = list(range(3, 40))
    assert torch.equal(LLM(folder, device="cpu", dtype="fp32").logits(ids), llm.logits(ids))


def test_a_small_card_holds_what_few_programs_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 256 sequences come to 2.2 GiB for a vocabulary of 128 K: planned for, and not asked for at once."""
    llm, raw = object.__new__(LLM), SHAPES["llama-3-8b"]
    llm.config = family(raw).read_config(raw)
    llm.device, llm.kv_dtype = torch.device("cuda"), torch.bfloat16
    llm.max_sequences, llm.max_context = 256, 8192
    checkpoint = SimpleNamespace(names=lambda: ["all"], info=lambda _: SimpleNamespace(nbytes=int(4.7 * 2**30)))
    programs = program_bytes(llm.config, llm.device, llm._kept_logits(0))
    assert programs > 2.2 * 2**30

    def pages(free_gib: float, programs: int = programs) -> int:
        free = int(free_gib * 2**30)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _=None: (free, 8 << 30))
        return llm._plan_pages(checkpoint, None, False, programs)  # type: ignore[arg-type]

    assert pages(7.4) >= 1
    assert pages(40) < pages(40, programs=0)
    with pytest.raises(DeviceError, match=r"programs 0\.\d\d GiB"):
        pages(6.0)
