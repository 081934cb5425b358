"""Token ids to text, one token at a time: the text of decoding all ids at once, cut at the first stop string.

Three detokenizers, one for each kind of decoder that `tokenizer.json` describes. Each turns a token's piece (its
string in the vocabulary) into the text that later tokens cannot change any more, and holds the rest back.
"""

import codecs
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import Any, Protocol

from nibblelm.errors import RequestError

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACEMENT = "\ufffd"

PER_BYTE = "nibblelm.per-byte"
"""The codecs error handler that gives one U+FFFD for each byte of what is not UTF-8 ("replace": one for several)."""


def _per_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(PER_BYTE, _per_byte)


class Detokenizer(Protocol):
    """Incremental decoding; `pieces` yields a token's piece, or None where the token has no text."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


Pieces = Callable[[int], str | None]


@cache
def byte_of_char() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable Latin-1 stands for itself, the 68 others follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def byte_level_bytes(piece: str) -> bytes:
    """The bytes a byte-level piece stands for; a piece with a character outside the alphabet is plain text."""
    table = byte_of_char()
    try:
        return bytes([table[char] for char in piece])
    except KeyError:
        return piece.encode()


@cache
def _whole_text(piece: str) -> str | None:
    """The text of a byte-level piece; None where it is not whole characters."""
    try:
        return byte_level_bytes(piece).decode()
    except UnicodeDecodeError:
        return None


class ByteLevelDetokenizer:
    """Pieces are bytes; an incomplete UTF-8 sequence waits for its rest."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._waits = False

    def push(self, token_id: int) -> str:
        piece = self._pieces(token_id)
        if piece is None:
            return ""
        if not self._waits and (text := _whole_text(piece)) is not None:
            return text
        text = self._utf8.decode(byte_level_bytes(piece))
        self._waits = bool(self._utf8.getstate()[0])
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class ByteFallbackDetokenizer:
    """SentencePiece pieces, some of them single bytes (`<0x0A>`).

    In a run of bytes every valid character is text as soon as it is complete, and every other byte is one U+FFFD: the
    rule of SentencePiece's own decoder. That of tokenizer.json gives the same text unless a run holds both, which it
    turns into U+FFFD as a whole, so that nothing could be shown before the run ends.
    """

    def __init__(self, pieces: Pieces, replaced: Sequence[tuple[str, str]], strip: int) -> None:
        self._pieces = pieces
        self._replaced = replaced
        self._strip = strip  # leading spaces still to be dropped: the dummy prefix of the first word
        self._utf8 = codecs.getincrementaldecoder("utf-8")(PER_BYTE)

    def push(self, token_id: int) -> str:
        piece = self._pieces(token_id)
        if piece is None:
            return ""
        if match := BYTE_PIECE.fullmatch(piece):
            return self._stripped(self._utf8.decode(bytes([int(match[1], 16)])))
        return self._stripped(self._utf8.decode(b"", final=True) + self.replace(piece))

    def replace(self, piece: str) -> str:
        """The text of a piece that is not a byte."""
        for old, new in self._replaced:
            piece = piece.replace(old, new)
        return piece

    def flush(self) -> str:
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
            else:
                text, self._strip = text[1:], self._strip - 1
        return text


class WindowDetokenizer:
    """Any other decoder: decodes a short window of ids again and emits what is new at its end."""

    KEEP, HOLD = 4, 8  # context ids that a new id is decoded after; most ids held for an unfinished character

    def __init__(self, pieces: Pieces, decode: Callable[[list[int]], str], after: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._decode = decode
        self._context = list(islice((i for i in reversed(after) if pieces(i) is not None), self.KEEP))[::-1]
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if self._pieces(token_id) is None:
            return ""
        self._pending.append(token_id)
        return self._emit(final=len(self._pending) >= self.HOLD)

    def flush(self) -> str:
        return self._emit(final=True)

    def _emit(self, final: bool) -> str:
        text = self._decode(self._context + self._pending)
        if text.endswith(REPLACEMENT) and not final:
            return ""
        new = text[len(self._decode(self._context)) :]
        self._context = (self._context + self._pending)[-self.KEEP :]
        self._pending = []
        return new


def detokenizer_factory(
    decoder: dict[str, Any] | None, decode: Callable[[list[int]], str] | None = None
) -> Callable[[Pieces, Sequence[int]], Detokenizer]:
    """Pick the detokenizer for the `decoder` section of a tokenizer.json; `decode` decodes a whole list of ids.

    It is made with the ids that stand before those to come: what a decoder drops at the beginning of a text, it drops
    only where none of them has text.
    """
    steps = decoder.get("decoders", [decoder]) if decoder else []
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return lambda pieces, after: ByteLevelDetokenizer(pieces)
    replaced, strip = [], 0
    while kinds and kinds[0] == "Replace" and "String" in steps[0]["pattern"]:
        replaced.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        steps, kinds = steps[1:], kinds[1:]
    if kinds == ["ByteFallback", "Fuse", "Strip"] and steps[2]["content"] == " " and steps[2]["stop"] == 0:
        kinds, strip = kinds[:2], steps[2]["start"]
    if kinds == ["ByteFallback", "Fuse"]:

        def made(pieces: Pieces, after: Sequence[int]) -> Detokenizer:
            begins = all(pieces(i) is None for i in after)
            return ByteFallbackDetokenizer(pieces, replaced, strip if begins else 0)

        return made
    assert decode is not None
    return lambda pieces, after: WindowDetokenizer(pieces, decode, after)


class StopFinder:
    """Passes text on until a stop string is complete; holds back what could still become one.

    The first stop is the one that is complete first (of several that end together, the one that starts first),
    so the result does not depend on how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise RequestError("a stop string is empty; give at least one character")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stop: str | None = None  # that is complete

    def push(self, text: str, final: bool = False) -> str:
        """Text that is safe to show; "" behind a `stop`. `final` gives out what was held back."""
        if not self._stops:
            return text
        if self.stop is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.stop = min(found)
            self._held = ""
            return text[:at]
        keep = 0 if final else self._could_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _could_start(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


__all__ = ["ByteFallbackDetokenizer", "ByteLevelDetokenizer", "Detokenizer", "StopFinder", "WindowDetokenizer"]
