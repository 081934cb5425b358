"""Small random checkpoints of every family, saved by transformers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": dict(hidden_size=64, intermediate_size=172, num_attention_heads=8, num_key_value_heads=4),
    "mistral": dict(hidden_size=128, intermediate_size=208, num_attention_heads=4, num_key_value_heads=2),
    "qwen2": dict(hidden_size=96, intermediate_size=160, num_attention_heads=3, num_key_value_heads=1),
    "gpt_neox": dict(hidden_size=96, intermediate_size=160, num_attention_heads=3),
    "gemma2": dict(
        hidden_size=96,
        intermediate_size=160,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=5,
    ),
    "qwen3": dict(hidden_size=128, intermediate_size=384, num_attention_heads=4, num_key_value_heads=2, head_dim=80),
}


@pytest.fixture(autouse=True, scope="module")
def _one_torch_thread() -> Iterator[None]:
    """The tensors here are small: waking threads for them costs more than it gives. Other files have theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """`save(family, dtype, **config)` -> folder of a random checkpoint with a vocabulary of 331."""

    def save(family: str, dtype: torch.dtype = torch.bfloat16, name: str = "source", **changes: Any) -> Path:
        torch.manual_seed(0)
        sizes = {"vocab_size": 331, "num_hidden_layers": 2, **FAMILIES[family], **changes}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes), dtype=dtype)
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save
