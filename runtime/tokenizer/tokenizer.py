"""Text to token ids and back, the same ids as transformers' AutoTokenizer gives, without importing it."""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nibblelm.errors import TokenizerError
from nibblelm.tokenizer.detokenizer import (
    BYTE_PIECE,
    ByteFallbackDetokenizer,
    ByteLevelDetokenizer,
    StopFinder,
    byte_level_bytes,
    detokenizer_factory,
)
from nibblelm.tokenizer.files import FILES, TEMPLATES, Settings, load_backend, read_json, read_settings
from nibblelm.tokenizer.ranks import has_ranks, load_ranks

if TYPE_CHECKING:
    from tokenizers import Tokenizer as JsonTokenizer


class _Backend(Protocol):
    def encode_ids(self, text: str, add_special_tokens: bool, /) -> list[int]: ...
    def spans(self, text: str, /) -> list[tuple[int, int, int]] | None: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, /) -> str: ...
    def id_to_token(self, token_id: int, /) -> str | None: ...
    def token_to_id(self, token: str, /) -> int | None: ...

    @property
    def special(self) -> Mapping[str, str]: ...

    @property
    def special_ids(self) -> set[int]: ...

    @property
    def size(self) -> int: ...


LONG = 4096
"""Characters from which a text is encoded as a batch of one, without offsets and without the GIL, which `encode` would
hold for as long as it takes."""


class _JsonBackend:
    """`tokenizers.Tokenizer` behind the same few methods as `SentencePieceBackend`."""

    def __init__(self, backend: "JsonTokenizer", special: Mapping[str, str]) -> None:
        self._backend = backend
        self.special = special
        self.special_ids = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self.decode = backend.decode
        self.token_to_id = backend.token_to_id
        self.id_to_token = backend.id_to_token
        self.size = backend.get_vocab_size()

    def encode_ids(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) < LONG:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def spans(self, text: str) -> list[tuple[int, int, int]]:
        """Ids of `encode_ids` with special tokens, and which characters of the text each stands for."""
        encoding = self._backend.encode_batch([text])[0]  # a batch, for the GIL
        return [(i, *span) for i, span in zip(encoding.ids, encoding.offsets, strict=True)]


class _Pieces(dict[int, str | None]):
    """The pieces of ids, each looked up once."""

    def __init__(self, look_up: Callable[[int], str | None]) -> None:
        self._look_up = look_up

    def __missing__(self, token_id: int) -> str | None:
        piece = self[token_id] = self._look_up(token_id)
        return piece


def _raise_others(error: BaseException) -> None:
    """Raise again what is no failure of a tokenizer's library: of the Rust ones a panic is no Exception."""
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error


