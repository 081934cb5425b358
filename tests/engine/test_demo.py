"""The bundled model: its chat template, and that it tells a story."""

from pathlib import Path
from typing import Any

import pytest

from nibblelm import LLM

DEMO = Path(__file__).resolve().parents[2] / "demo" / "stories-7m"


@pytest.fixture(scope="module")
def llm() -> LLM:
    if not DEMO.is_dir():
        pytest.skip("the demo checkpoint is not beside these tests")
    return LLM(DEMO, device="cpu")


def said(*texts: str) -> list[dict[str, Any]]:
    """A conversation: the user speaks first and last."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("texts", "begins"),
    [
        (["a dog who lost his ball"], "Once upon a time, there was a dog who lost his ball."),
        (["Tell me a story about a brave mouse!"], "Once upon a time, there was a brave mouse."),
        (["please write about the sea"], "Once upon a time, there was the sea."),
        (["Once upon a time"], "Once upon a time"),
        (["Lily knew a story about a cat"], "Lily knew a story about a cat"),
        (["a dog", "He ran.", " a cat\n"], "Once upon a time, there was a cat."),
        ([""], ""),
    ],
)
def test_a_request_becomes_the_beginning_of_a_story(texts: list[str], begins: str, llm: LLM) -> None:
    from transformers import AutoTokenizer

    assert llm.tokenizer is not None
    assert llm.tokenizer.apply_chat_template(said(*texts)) == "<s>" + begins
    assert llm.encode_chat(said(*texts)) == (llm.encode(begins) if begins else [llm.bos_id])
    theirs = AutoTokenizer.from_pretrained(DEMO).apply_chat_template(said(*texts), tokenize=False)
    assert theirs == "<s>" + begins


def test_it_tells_a_story(llm: LLM) -> None:
    text = llm.chat(said("a dog who lost his ball"), temperature=0, max_tokens=60).text
    assert len(text.split()) > 30
    assert "dog" in text.lower()
