"""A second client, written by others: langchain's."""

from typing import Any, Literal

import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from nibblelm import LLM, SamplingParams

STORY = "a dog who lost his ball"


class Colour(BaseModel):
    """A schema, as its users write one."""

    red: bool
    shade: Literal["dark", "light"]


@pytest.fixture(scope="module")
def chat(server: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{server.url}/v1", api_key=SecretStr("none"), model="demo", temperature=0, max_retries=0
    )


def test_invoke_stream_batch_and_schema(chat: ChatOpenAI, llm: LLM) -> None:
    def told(story: str) -> str:
        return llm.chat([{"role": "user", "content": story}], SamplingParams(temperature=0, max_tokens=16)).text

    short = chat.bind(max_tokens=16)
    answer = short.invoke(STORY)
    assert answer.content == told(STORY)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == 16
    assert answer.response_metadata["finish_reason"] == "length"
    assert "".join(str(chunk.content) for chunk in short.stream(STORY)) == told(STORY)
    assert [one.content for one in short.batch(["a cat", "the sea"])] == [told("a cat"), told("the sea")]
    assert isinstance(chat.with_structured_output(Colour).invoke(STORY), Colour)
