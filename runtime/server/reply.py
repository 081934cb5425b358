"""An answer taken apart as it comes: what the model thought, what it says, and the tools it calls."""

import json
import secrets
from collections.abc import Callable, Collection, Iterator
from typing import Any

from nibblelm.server.tool_formats import ToolFormat

THINK, THOUGHT = "<think>", "</think>"

Delta = dict[str, Any]


class ReplyParser:
    """Turns the text of one answer into deltas of its message.

    thinks    the template knows <think>: an answer that begins with it is reasoning up to </think>
    thinking  the prompt has opened it already
    tools     the format of tool calls, and names of the functions that may be called
    """

    def __init__(
        self, thinks: bool, thinking: bool, tools: ToolFormat | None = None, names: Collection[str] = ()
    ) -> None:
        self._state = self._thought_begins if thinking else self._opening if thinks else self._beginning
        self._tools, self._names = tools, names
        self._held = ""
        self._gap = ""  # white space before what may be a call
        self._final = False
        self._between = False  # nothing but white space has come since the last call
        self.calls = 0

    @property
    def says_all(self) -> bool:
        """Whether all that comes is said as it comes, but for the end: `push` would give a delta of just that."""
        return self._tools is None and self._state == self._content and not self._held

    def push(self, text: str, final: bool = False) -> list[Delta]:
        """The deltas that some more text makes certain; with `final` all that is left."""
        self._held += text
        self._final = final
        deltas: list[Delta] = []
        while True:
            state, before = self._state, self._held
            deltas += state()
            if self._state == state and (self._held == before or not self._held):
                return deltas

    def _opening(self) -> Iterator[Delta]:
        """Nothing but white space has come."""
        start = self._held.lstrip()
        if start.startswith(THINK):
            self._held, self._state = start[len(THINK) :], self._thought_begins
        elif self._final or not THINK.startswith(start):
            self._state = self._beginning
        yield from ()

    def _thought_begins(self) -> Iterator[Delta]:
        yield from self._without_line_ends(self._reasoning)

    def _reasoning(self) -> Iterator[Delta]:
        found = self._held.find(THOUGHT)
        ready = self._held[:found] if found >= 0 else self._ready(THOUGHT)
        if ready:
            yield {"reasoning_content": ready}
        self._held = self._held[len(ready) :]
        if found >= 0:
            self._held = self._held[len(THOUGHT) :]
            self._state = self._thought_ended

    def _thought_ended(self) -> Iterator[Delta]:
        yield from self._without_line_ends(self._beginning)

    def _without_line_ends(self, following: Callable[[], Iterator[Delta]]) -> Iterator[Delta]:
        """The line ends that come next separate; they are no part of the message."""
        self._held = self._held.lstrip("\n")
        if self._held or self._final:
            self._state = following
        yield from ()

    def _beginning(self) -> Iterator[Delta]:
        """The first character of what is said decides whether all of it is a call, where a format has it so."""
        start = self._held.lstrip()
        if self._tools is None or self._tools.start is not None:
            self._state = self._content
        elif start.startswith(("{", "<|python_tag|>")):
            self._state = self._whole_call
        elif self._final or (start and not "<|python_tag|>".startswith(start)):
            self._state = self._content
        yield from ()

    def _content(self) -> Iterator[Delta]:
        mark = None if self._tools is None else self._tools.start
        found = -1 if mark is None else self._held.find(mark)
        ready = self._held[:found] if found >= 0 else self._ready(mark)
        self._held = self._held[len(ready) :]
        if found >= 0:
            self._state = self._call
        said = ready
        self._between = self._between and not ready.strip()
        if found >= 0 or self._between:  # white space separates calls
            said = ready.rstrip()
        self._gap = ready[len(said) :] if found >= 0 else ""
        if said:
            yield {"content": said}

    def _call(self) -> Iterator[Delta]:
        """From the mark that starts a call."""
        assert self._tools is not None
        assert self._tools.start is not None
        begin, end, calls = len(self._tools.start), -1, None
        if self._tools.end is not None:
            end = self._held.find(self._tools.end, begin)
            while end >= 0 and (calls := self._tools.read(self._held[begin:end], self._names)) is None:
                if not _within_string(self._held[begin:end]):
                    break
                end = self._held.find(self._tools.end, end + 1)  # that one was part of an argument
        if end < 0:
            if not self._final:
                return
            calls = self._tools.read(self._held[begin:], self._names)
        behind = len(self._held) if end < 0 else end + len(self._tools.end or "")
        yield from self._called(calls, self._held[:behind])
        self._held = self._held[behind:]
        self._state = self._content

    def _whole_call(self) -> Iterator[Delta]:
        assert self._tools is not None
        if self._final:
            yield from self._called(self._tools.read(self._held, self._names), self._held)
            self._held = ""

    def _called(self, calls: list[dict[str, Any]] | None, text: str) -> Iterator[Delta]:
        """The deltas of calls; what is none, is text."""
        if calls is None and text:
            yield {"content": self._gap + text}
        self._gap, self._between = "", bool(calls)
        for call in calls or []:
            made = {"index": self.calls, "id": f"call_{secrets.token_hex(12)}", "type": "function", "function": call}
            self.calls += 1
            yield {"tool_calls": [made]}

    def _ready(self, mark: str | None) -> str:
        """What is held, but for an end that `mark` could begin with, and white space before that."""
        if mark is None or self._final:
            return self._held
        most = min(len(mark) - 1, len(self._held))
        kept = next((n for n in range(most, 0, -1) if mark.startswith(self._held[-n:])), 0)
        return self._held[: len(self._held) - kept].rstrip()


def _within_string(text: str) -> bool:
    """Whether JSON is cut off in the middle of a string."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except RecursionError:
        return False
    return False


def whole_message(deltas: list[Delta]) -> dict[str, Any]:
    """The message that all deltas of an answer make."""
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["content"] = content or None
        message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
    return message
