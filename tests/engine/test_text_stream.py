"""Text token by token against decoding everything at once."""

import contextlib
import itertools
import json
import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nibblelm.errors import RequestError, TokenizerError
from nibblelm.tokenizer import TextStream, Tokenizer, load_tokenizer


def first_stop_cut(text: str, stops: list[str]) -> str:
    """`text` before the stop string that is complete first, found one character at a time."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def characters(data: bytes) -> str:
    """SentencePiece's rule for a run of bytes: each valid character, and U+FFFD for every other byte."""
    text = ""
    while data:
        for size in (1, 2, 3, 4):
            with contextlib.suppress(UnicodeDecodeError):
                text, data = text + data[:size].decode(), data[size:]
                break
        else:
            text, data = text + "\ufffd", data[1:]
    return text


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool) -> str:
    """`decode`, but for runs of byte pieces that hold both characters and invalid bytes, which it drops as a whole."""

    def byte(token_id: int) -> int | None:
        found = re.fullmatch("<0x([0-9A-F]{2})>", tokenizer.piece(token_id) or "")
        return int(found[1], 16) if found else None

    ids = [i for i in ids if tokenizer.piece(i) is not None and not (skip and tokenizer.is_special(i))]
    done: list[int] = []
    before = text = ""
    for is_byte, group in itertools.groupby(ids, lambda i: byte(i) is not None):
        run = list(group)
        done += run
        decoded = tokenizer.decode(done, skip)
        part = decoded[len(before) :]
        if is_byte and "\ufffd" in part:
            part = characters(bytes(b for i in run if (b := byte(i)) is not None))
            part = part if text else part.removeprefix(" ")
        before, text = decoded, text + part
    return text


def test_a_panic_of_the_library_is_an_error_of_the_text(data_dir: Path, tmp_path: Path) -> None:
    """Rust's panics are no Exceptions: one must not end what others wait for. Nothing decodes to nothing."""
    import tokenizers

    stories = data_dir / "checkpoints" / "stories260K"
    shutil.copytree(stories, tmp_path / "model", copy_function=shutil.copyfile)
    path = str(tmp_path / "model" / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    strips = tokenizers.decoders.Strip(" ", 0, 1)
    backend.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteLevel(), strips])
    backend.save(path)
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer is not None
    assert tokenizer.decode([]) == ""
    with pytest.raises(BaseException) as panic:  # as the library has it
        backend.decode([])
    assert not isinstance(panic.value, Exception)

    class Panics:
        """A backend whose every call ends so."""

        def __getattr__(self, _: str) -> Any:
            return lambda *_args: backend.decode([])

    tokenizer._backend = Panics()  # type: ignore[assignment]
    for call in (lambda: tokenizer.decode([5]), lambda: tokenizer.encode("a")):
        with pytest.raises(TokenizerError, match="cannot be"):
            call()


def check_stream(tokenizer: Tokenizer, ids: list[int], stops: list[str], skip: bool) -> None:
    stream = TextStream(tokenizer, stops, skip)
    whole = streamed(tokenizer, ids, skip)
    cut = first_stop_cut(whole, stops)
    pieces = [*map(stream.push, ids), stream.flush()]
    assert "".join(pieces) == stream.text == cut
    assert (stream.stop is not None) == (cut != whole or any(first_stop_cut(whole, [s]) != whole for s in stops))


@pytest.mark.parametrize("name", ["stories260K", "tinystories656K", "qwen2", "gpt2", "spm"])
def test_stream_equals_decode(
    name: str, pair_of: Callable[[str], tuple[Tokenizer, Any]], spm_folder: Path, texts: list[str]
) -> None:
    tokenizer = load_tokenizer(spm_folder) if name == "spm" else pair_of(name)[0]
    assert tokenizer is not None
    rng = random.Random(11)
    doubled = [t * 2 for t in texts if t]
    for round_ in range(600):
        if round_ % 2:
            ids = tokenizer.encode(rng.choice(doubled))
            ids = [i if rng.random() < 0.9 else rng.randrange(tokenizer.vocab_size) for i in ids]
        else:  # many bytes, valid and not, among the first ids of each vocabulary
            ids = [rng.randrange(rng.choice([260, tokenizer.vocab_size])) for _ in range(rng.randrange(30))]
        skip = rng.random() < 0.5
        whole = streamed(tokenizer, ids, skip) or "x"
        starts = [rng.randrange(len(whole)) for _ in range(rng.randrange(4))]
        stops = [whole[a : a + rng.randrange(1, 6)] for a in starts]
        stops += ["".join(rng.choice(whole) for _ in range(2))] * (rng.random() < 0.3)
        check_stream(tokenizer, ids, stops, skip)


