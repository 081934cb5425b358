"""A tokenizer from tokenizer.model alone, through `sentencepiece`, with the methods of `tokenizers.Tokenizer`.

Special tokens are cut out of the text first, then SentencePiece encodes what lies between them, as transformers'
pure-Python Llama tokenizer does. `legacy` puts the dummy prefix before every part, otherwise only before the
first; unlike the newer class it keeps a leading space of the text ("▁▁Hi"), as SentencePiece itself does.
ChatGLM2's and ChatGLM3's class is here, too (their published ChatGLMTokenizer): five names behind the pieces, of which
two begin a text.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nibblelm.errors import TokenizerError
from nibblelm.tokenizer.detokenizer import detokenizer_factory
from nibblelm.tokenizer.files import Settings

SPACE = "▁"
# A ModelProto field given twice is merged: normalizer_spec (3) { add_dummy_prefix (3): false }
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"
CHATGLM = ("[MASK]", "[gMASK]", "[sMASK]", "sop", "eop")


class SentencePieceBackend:
    """`tokenizer.model` with the special tokens and the bos/eos rules of tokenizer_config.json."""

    def __init__(self, path: Path, settings: Settings) -> None:
        from sentencepiece import SentencePieceProcessor

        try:
            model = path.read_bytes()
            self._model = SentencePieceProcessor(model_proto=model)
            self._inner = SentencePieceProcessor(model_proto=model + NO_DUMMY_PREFIX)
        except Exception as error:  # the library raises RuntimeError or, for bad pieces, UnicodeDecodeError
            raise TokenizerError(f"{path} is not a SentencePiece model: {error}") from error
        config = settings.config
        self._legacy = config.get("legacy") is not False
        self._prefix = config.get("add_prefix_space") is not False
        self._dummy = self._model.encode("x", out_type=str)[0].startswith(SPACE)  # it puts one before a text itself
        self._size: int = self._model.get_piece_size()
        control = [i for i in range(self._size) if self._model.is_control(i) or self._model.is_unknown(i)]
        named = {"bos_token": self._model.bos_id(), "eos_token": self._model.eos_id()}
        self.special = {name: self._model.id_to_piece(i) for name, i in named.items() if i >= 0} | dict(
            settings.special
        )
        self._added: dict[str, int] = {}
        self._flags: dict[str, Mapping[str, Any]] = {}
        self._special_ids: set[int] = set()
        for i in control:
            self._add(self._model.id_to_piece(i), i, {"special": True})
        for i, token in sorted(settings.added.items()):
            self._add(str(token["content"]), i, token)
        chatglm = settings.class_name == "ChatGLMTokenizer"
        for i, text in enumerate(CHATGLM if chatglm else (), self._model.get_piece_size()):
            self._add(text, i, {"special": True, **self._flags.get(text, {})})
        for text in (*self.special.values(), *settings.extra):
            if text not in self._added:
                self._add(text, self.token_to_id(text), {"special": True})
        named_alone = set(CHATGLM) - {str(token["content"]) for token in settings.added.values()} - set(settings.extra)
        parsed = [text for text in self._added if not (chatglm and text in named_alone)]  # "sop" is in "philosophy"
        longest_first = sorted(parsed, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(self._pattern, longest_first)) + ")")
        self._bos = self._id("bos_token") if config.get("add_bos_token", True) else []
        if chatglm:
            self._bos = [self._added["[gMASK]"], self._added["sop"]]
        self._text_of = {i: text for text, i in self._added.items()}
        self._eos = self._id("eos_token") if config.get("add_eos_token", False) else []

    def _add(self, text: str, token_id: int | None, flags: Mapping[str, Any]) -> None:
        if token_id is None:
            token_id, self._size = self._size, self._size + 1
        self._size = max(self._size, token_id + 1)
        self._added[text] = token_id
        self._flags[text] = flags
        if flags.get("special"):
            self._special_ids.add(token_id)

    def _pattern(self, text: str) -> str:
        return rf"(?<!\w){re.escape(text)}(?!\w)" if self._flags[text].get("single_word") else re.escape(text)

    def _id(self, name: str) -> list[int]:
        text = self.special.get(name)
        return [self._added[text]] if text in self._added else []

    def encode_ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of `text`, with bos and eos around them where the configuration asks for it."""
        parts = self._split.split(text.replace(SPACE, " ")) if self._added else [text]
        ids: list[int] = []
        for i, part in enumerate(parts):
            if i % 2:
                ids.append(self._added[part])
                continue
            strip_left = i > 0 and self._flags[parts[i - 1]].get("rstrip")
            strip_right = i + 1 < len(parts) and self._flags[parts[i + 1]].get("lstrip")
            text = part.lstrip() if strip_left else part
            ids += self._encode_part(text.rstrip() if strip_right else text, first=i == 0)
        return [*self._bos, *ids, *self._eos] if add_special_tokens else ids

    def spans(self, text: str) -> None:
        """The library says only with protobuf's help which characters a piece stands for."""

    def _encode_part(self, part: str, first: bool) -> list[int]:
        if self._legacy or (first and self._prefix):
            return list(self._model.encode(part))
        # Where the model trims spaces, one leading space still stands for a word boundary
        if part.startswith(" ") and len(part) > 1:
            return list(self._model.encode(part[1:]))
        return list(self._inner.encode(part))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`."""
        stream = detokenizer_factory(self.decoder)(
            lambda i: None if skip_special_tokens and i in self._special_ids else self.id_to_token(i), ()
        )
        return "".join([*map(stream.push, ids), stream.flush()])

    @property
    def decoder(self) -> dict[str, Any]:
        """The same decoder as a tokenizer.json of a SentencePiece model has."""
        steps: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        return {
            "decoders": steps
            + [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] * (self._prefix and self._dummy)
        }

    def id_to_token(self, token_id: int) -> str | None:
        """The piece or added token of an id, None outside the vocabulary."""
        if token_id in self._text_of:
            return self._text_of[token_id]
        return self._model.id_to_piece(token_id) if 0 <= token_id < self._model.get_piece_size() else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a piece or added token, None where there is none."""
        if token in self._added:
            return self._added[token]
        token_id = self._model.piece_to_id(token)
        return token_id if self._model.id_to_piece(token_id) == token else None

    @property
    def special_ids(self) -> set[int]:
        """Ids that skip_special_tokens leaves out."""
        return self._special_ids

    @property
    def size(self) -> int:
        """Number of ids, added tokens included."""
        return self._size
