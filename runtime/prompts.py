"""What callers may pass for a prompt: text, or token ids as a list, a numpy array or a tensor; for a chat messages."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from nibblelm.errors import RequestError

Prompt = str | Sequence[int] | np.ndarray | Tensor


def _plain(value: Any) -> Any:
    """numpy's and torch's values as Python's."""
    return value.tolist() if hasattr(value, "tolist") else value


def prompt_list(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether it was a single one, as an empty array or tensor of one dimension is."""
    values = _plain(prompts)
    if isinstance(values, str):
        return [values], True
    if isinstance(values, Mapping | bytes) or not isinstance(values, Iterable):
        raise RequestError(f"prompts is {prompts!r:.60}; supported: text, token ids, or a list of such prompts")
    values = [_plain(value) for value in values]
    numbers = [isinstance(value, int) for value in values]
    single = (bool(values) or getattr(prompts, "ndim", 0) == 1) and all(numbers)
    if any(numbers) and not single:
        raise RequestError(
            f"prompts has numbers beside others: {prompts!r:.60}; supported: token ids, or several prompts"
        )
    return [values] if single else values, single


def prompt_ids(prompt: Any) -> list[int]:
    """The ids of a prompt as a list. Raises RequestError for what is not a sequence of integers."""
    values = _plain(prompt)
    if type(values) is list and set(map(type, values)) == {int}:
        return list(values)
    ids = [_plain(i) for i in values] if isinstance(values, Iterable) else [values]
    if isinstance(values, Mapping | bytes) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise RequestError(f"a prompt is text or a list of token ids (integers), got {prompt!r:.60}")
    return ids


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages as chat templates take them: a role, and content as text, into which parts of type text are joined; none
    beside tool calls. Raises RequestError for others, which a template would write out as Python shows them."""
    if not isinstance(messages, list | tuple) or not all(isinstance(message, dict) for message in messages):
        raise RequestError(f'messages is {messages!r:.80}; supported: a list of {{"role": ..., "content": ...}}')
    if not messages:
        raise RequestError("messages is empty; supported: at least one message")
    return [message | {"content": _content(message, f"messages[{i}]")} for i, message in enumerate(messages)]


def _content(message: dict[str, Any], name: str) -> str:
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{name}.role is {message.get('role')!r:.60}; supported: a string, as user or assistant")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list | tuple) and content else [None]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            shown = content if part is None else part
            raise RequestError(f"{name}.content has {shown!r:.60}; supported: text, or a list of parts of type text")
        texts.append(text)
    return "".join(texts)
