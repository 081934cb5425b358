"""Answers that follow a JSON schema, a regular expression or a grammar, token by token (llguidance).

JSON is written with ", " and ": " and no other white space, so that a schema whose parts are all bounded bounds the
answer. What a schema may cost is limited: its size here, compilation and every mask by llguidance's counters, which
count steps and not seconds, so that the same request fails or not on every machine.
"""

import json
import threading
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from nibblelm.errors import SchemaError
from nibblelm.sampling_params import SamplingParams
from nibblelm.schema_limits import exact_grammar, exact_schema, require_whole
from nibblelm.tokenizer import Tokenizer

LONGEST = 1 << 16
"""Characters of a schema, an expression or a grammar."""

KNOWN = 32
"""Grammars that are kept: several outputs of a prompt, and a client's requests, share one."""

_JSON = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Guide:
    """Where one output stands in its grammar, and which tokens may come next."""

    def __init__(self, matcher: Any, words: int, name: str) -> None:
        self._matcher, self._words, self._name = matcher, words, name
        self._mask: np.ndarray | None = None
        self._mark: _Mark | None = None  # that has still to come
        self._end = b""  # of what has come before it

    def copy(self, mark: "_Mark | None" = None) -> "Guide":
        """Another output at the same place, or one that will be there behind a mark."""
        copy = Guide(self._matcher.deep_copy(), self._words, self._name)
        copy._mask, copy._mark = self._mask, mark
        return copy

    def mask(self) -> np.ndarray:
        """Bit v % 32 of word v // 32, int32 (ceil(V / 32),): whether token v may come. Raises SchemaError."""
        if self._mark is not None:
            return self._mark.mask(self._end)
        if self._mask is None:
            mask = np.zeros(self._words, np.int32)
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check()
            self._mask = mask
        return self._mask

    def accept(self, token_id: int) -> None:
        """Take the token that came. Raises SchemaError for one that may not."""
        if self._mark is not None:
            self._end = self._mark.end_with(self._end, token_id)
            if self._end == self._mark.text:
                self._mark = None
            return
        self._mask = None
        self._matcher.consume_token(token_id)
        self._check()

    def _check(self) -> None:
        if error := self._matcher.get_error():
            raise SchemaError(f"the {self._name} cannot be followed: {_first_line(error)}")


