"""The GPU against transformers on the CPU in float32, for every family and weight format."""

import sys
from pathlib import Path

import pytest
import torch

from nibblelm import LLM, convert, ops

sys.path.insert(0, str(Path(__file__).parent))
from oracle import (
    BIDIRECTIONAL,
    CONFIGS,
    CONFIGS_BY_HEAD_SIZE,
    PROMPT,
    load_reference,
    mixed,
    relative_error,
    save_random,
)

USABLE, REASON = ops.cuda_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason=REASON)]

FORMATS: dict[str, dict | None] = {
    "full": None,
    "int8": dict(bits=8),
    "int4-row": dict(bits=4, group_size=-1),
    "int4-g32": dict(bits=4, group_size=32),
    "int4-g128": dict(bits=4, group_size=128),
    "mixed": {},
}


# Every variant in every format, with its own head sizes; and every family with those that have kernels of their own.
CASES = [(name, scheme) for name in CONFIGS for scheme in FORMATS]
CASES += [(name, scheme) for name in CONFIGS_BY_HEAD_SIZE for scheme in ("full", "int4-row")]


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, save_random(request.param, tmp_path_factory.mktemp(request.param) / "source", torch.bfloat16)


@pytest.mark.parametrize(("source", "scheme"), CASES, indirect=["source"], scope="module")
def test_logits(source: tuple[str, Path], scheme: str, tmp_path: Path) -> None:
    name, folder = source
    options, quantized = mixed(name) if scheme == "mixed" else FORMATS[scheme], folder
    if options is not None:
        quantized = tmp_path / "quantized"
        convert(folder, quantized, **options, threads=1)
    ids = torch.tensor([PROMPT])
    reference = load_reference(folder, None if options is None else quantized)
    with torch.inference_mode():
        want = reference(ids).logits[0]
        half = reference.bfloat16()(ids).logits[0].float()
    exact = LLM(quantized, device="cuda", dtype="fp32")
    got = exact.logits(PROMPT).cpu()
    error = relative_error(got, want).max()
    print(f"{name} {scheme} fp32: relative L2 at most {error:.2e}")
    assert error <= 2e-4
    assert torch.equal(got.argmax(-1), want.argmax(-1))

    # token by token, from a short prefill: another kernel family, the same numbers
    runner, first = exact.runner, BIDIRECTIONAL.get(name.partition("-of-")[0], 3)
    runner.set_pages(0, [0, 1])
    runner.set_prompt(0, PROMPT, len(PROMPT))
    with torch.inference_mode():
        runner.prefill(PROMPT[:first])
        steps = torch.cat([runner.decode([token], [0]).clone() for token in PROMPT[first:]]).cpu()
    assert relative_error(steps, want[first:]).max() <= 2e-4

    # bf16: at most twice the error of the source implementation in bf16, and the same token wherever it is clear
    rough = LLM(quantized, device="cuda", dtype="bf16").logits(PROMPT).cpu()
    ours, theirs = relative_error(rough, want).mean(), relative_error(half, want).mean()
    print(f"{name} {scheme} bf16: relative L2 {ours:.2e}, transformers {theirs:.2e}")
    assert ours <= 2 * theirs
    top = want.topk(2).values
    clear = (top[:, 0] - top[:, 1]) > 2 * (half - want).abs().max()
    assert torch.equal(rough.argmax(-1)[clear], want.argmax(-1)[clear])