class Tokenizer:
    """Encodes, decodes and renders chats for one checkpoint; made by `load_tokenizer`."""

    def __init__(
        self,
        backend: _Backend,
        decoder: dict[str, Any] | None,
        chat_template: str | None,
        tool_template: str | None = None,
    ) -> None:
        self._backend = backend
        self._special = dict(backend.special)
        self._special_ids = backend.special_ids
        self._pieces = _Pieces(lambda i: backend.id_to_token(i) if i >= 0 else None)
        self._shown: dict[tuple[str, ...], _Pieces] = {}
        self._detokenizer = detokenizer_factory(decoder, self._decode_all)
        self.chat_template, self._tool_template = chat_template, tool_template
        self.vocab_size: int = backend.size
        """Number of ids, added tokens included; a model's logits may be wider."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; `add_special_tokens` adds what the model expects around a text (often bos)."""
        try:
            return self._backend.encode_ids(text, add_special_tokens)
        except BaseException as error:
            _raise_others(error)
            broken = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            why = error if broken is None else f"character {broken} is half a surrogate pair: was it read from UTF-8?"
            raise TokenizerError(f"the text cannot be encoded: {why}") from error

    def offsets(self, text: str) -> list[int] | None:
        """Where in `text` each token of `encode(text)` begins, with the space that it brings; one that stands for no
        characters (bos), where the one before it ends. None where the tokenizer does not say (SentencePiece alone).
        """
        if (spans := self._backend.spans(text)) is None:
            return None
        at, result = 0, list[int]()
        for token_id, begin, end in spans:
            trimmed = text[at:begin].isspace() and self.token_text(token_id)[:1].isspace()
            result.append(at if begin == end or trimmed else begin)
            at = max(at, end)
        return result

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids outside the vocabulary have none."""
        if not ids:  # of which some of the library's decoders know nothing
            return ""
        try:
            return self._backend.decode(ids, skip_special_tokens)
        except BaseException as error:
            _raise_others(error)
            raise TokenizerError(f"these token ids cannot be decoded: {error}") from error

    def _decode_all(self, ids: list[int]) -> str:
        return self.decode(ids, skip_special_tokens=False)

    def piece(self, token_id: int) -> str | None:
        """The token's string in the vocabulary ("Ġthe", "▁the", "<0x0A>"), None outside it."""
        return self._pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether `decode` leaves the token out by default."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for wherever it is not the first of a text; b"" outside the vocabulary."""
        piece = self.piece(token_id)
        if piece is None:
            return b""
        stream = self._detokenizer(self.piece, ())
        if isinstance(stream, ByteLevelDetokenizer) and not self.is_special(token_id):
            return byte_level_bytes(piece)
        if isinstance(stream, ByteFallbackDetokenizer):
            match = BYTE_PIECE.fullmatch(piece)
            return bytes([int(match[1], 16)]) if match else stream.replace(piece).encode()
        return piece.encode() if self.is_special(token_id) else self._decode_all([token_id]).encode()

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, U+FFFD where they are no whole characters."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    @property
    def opening(self) -> list[int]:
        """Ids that `encode` puts before a text, BOS say; not those that it puts behind one."""
        text, whole = self.encode("a", add_special_tokens=False), self.encode("a")
        at = (i for i in range(len(whole) - len(text) + 1) if whole[i : i + len(text)] == text)
        return whole[: next(at, 0)]

    def shown(self, skip_special_tokens: bool | Sequence[str]) -> Callable[[int], str | None]:
        """`piece`, with None for special tokens that are left out: all, none, or all but those named."""
        if skip_special_tokens is False:
            return self._pieces.__getitem__
        kept = () if skip_special_tokens is True else tuple(skip_special_tokens)
        if kept not in self._shown:

            def look_up(token_id: int) -> str | None:
                piece = self._pieces[token_id]
                return None if self.is_special(token_id) and piece not in kept else piece

            self._shown[kept] = _Pieces(look_up)
        return self._shown[kept].__getitem__

    @property
    def bos_id(self) -> int | None:
        """Id of the beginning-of-sequence token, None if the tokenizer names none."""
        return self._special_id("bos_token")

    @property
    def eos_id(self) -> int | None:
        """Id of the tokenizer's end-of-sequence token; what ends a generation is the engine's business."""
        return self._special_id("eos_token")

    def _special_id(self, name: str) -> int | None:
        token = self._special.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def template(self, with_tools: bool) -> str | None:
        """The chat template, where there are tools the one named tool_use, if there is one; None without any."""
        return (self._tool_template if with_tools else None) or self.chat_template

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], /, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The prompt for `messages` ({"role": ..., "content": ...}) by the checkpoint's own template.

        `kwargs` become variables of the template (tools, enable_thinking ...). Encode the result with
        `add_special_tokens=False`: the template writes bos itself. Raises TokenizerError.
        """
        template = self.template(bool(kwargs.get("tools")))
        if template is None:
            raise TokenizerError("the checkpoint has no chat template; give a plain prompt instead")
        from nibblelm.tokenizer.chat_template import render

        variables = {"tools": None, "documents": None, **self._special, **kwargs}
        return render(template, messages, {**variables, "add_generation_prompt": add_generation_prompt})


class TextStream:
    """Text of a growing list of token ids: `decode` of all of them, cut at the first stop string, in pieces.

    Nothing is given out that a later token could change or turn into a stop string; characters spelled in byte pieces
    come as they are complete (ByteFallbackDetokenizer says where that differs from `decode`). Costs O(1) per token.

    after  ids that the text goes on from: it is what their text is longer by. With none it is a beginning, where some
           tokenizers drop the space of the first word
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        skip_special_tokens: bool | Sequence[str] = True,
        after: Sequence[int] = (),
    ) -> None:
        self._detokenizer = tokenizer._detokenizer(tokenizer.shown(skip_special_tokens), after)
        self._stops = StopFinder(stops)
        self._emitted: list[str] = []

    def push(self, token_id: int) -> str:
        """Add one token; returns the text that became safe to show."""
        return self._emit(self._stops.push(self._detokenizer.push(token_id)))

    def flush(self) -> str:
        """No more tokens: returns what was held back, U+FFFD for bytes that were never completed."""
        return self._emit(self._stops.push(self._detokenizer.flush(), final=True))

    def _emit(self, text: str) -> str:
        if text:
            self._emitted.append(text)
        return text

    @property
    def stop(self) -> str | None:
        """The stop string that is complete, if one is; the text from it on is dropped."""
        return self._stops.stop

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._emitted)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder, None if it has no tokenizer files.

    Reads tokenizer.json, else vocab.json + merges.txt (GPT-2, GPT-NeoX, Cohere, Qwen2), else tokenizer.model
    (SentencePiece, or GLM-4's ranks); with tokenizer_config.json and the chat template beside it. Malformed files raise
    TokenizerError, links that lead out of the folder CheckpointError.
    """
    from nibblelm.checkpoint import file_in  # takes torch with it

    folder = Path(folder)
    for name in FILES:
        file_in(folder, name)
    names = ("tokenizer.json", "vocab.json", "tokenizer.model")
    found = next((name for name in names if (folder / name).is_file()), None)
    if found is None:
        return None
    settings = read_settings(folder)
    templates = map(_chat_templates(folder, settings).get, ("default", "tool_use"))
    if found == "tokenizer.model" and not has_ranks(folder / found):
        from nibblelm.tokenizer.sentencepiece_backend import SentencePieceBackend

        backend = SentencePieceBackend(folder / found, settings)
        return Tokenizer(backend, backend.decoder, *templates)
    loaded = load_ranks(folder / found, settings) if found == "tokenizer.model" else load_backend(folder, settings)
    decoder = json.loads(loaded.decoder.__getstate__()) if loaded.decoder is not None else None
    return Tokenizer(_JsonBackend(loaded, settings.special), decoder, *templates)


def _chat_templates(folder: Path, settings: Settings) -> dict[str, str | None]:
    """The chat templates by their names, of which `default` and `tool_use` are used: chat_template.jinja and those of
    additional_chat_templates, else chat_template.json, else tokenizer_config.json's one or several."""
    from nibblelm.checkpoint import file_in

    named = sorted((folder / TEMPLATES).glob("*.jinja"))
    files = {path.stem: file_in(path.parent, path.name, folder) for path in named}
    files["default"] = file_in(folder, "chat_template.jinja") or files.get("default")
    written = {name: _template_text(path) for name, path in files.items() if path is not None}
    found: Any = {}
    if written.get("default") is None:
        found = read_json(folder / "chat_template.json").get("chat_template", settings.config.get("chat_template"))
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
    if not isinstance(found, dict):
        found = {"default": found}
    found |= written
    if "default" not in found:
        names = sorted(map(str, found))
        warnings.warn(f"{folder} has chat templates {names} but none named default: it has no chats", stacklevel=3)
    for template in found.values():
        if template is not None and not isinstance(template, str):
            raise TokenizerError(f"{folder}: the chat template is a {type(template).__name__}; text is expected")
    return found


def _template_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} is not readable text: {error}") from error


__all__ = ["TextStream", "Tokenizer", "load_tokenizer"]
