"""POST /tokenize and /detokenize: what a model reads of a text, and what a row of token ids says."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from nibblelm.server.answers import answer
from nibblelm.server.errors import ApiError
from nibblelm.server.fields import is_integer
from nibblelm.server.messages import read_messages
from nibblelm.server.service import Service, read_body
from nibblelm.tokenizer import Tokenizer


async def tokenize(service: Service, http: HttpRequest) -> Response:
    """{"prompt": text} or {"messages": [...]} to {"tokens", "count", "max_model_len"}."""
    f = await read_body(http)
    service.check_model(f)
    tokenizer = _tokenizer(service)
    prompt = f.text("prompt")
    special = f.take("add_special_tokens", "true or false", lambda v: isinstance(v, bool)) is not False
    if prompt is None and f.lacks("messages"):
        raise ApiError(400, "prompt is missing; supported: prompt, a string, or messages", param="prompt")
    messages = None if prompt is not None else read_messages(f)
    f.end()

    def ids() -> list[int]:
        if prompt is not None:
            return tokenizer.encode(prompt, special)
        return service.llm.encode_chat(messages or [])

    tokens = await service.in_pool(ids, of=f.size)
    return answer({"tokens": tokens, "count": len(tokens), "max_model_len": service.llm.max_context})


async def detokenize(service: Service, http: HttpRequest) -> Response:
    """{"tokens": [ids]} to {"prompt": text}, special tokens included."""
    f = await read_body(http)
    service.check_model(f)
    tokenizer = _tokenizer(service)
    size = service.llm.config.vocab_size

    def fits(value: Any) -> bool:
        return isinstance(value, list) and all(is_integer(i) and 0 <= i < size for i in value)

    tokens = f.take("tokens", f"a list of token ids, 0 to {size - 1}", fits, required=True)
    f.end()
    return answer({"prompt": await service.in_pool(tokenizer.decode, tokens, False, of=f.size)})


def _tokenizer(service: Service) -> Tokenizer:
    if service.llm.tokenizer is None:
        raise ApiError(400, "this model has no tokenizer")
    return service.llm.tokenizer