class _Mark:
    """The text behind which an answer begins to follow its grammar. Up to there any token may come that does not end
    the output, but for one that holds the mark's end and more than line ends after it.

    tokens  the bytes of each token
    """

    def __init__(self, text: bytes, tokens: Sequence[bytes], end_ids: Collection[int]) -> None:
        self.text, self._tokens, self._masks = text, tokens, dict[int, np.ndarray]()
        last = text[-1:]
        ending = [(i, token) for i, token in enumerate(tokens) if last in token.rstrip(b"\n")[:-1]]
        self._never = [*end_ids, *(i for i, token in ending if token.partition(text)[2].strip(b"\n"))]
        # by what is lacking of the mark
        self._not_after = {
            lacking: [i for i, token in ending if token.startswith(text[-lacking:]) and token[lacking:].strip(b"\n")]
            for lacking in range(1, len(text))
        }

    def end_with(self, end: bytes, token_id: int) -> bytes:
        """What has come, as far as the mark may begin there, and a token after it."""
        come = end + self._tokens[token_id]
        return self.text if self.text in come else come[max(0, len(come) + 1 - len(self.text)) :]

    def mask(self, end: bytes) -> np.ndarray:
        """As `Guide.mask`, where this has come."""
        begun = [lacking for lacking in self._not_after if end.endswith(self.text[:-lacking])]
        key = sum(1 << lacking for lacking in begun)
        if key not in self._masks:
            may = np.ones(-(-len(self._tokens) // 32) * 32, np.bool_)
            may[[i for ids in (self._never, *map(self._not_after.get, begun)) for i in ids or ()]] = False
            self._masks[key] = np.packbits(may, bitorder="little").view(np.int32)
        return self._masks[key]


_GUIDES = ("schema", "regex", "grammar")


class Guides:
    """Makes guides for one model, from any thread. The first takes as long as reading the vocabulary does."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._end_ids = sorted(i for i in end_ids if i < vocab_size)  # others cannot be chosen
        self._lock = threading.Lock()
        self._made: Any = None
        self._tokens: Sequence[bytes] = ()
        self._marks: dict[str, _Mark] = {}
        self._known: dict[tuple[str, str], Guide] = {}  # the newest last

    def guide(self, params: SamplingParams) -> Guide | None:
        """The beginning of what `params` ask for, None if that is nothing.

        Raises SchemaError for what does not parse, is not supported or is too large.
        """
        asked = {name: value for name in _GUIDES if (value := getattr(params, name)) is not None}
        if not asked:
            return None
        ((name, value),) = asked.items()
        try:
            text = "{}" if value is True else value if isinstance(value, str) else json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise SchemaError(f"the {name} is no JSON value: {error}") from error
        if len(text) > LONGEST:
            raise SchemaError(f"the {name} has {len(text)} characters; supported: at most {LONGEST}")
        if (guide := self._known.get((name, text))) is None:
            guide = self._compiled(name, text)
            with self._lock:
                if len(self._known) >= KNOWN:
                    del self._known[next(iter(self._known))]
                self._known[name, text] = guide
        return guide.copy(None if params.guided_after is None else self._mark(params.guided_after))

    def _mark(self, text: str) -> _Mark:
        """That of a text, once the vocabulary has been read."""
        if (mark := self._marks.get(text)) is None:
            mark = _Mark(text.encode(), self._tokens, self._end_ids)
            with self._lock:
                if len(self._marks) >= KNOWN:
                    del self._marks[next(iter(self._marks))]
                self._marks[text] = mark
        return mark

    def _compiled(self, name: str, text: str) -> Guide:
        vocabulary = self._vocabulary()
        from llguidance import LLMatcher

        try:
            if name == "schema":
                text = json.dumps(exact_schema(json.loads(text)))
                grammar = LLMatcher.grammar_from_json_schema(text, overrides=_JSON)  # type: ignore[arg-type]
            elif name == "grammar":
                grammar = LLMatcher.grammar_from_lark(exact_grammar(text))
            else:
                require_whole(text, name)
                grammar = LLMatcher.grammar_from_regex(text)
        except (ValueError, RecursionError) as error:
            raise SchemaError(f"the {name} cannot be read: {_first_line(str(error))}") from error
        matcher = LLMatcher(vocabulary, grammar, log_level=0)
        if error := matcher.get_error():
            raise SchemaError(f"the {name} cannot be followed: {_first_line(error)}")
        guide = Guide(matcher, -(-self._vocab_size // 32), name)
        guide.mask()  # the first is the dearest, and whoever compiles waits for nobody
        return guide

    def _vocabulary(self) -> Any:
        with self._lock:
            if self._made is None:
                self._made = self._read()
            return self._made

    def _read(self) -> Any:
        if self._tokenizer is None or not self._end_ids:
            raise SchemaError("a schema needs a model with a tokenizer and an end token; this folder lacks one")
        try:
            from llguidance import LLTokenizer, TokenizerWrapper  # type: ignore[attr-defined]
        except ImportError as error:
            raise SchemaError("a schema needs llguidance; install it with pip install 'nibblelm[serve]'") from error
        words = _Vocabulary(self._tokenizer, self._vocab_size, self._end_ids[0])
        self._tokens = words.tokens
        return LLTokenizer(TokenizerWrapper(words), n_vocab=self._vocab_size, eos_token=self._end_ids)


class _Vocabulary:
    """A tokenizer as llguidance reads it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = end_id, tokenizer.bos_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(vocab_size)]
        self.special_token_ids = [i for i in range(vocab_size) if tokenizer.is_special(i)]
        self._special = frozenset(self.special_token_ids)
        special = {b"", *(self.tokens[i] for i in self._special)}
        self._ids = {token: i for i, token in enumerate(self.tokens) if token not in special}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        """Ids that stand for exactly this text, where there are such: some tokenizers put a space before a text, or
        drop one behind it, or take the name of a special token for that, and then its tokens are looked for one by one.
        """
        if not isinstance(text, str):
            raise TypeError("text alone is encoded")
        ids, data = self._tokenizer.encode(text, add_special_tokens=False), text.encode()
        plain = self._special.isdisjoint(ids) and all(i < len(self.tokens) for i in ids)
        if plain and b"".join(self.tokens[i] for i in ids) == data:
            return ids
        ids, at = [], 0
        while at < len(data):
            lengths = range(min(self._longest, len(data) - at), 0, -1)
            found = next((length for length in lengths if data[at : at + length] in self._ids), None)
            if found is None:
                break
            ids.append(self._ids[data[at : at + found]])
            at += found
        return ids


def _first_line(error: str) -> str:
    """llguidance ends its messages with the state of its parser; some name its own options and states."""
    error = error.partition("\n<state>")[0].strip()[:500]
    if "coerce_one_of" in error:
        return "alternatives of oneOf that an answer may satisfy together, or seems to, are not supported; use anyOf"
    return "no answer that it allows is found" if error == "NoExtensionBias" else error
