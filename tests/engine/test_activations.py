"""`activations` and `dtype`: what they mean on each device, and how they reach the layers."""

import json
from typing import Any

import pytest
import torch

from nibblelm import LLM, convert
from nibblelm.arguments import numeric_types
from nibblelm.cli import main
from nibblelm.errors import RequestError

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def folder(data_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("int4") / "model"
    convert(data_dir / "checkpoints" / "stories260K", path)
    return path


@pytest.mark.parametrize(
    ("device", "dtype", "activations", "expected"),
    [
        ("cpu", "auto", None, (FP32, BF16, 8)),
        ("cpu", "bf16", None, (FP32, BF16, 16)),
        ("cpu", "fp32", None, (FP32, FP32, 24)),
        ("cpu", "auto", 16, (FP32, BF16, 16)),
        ("cpu", "bf16", 8, (FP32, BF16, 8)),
        ("cpu", "fp32", 8, (FP32, FP32, 8)),
        ("cuda", "auto", None, (BF16, BF16, 16)),
        ("cuda", "fp32", None, (FP32, FP32, 24)),
        ("cuda", "auto", 8, (BF16, BF16, 8)),
        ("cuda", "bf16", 16, (BF16, BF16, 16)),
    ],
)
def test_what_they_mean(device, dtype, activations, expected):
    assert numeric_types(dtype, torch.device(device), activations) == expected


@pytest.mark.parametrize("activations", [8, 16])
def test_fp32_on_cuda_takes_no_fewer_bits(activations):
    with pytest.raises(RequestError, match=rf"activations {activations} with dtype fp32 .*use dtype bf16") as error:
        numeric_types("fp32", torch.device("cuda"), activations)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("activations", [0, 4, 24, 8.0, "8"])
def test_other_widths_are_refused(activations: Any, folder):
    with pytest.raises(RequestError, match=rf"activations is {activations!r}; supported: 8 or 16"):
        LLM(folder, "cpu", activations=activations)


def test_layers_round_to_what_is_asked_for(folder):
    """On the CPU 8 bits are what dtype auto gives, 16 what bf16 gives, to the bit."""
    ids = list(range(1, 40))
    by_dtype = [LLM(folder, "cpu", dtype) for dtype in ("auto", "bf16")]
    asked = [LLM(folder, "cpu", dtype, activations=bits) for dtype, bits in (("bf16", 8), ("auto", 16))]
    assert [llm.activations for llm in (*by_dtype, *asked)] == [8, 16, 8, 16]
    eight, sixteen = (llm.logits(ids) for llm in by_dtype)
    assert not torch.equal(eight, sixteen)
    assert torch.equal(asked[0].logits(ids), eight)
    assert torch.equal(asked[1].logits(ids), sixteen)


@pytest.mark.usefixtures("quick_bench")
def test_flag_of_every_command(folder, capsys):
    text = []
    for flags in ((), ("--activations", "8"), ("--activations", "16")):
        command = ["bench", "-m", str(folder), "--device", "cpu", "--prompt-tokens", "8", "--gen-tokens", "4", "--json"]
        assert main([*command, *flags]) == 0
        row = json.loads(capsys.readouterr().out)
        assert (row["dtype"], row["activations"], row["kv"]) == ("auto", int(flags[-1]) if flags else 8, "bf16")
        command = ["generate", "-m", str(folder), "--device", "cpu", "-p", "Once", "-n", "8", "--temp", "0", *flags]
        assert main(command) == 0
        text.append(capsys.readouterr().out)
    assert text[0] == text[1]
    for command in (["generate", "-p", "x"], ["chat"], ["bench"]):
        with pytest.raises(SystemExit, match="2"):
            main([*command, "-m", str(folder), "--activations", "24"])
        assert "--activations: invalid choice" in capsys.readouterr().err
