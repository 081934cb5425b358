"""Every family and weight format against the source implementation in transformers, float32, dequantized weights."""

import sys
from pathlib import Path

import pytest
import torch
from transformers.pytorch_utils import Conv1D

from nibblelm import LLM, convert
from nibblelm.models import families

sys.path.insert(0, str(Path(__file__).parent))
from oracle import BIDIRECTIONAL, CONFIGS, PROMPT, load_reference, mixed, relative_error, save_random

FORMATS = {
    "fp32": None,
    "int8": dict(bits=8),
    "int4-row": dict(bits=4, group_size=-1),
    "int4-g32": dict(bits=4, group_size=32),
    "int4-g128": dict(bits=4, group_size=128),
    "int4-g32-symmetric-tied": dict(bits=4, group_size=32, symmetric=True, keep_tied=True),
    "mixed": {},
}


def test_every_family_is_enumerated() -> None:
    assert {name.partition("-")[0] for name in CONFIGS} == set(families())


def test_a_family_unknown_to_transformers_gets_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIGS, "novel-tied", {})
    with pytest.raises(LookupError, match=r"reference_novel\.py.*CONTRIBUTING"):
        save_random("novel-tied", tmp_path)


ROUNDED = ("int8", "int4-row", "int4-g32", "int4-g128")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every variant in every format with --every; else Llama so, and of each other one fp32 and a format in turn."""
    if "source" not in metafunc.fixturenames:
        return
    rounded = metafunc.function is test_rounded_activations
    formats = list(ROUNDED if rounded else FORMATS)
    every = metafunc.config.getoption("--every")
    pairs = []
    for i, name in enumerate(CONFIGS):
        turn = formats[i % len(formats) if rounded else 1 + i % (len(formats) - 1)]
        sample = {turn} if rounded else {"fp32", turn}
        pairs += [(name, scheme) for scheme in formats if every or name == "llama" or scheme in sample]
    metafunc.parametrize(("source", "scheme"), pairs, indirect=["source"], scope="module")


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, save_random(request.param, tmp_path_factory.mktemp(request.param) / "source")


def make(source: Path, name: str, scheme: str, folder: Path) -> Path:
    """The folder of a format; a scheme of None is the unquantized source itself."""
    options = mixed(name) if scheme == "mixed" else FORMATS[scheme]
    if options is None:
        return source
    convert(source, folder, **options)
    return folder


def test_logits(source: tuple[str, Path], scheme: str, tmp_path: Path) -> None:
    name, folder = source
    quantized = make(folder, name, scheme, tmp_path / "quantized")
    with torch.inference_mode():
        want = load_reference(folder, None if quantized == folder else quantized)(torch.tensor([PROMPT])).logits[0]
    llm = LLM(quantized, device="cpu", dtype="fp32")
    got = llm.logits(PROMPT)
    error = relative_error(got, want)
    print(f"{name} {scheme}: relative L2 at most {error.max():.2e}")
    assert error.max() <= 2e-4
    assert torch.equal(got.argmax(-1), want.argmax(-1))

    # the same prompt token by token, from a short prefill, or from one of what sees each other
    first = BIDIRECTIONAL.get(name, 3)
    runner = llm.runner
    runner.set_pages(0, [0, 1])
    runner.set_prompt(0, PROMPT, len(PROMPT))
    with torch.inference_mode():
        runner.prefill(PROMPT[:first])
        steps = torch.cat([runner.decode([token], [0]).clone() for token in PROMPT[first:]])
    assert relative_error(steps, got[first:]).max() <= 1e-5


# Inputs of quantized layers rounded per group of K to 8 bits ("auto") or 16 bits ("bf16"), both with a bf16 cache. The
# yardstick is the source implementation itself run in bf16 on the same weights. A group of 128 Gaussian values rounded
# to 8 bits has a relative error of about 0.6 %, four times that of bf16, but only the inputs of linear layers are
# rounded, where bf16 rounds every intermediate: the published bound is twice its error for 8 bits, half of it for 16.
# For 8 bits there is a second yardstick, in float32: the source implementation with the inputs of its linear modules
# rounded so. That is all of the error, but for the bf16 cache, whose values have an eighth of it, and how errors of the
# same size fall: a quarter more is allowed. FEW_ROUNDINGS are held to it alone: bf16 rounds less often in them, whose
# blocks stand side by side, whose norms come last, whose feed-forward has no gate or that have ALiBi, so that 8 bits
# cost up to 2.6 times as much.
FEW_ROUNDINGS = {
    "baichuan",
    "chatglm_6b",
    "codegen",
    "cohere",
    "cohere2",
    "falcon",
    "gptj",
    "mpt",
    "opt",
    "phi",
    "stablelm",
}


def test_rounded_activations(source: tuple[str, Path], scheme: str, tmp_path: Path) -> None:
    name, folder = source
    quantized = make(folder, name, scheme, tmp_path / "quantized")
    reference = load_reference(folder, quantized)
    with torch.inference_mode():
        want = reference(torch.tensor([PROMPT])).logits[0]
        yardstick = relative_error(reference.bfloat16()(torch.tensor([PROMPT])).logits[0].float(), want).mean()
    first = BIDIRECTIONAL.get(name, 3)
    limits = {"auto": 1.25 * relative_error(rounded_inputs(folder, quantized, scheme), want).mean()}
    for dtype, bound in (("auto", torch.inf if name.partition("-")[0] in FEW_ROUNDINGS else 2.0), ("bf16", 0.5)):
        llm = LLM(quantized, device="cpu", dtype=dtype)
        got = llm.logits(PROMPT)
        ratio = relative_error(got, want).mean() / yardstick
        print(
            f"{name} {scheme} {dtype}: relative L2 is {ratio:.2f} times that of transformers in bf16 ({yardstick:.1e})"
        )
        assert ratio <= bound
        assert relative_error(got, want).mean() <= limits.get(dtype, torch.inf)
        llm.runner.set_pages(0, [0, 1])
        llm.runner.set_prompt(0, PROMPT, len(PROMPT))
        with torch.inference_mode():
            llm.runner.prefill(PROMPT[:first])
            steps = torch.cat([llm.runner.decode([token], [0]).clone() for token in PROMPT[first:]])
        assert torch.equal(steps, got[first:]), "the K loop is integer: prefill and decode are the same bits"


def rounded_inputs(folder: Path, quantized: Path, scheme: str) -> torch.Tensor:
    """Logits of the source implementation, in float32, with every linear module's inputs rounded to 8 bits."""
    size = 32 if scheme == "int4-g32" else 128
    reference = load_reference(folder, quantized)

    def rounded(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        x = torch.nn.functional.pad(inputs[0], (0, -inputs[0].shape[-1] % size)).unflatten(-1, (-1, size))
        step = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
        return (((x / step).round() * step).flatten(-2)[..., : inputs[0].shape[-1]],)

    for module in reference.modules():
        if isinstance(module, torch.nn.Linear | Conv1D):
            module.register_forward_pre_hook(rounded)
    with torch.inference_mode():
        return reference(torch.tensor([PROMPT])).logits[0]


def of_bf16_error(source: Path, quantized: Path, prompts: list[list[int]]) -> list[float]:
    """For each prompt the error of dtype auto over that of transformers in bf16: mean relative L2 of the logits."""
    reference, ids = load_reference(source, quantized), torch.tensor(prompts)
    with torch.inference_mode():
        want = reference(ids).logits
        yardstick = relative_error(reference.bfloat16()(ids).logits.float(), want).mean(-1)
    llm = LLM(quantized, device="cpu")
    got = torch.stack([llm.logits(prompt) for prompt in prompts])
    return (relative_error(got, want).mean(-1) / yardstick).tolist()


WEIGHTS = {
    "int8": dict(bits=8),
    "int4 per row": dict(bits=4, group_size=-1),
    **{f"int4 g{group}": dict(bits=4, group_size=group) for group in (32, 64, 128)},
}


@pytest.mark.parametrize("scheme", WEIGHTS)
@pytest.mark.parametrize("name", ["stories260K", "tinystories656K_bf16"])
def test_rounded_activations_on_real_text(name: str, scheme: str, data_dir: Path, tmp_path: Path) -> None:
    source = data_dir / "checkpoints" / name
    quantized = tmp_path / "quantized"
    convert(source, quantized, **WEIGHTS[scheme])
    text = (data_dir / "text" / "tinystories_sample_2MiB.txt").read_text()[:20000]
    ids = LLM(quantized, device="cpu").tokenizer.encode(text)
    ratios = of_bf16_error(source, quantized, [ids[at : at + 256] for at in range(0, 6 * 256, 256)])
    print(f"{name} {scheme}: {', '.join(f'{ratio:.2f}' for ratio in ratios)} times transformers' bf16 error")
    assert max(ratios) <= 2.0


# A channel that stands out would take its group's steps for itself. With small gains it is just not worth a second
# digit, with large ones its share of every product is large.
@pytest.mark.parametrize("outlier", [4.0, 20.0, 1000.0])
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gemma2", "gpt_neox"])
def test_rounded_activations_with_outliers(name: str, outlier: float, tmp_path: Path) -> None:
    source = save_random(name, tmp_path / "source", outlier=outlier)
    for scheme, options in WEIGHTS.items():
        quantized = tmp_path / scheme
        convert(source, quantized, **options)
        (ratio,) = of_bf16_error(source, quantized, [PROMPT])
        print(f"{name} {scheme}, gains of {outlier}: {ratio:.2f} times transformers' bf16 error")
        assert ratio <= 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sources(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save_random("llama", tmp_path / "source", dtype)
    with torch.inference_mode():
        want = load_reference(folder)(torch.tensor([PROMPT])).logits[0]
    assert relative_error(LLM(folder, device="cpu", dtype="fp32").logits(PROMPT), want).max() <= 2e-4


def test_long_prompt_crosses_prefill_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_random("mistral", tmp_path / "source")
    ids = torch.randint(0, 331, (300,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        want = load_reference(folder)(torch.tensor([ids])).logits[0]
    whole = LLM(folder, device="cpu", dtype="fp32").logits(ids)
    monkeypatch.setitem(__import__("nibblelm.prompt_steps", fromlist=["PREFILL_CHUNK"]).PREFILL_CHUNK, "cpu", 64)
    cut = LLM(folder, device="cpu", dtype="fp32").logits(ids)
    assert relative_error(whole, want).max() <= 2e-4
    assert relative_error(cut, whole).max() <= 1e-5