def test_stream_of_unknown_decoders(pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders
    from tokenizers.models import WordLevel

    from nibblelm.tokenizer.tokenizer import _JsonBackend

    words = ["the", "▁the", "##ing", "cat", "▁", ".", "é"]
    rng = random.Random(5)
    for decoder in (None, decoders.WordPiece(), decoders.Metaspace()):
        backend = Backend(WordLevel({w: i for i, w in enumerate(words)}, unk_token="the"))
        if decoder is not None:
            backend.decoder = decoder
        section = None if decoder is None else json.loads(decoder.__getstate__())
        tokenizer = Tokenizer(_JsonBackend(backend, {}), section, None)
        for _ in range(100):
            ids = [rng.randrange(len(words)) for _ in range(rng.randrange(20))]
            check_stream(tokenizer, ids, ["cat the"], True)


def test_unfinished_character_is_held_and_invalid_bytes_come_out(
    pair_of: Callable[[str], tuple[Tokenizer, Any]],
) -> None:
    gpt2, story = pair_of("gpt2")[0], pair_of("stories260K")[0]
    emoji = gpt2.encode("😀")
    assert len(emoji) > 1
    stream = TextStream(gpt2)
    assert [stream.push(i) for i in emoji] == [""] * (len(emoji) - 1) + ["😀"]
    stream = TextStream(gpt2)
    assert stream.push(emoji[0]) == ""
    assert stream.push(gpt2.encode("a")[0]) == "\ufffda"
    stream = TextStream(gpt2)
    stream.push(emoji[0])
    assert (stream.flush(), stream.text) == ("\ufffd", "\ufffd")
    stream = TextStream(story)
    ids = story.encode("é😀x", add_special_tokens=False)
    assert "".join(map(stream.push, ids)) == "é😀x"


@pytest.mark.parametrize("name", ["stories260K", "tinystories656K", "qwen2", "gpt2"])
def test_text_goes_on_from_that_of_a_prompt(
    name: str, pair_of: Callable[[str], tuple[Tokenizer, Any]], texts: list[str]
) -> None:
    """By transformers: what the text of prompt and output is longer by than the prompt's, first spaces included."""
    tokenizer, theirs = pair_of(name)
    compared = 0
    for text in (*texts, "Once upon a time, there was", "a  b", " x"):
        ids = tokenizer.encode(text)
        for cut in range(1, len(ids)):
            before, whole = (theirs.decode(part, skip_special_tokens=True) for part in (ids[:cut], ids))
            if "\ufffd" in whole or "\ufffd" in before or not whole.startswith(before):
                continue
            stream = TextStream(tokenizer, after=ids[:cut])
            assert "".join([*map(stream.push, ids[cut:]), stream.flush()]) == whole[len(before) :]
            compared += 1
    assert compared > 50


@pytest.mark.parametrize("name", ["stories260K", "spm"])
def test_byte_pieces_are_text_as_soon_as_a_character_is_whole(
    name: str, pair_of: Callable[[str], tuple[Tokenizer, Any]], spm_folder: Path
) -> None:
    tokenizer = load_tokenizer(spm_folder) if name == "spm" else pair_of(name)[0]
    assert tokenizer is not None
    ids = tokenizer.encode("x" + "😀" * 50, add_special_tokens=False)
    stream = TextStream(tokenizer)
    pieces = [stream.push(i) for i in ids]
    assert [piece for piece in pieces[-200:] if piece] == ["😀"] * 50
    assert pieces[-200:] == ["", "", "", "😀"] * 50
    stream = TextStream(tokenizer, ["😀😀"])
    assert "".join(stream.push(i) for i in ids[: len(ids) - 200 + 8]) == "x"
    assert stream.stop is not None
    stream = TextStream(tokenizer)  # two characters, and the third cut short
    assert "".join(stream.push(i) for i in ids[: len(ids) - 200 + 10]) + stream.flush() == "x😀😀\ufffd\ufffd"


def test_stop_strings_are_never_shown_in_part(pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    tokenizer = pair_of("gpt2")[0]
    stream = TextStream(tokenizer, ["###", "end"])
    shown = [stream.push(tokenizer.encode(c)[0]) for c in "a##b#en"]
    assert shown == ["a", "", "", "##b", "", "#", ""]
    assert stream.flush() == "en"
    stream = TextStream(tokenizer, ["###"])
    assert "".join(stream.push(tokenizer.encode(c)[0]) for c in "a#### b") == "a"
    assert stream.stop is not None
    assert stream.flush() == ""
    with pytest.raises(RequestError, match="empty"):
        TextStream(tokenizer, [""])


@pytest.mark.parametrize("name", ["gpt2", "stories260K"])
def test_ten_thousand_tokens_are_fast(name: str, pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    tokenizer = pair_of(name)[0]
    rng = random.Random(0)
    ids = [rng.randrange(260, tokenizer.vocab_size) for _ in range(10_000)]  # SentencePiece's bytes come before
    started = time.thread_time()
    stream = TextStream(tokenizer, ["no such text", "\n \n \n"])
    for token_id in ids:
        stream.push(token_id)
    stream.flush()
    assert time.thread_time() - started < 1.0  # 0.05 s measured; decoding everything again takes minutes
    assert stream.text == tokenizer.decode(ids)


def test_token_bytes_join_to_the_text(pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    text = "Once upon a time, naïve 😀 cats\nran."
    for name in ("gpt2", "qwen2", "stories260K"):
        tokenizer = pair_of(name)[0]
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().strip() == text
        assert tokenizer.token_bytes(10**6) == b""
    assert pair_of("qwen2")[0].token_text(151645) == "<|im_end|>"
    assert pair_of("gpt2")[0].token_text(pair_of("gpt2")[0].encode("😀")[0]) == "\ufffd"


def test_byte_alphabet_is_transformers() -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    from nibblelm.tokenizer.detokenizer import byte_of_char

    assert byte_of_char() == {char: byte for byte, char in bytes_to_unicode().items()}
