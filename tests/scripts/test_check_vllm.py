"""check_vllm with transformers in vLLM's place: a package of that name, found where vLLM would be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

VLLM = '''
"""transformers behind the few calls of vLLM that are made."""
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, model, **options):
        if "int8" in model:
            raise ValueError("these weights are not supported")
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype="auto", attn_implementation="eager")

    def generate(self, prompts, params, use_tqdm):
        (ids,) = (prompt["prompt_token_ids"] for prompt in prompts)
        with torch.no_grad():
            scores = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        places = [{token: SimpleNamespace(logprob=float(row[token]))} for token, row in zip(ids[1:], scores)]
        return [SimpleNamespace(prompt_logprobs=[None, *places])]
'''


@pytest.mark.slow
def test_log_probabilities_are_those_of_another_reader(demo: Path, tmp_path: Path, script: Callable[..., Any]) -> None:
    package, record = tmp_path / "site" / "vllm", tmp_path / "vllm_folders.json"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(VLLM)
    names = ["minmax", "mse, int8 per row", "mse, symmetric, 16-bit head"]
    options = ["--site", tmp_path / "site", "--device", "cpu", "--work", tmp_path / "work", "--json", record]
    result = script("check_vllm.py", *options, "--folder", *names)
    assert result.returncode == 1, result.stderr
    rows = {row["folder"]: row for row in json.loads(record.read_text())}
    assert list(rows) == names
    assert not rows[names[1]]["opened"]
    assert "these weights are not supported" in rows[names[1]]["message"]
    for name in (names[0], names[2]):
        assert rows[name]["tokens"] == 200
        assert 0 < rows[name]["mean"] <= 0.02  # with activations in bf16 on the other side, as in vLLM
        assert rows[name]["mean"] <= rows[name]["most"] < 0.2
    before = record.read_text()
    (package / "__init__.py").write_text("import time; time.sleep(60)")
    late = script("check_vllm.py", *options, "--limit", "1", "--folder", names[0])
    assert late.returncode == 1, late.stderr
    assert f"{names[0]}: not read within 1 s of all" in late.stdout
    assert record.read_text() == before
