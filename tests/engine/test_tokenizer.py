"""Tokenizers against transformers' AutoTokenizer, streaming against decoding everything at once."""

import codecs
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nibblelm.errors import RequestError, TokenizerError
from nibblelm.tokenizer import TextStream, Tokenizer, load_tokenizer

TEXTS = [
    "",
    " ",
    "   ",
    "\n\n",
    "Once upon a time, there was a little girl named Lily.",
    " leading and trailing ",
    "a  b   c    d\t\te\r\nf \n g",
    "Zürich, Ærøskøbing, naïve, e\u0301 and \u00e9, \ufb01, \u2028, \u200b",
    "日本語とひらがな 한국어 العربية हिन्दी",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 ‚’“”…",
    "I'll don't we've THEY'RE 12345 3.14159 x=y**2;\n\tif (a) {\n}",
    "<s>Hi</s> there <unk> <s> x",
    "<|start_story|> a<|end_story|>b <|start_story|>\nc",
    "<|im_start|>user\nHello<|im_end|>\n<|endoftext|> tail",
    "▁▁ a▁b",
    "<0x0A> <0xFF>",
    "\x00\x01\x7f\x85\xa0\xad",
]
FOLDERS = ["stories260K", "tinystories656K", "qwen2", "gpt2", "gpt2_prefix_bos", "llama_legacy", "qwen2_json"]


@pytest.fixture(scope="session")
def folder_of(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Real folders by name, and folders made of real files with another configuration."""

    def linked(name: str, source: Path, files: dict[str, str], config: dict[str, Any] | None) -> Path:
        folder = tmp_path_factory.mktemp("tok") / name
        folder.mkdir()
        for target, origin in files.items():
            (folder / target).symlink_to(source / origin)
        if config is not None:
            (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder

    def make(name: str) -> Path:
        gpt2, llama = data_dir / "tokenizers/gpt2", data_dir / "checkpoints/stories260K"
        tiny, qwen2 = data_dir / "checkpoints/tinystories656K_bf16", data_dir / "tokenizers/qwen2"
        pair = {"vocab.json": "vocab.json", "merges.txt": "merges.txt"}
        match name:
            case "stories260K":
                return llama
            case "tinystories656K":
                return tiny
            case "qwen2":
                return qwen2
            case "gpt2":
                return linked(name, gpt2, pair, {"tokenizer_class": "GPT2TokenizerFast"})
            case "gpt2_prefix_bos":
                config = {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": True, "add_bos_token": True}
                return linked(name, gpt2, pair, {**config, "additional_special_tokens": ["<|im_start|>"]})
            case "llama_legacy":
                files = {f: f for f in ("tokenizer.json", "config.json")}
                config = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_eos_token": True}
                tokens = {"512": {"content": "<|im_start|>", "lstrip": True, "rstrip": True}}
                return linked(name, llama, files, {**config, "added_tokens_decoder": tokens})
            case "llama_two_space":
                files = {f: f for f in ("tokenizer.json", "config.json", "special_tokens_map.json")}
                return linked(name, llama, files, None)
            case "qwen2_json":
                from transformers import AutoTokenizer

                folder = linked(name, qwen2, {"config.json": "config.json"}, None)
                AutoTokenizer.from_pretrained(qwen2).save_pretrained(folder)
                return folder
            case _:
                raise AssertionError(name)

    made: dict[str, Path] = {}
    return lambda name: made.setdefault(name, make(name))


@pytest.fixture(scope="session")
def pair_of(folder_of: Callable[[str], Path]) -> Callable[[str], tuple[Tokenizer, Any]]:
    """(this project's tokenizer, transformers' tokenizer) of one folder."""
    made: dict[str, tuple[Tokenizer, Any]] = {}

    def pair(name: str) -> tuple[Tokenizer, Any]:
        if name not in made:
            from transformers import AutoTokenizer

            tokenizer = load_tokenizer(folder_of(name))
            assert tokenizer is not None
            made[name] = tokenizer, AutoTokenizer.from_pretrained(folder_of(name))
        return made[name]

    return pair


def random_text(rng: random.Random) -> str:
    alphabets = ["abc Tthe  ", "aé\u0301ßœ 日本 \U0001f600\u200d", "\n\t .,;'\"!?0123456789", "<|>s/ims_tard"]
    return "".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randrange(60)))


@pytest.mark.parametrize("name", FOLDERS)
def test_encode_equals_transformers(name: str, pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    ours, theirs = pair_of(name)
    rng = random.Random(7)
    for text in [*TEXTS, *(random_text(rng) for _ in range(300))]:
        for special in (True, False):
            expected = theirs(text, add_special_tokens=special).input_ids
            assert ours.encode(text, add_special_tokens=special) == expected, (text, special)
            for skip in (True, False):
                assert ours.decode(expected, skip) == theirs.decode(expected, skip_special_tokens=skip)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_encodes_real_text_as_transformers(data_dir: Path, pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    book = (data_dir / "text/alice_11-0.txt").read_text(encoding="utf-8")[:60_000]
    for name in ("stories260K", "tinystories656K", "qwen2", "gpt2"):
        ours, theirs = pair_of(name)
        assert ours.encode(book) == theirs(book).input_ids, name


@pytest.mark.parametrize("name", ["stories260K", "tinystories656K", "qwen2", "gpt2"])
def test_decode_of_random_ids_equals_transformers(name: str, pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    ours, theirs = pair_of(name)
    rng = random.Random(3)
    for _ in range(300):
        ids = [rng.randrange(ours.vocab_size) for _ in range(rng.randrange(40))]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False)


def test_merges_without_header_and_with_crlf(
    data_dir: Path, tmp_path: Path, pair_of: Callable[[str], tuple[Tokenizer, Any]]
) -> None:
    for name, merges in [("gpt2", "merges.cs336_noheader.txt"), ("qwen2", "merges.txt.crlf_as_stored")]:
        folder = tmp_path / name
        folder.mkdir()
        source = data_dir / "tokenizers" / name
        (folder / "vocab.json").symlink_to(source / "vocab.json")
        (folder / "merges.txt").symlink_to(source / merges)
        (folder / "config.json").write_text(json.dumps({"model_type": name}))
        ours = load_tokenizer(folder)
        assert ours is not None
        theirs = pair_of(name)[1]
        for text in TEXTS:
            if "<|im_" not in text:  # named only in the real folder's tokenizer_config.json
                assert ours.encode(text) == theirs(text).input_ids


def test_merge_lines_that_begin_with_a_hash_are_merges(tmp_path: Path) -> None:
    vocab = {c: i for i, c in enumerate(["#", "!", "##", "##!"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_bytes(b"#version: 0.2\r\n# #\r\n## !\r\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("##!") == [3]


def test_folder_without_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{"}, "cannot be used"),
        ({"tokenizer.json": "[]"}, "cannot be used"),
        ({"tokenizer.json": '{"model": {"type": "BPE"}}'}, "cannot be used"),
        ({"tokenizer.model": "not a model"}, "not a SentencePiece model"),
        ({"vocab.json": "{}"}, "merges.txt is missing"),
        ({"vocab.json": "[1]", "merges.txt": ""}, "JSON object"),
        ({"vocab.json": '{"a": "b"}', "merges.txt": "", "config.json": '{"model_type": "gpt2"}'}, "cannot be used"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "a b c\n"}, "line 1"),
        ({"vocab.json": '{"a": 0}', "merges.txt": "a b\n", "config.json": '{"model_type": "gpt2"}'}, "cannot be used"),
        ({"vocab.json": '{"a": 0}', "merges.txt": ""}, "GPT2Tokenizer and Qwen2Tokenizer"),
        ({"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": '"x"'}, "JSON object"),
        ({"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": '{"added_tokens_decoder": [1]}'}, "added"),
        ({"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": '{"added_tokens_decoder": {"1": 2}}'}, "bad"),
        ({"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": '{"chat_template": []}'}, "default"),
        ({"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": '{"chat_template": 3}'}, "text is expected"),
    ],
)  # fmt: skip
def test_malformed_files(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


def test_mutated_files_raise_only_typed_errors(data_dir: Path, tmp_path: Path) -> None:
    source = data_dir / "checkpoints/stories260K"
    rng = random.Random(1)
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"):
        if name == "tokenizer_config.json":
            (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
        original = (source / name).read_bytes()
        for _ in range(60):
            mutated = bytearray(original)
            for _ in range(rng.randrange(1, 4)):
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
            (tmp_path / name).write_bytes(mutated[: rng.choice([len(mutated), rng.randrange(len(mutated))])])
            try:
                tokenizer = load_tokenizer(tmp_path)
                assert tokenizer is not None
                tokenizer.encode("Once upon a time")
            except TokenizerError:
                pass
        (tmp_path / name).unlink()


def test_lone_surrogate_is_a_typed_error(pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    with pytest.raises(TokenizerError, match="encoded"):
        pair_of("stories260K")[0].encode("\ud800")


# Chat templates

CHAT = [{"role": "user", "content": "Hi <b> & 'you' ☃"}, {"role": "assistant", "content": "Hello"}]
TEMPLATES = [
    "{% for m in messages %}\n  {% if m.role == 'user' %}\nU: {{ m.content }}\n  {% endif %}\n{% endfor %}",
    "{{ bos_token }}{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
    "{{ messages | tojson(indent=2) }}{% if add_generation_prompt %}<go>{% endif %}{{ eos_token }}{{ thinking }}",
    "{% for m in messages %}{% generation %}{{ m.content | trim }}{% endgeneration %}{% endfor %}{{ tools is none }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = loop.index %}{% endfor %}{{ ns.n }}{{ nil }}",
    "{{ strftime_now('%Y') }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_equals_transformers(template: str, pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    ours, theirs = pair_of("stories260K")
    tokenizer = Tokenizer(ours._backend, None, template)
    for prompt in (True, False):
        expected = theirs.apply_chat_template(
            CHAT, chat_template=template, add_generation_prompt=prompt, tokenize=False, thinking=3
        )
        assert tokenizer.apply_chat_template(CHAT, add_generation_prompt=prompt, thinking=3) == expected


def test_shipped_template_and_its_ids(pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    ours, theirs = pair_of("qwen2")
    text = ours.apply_chat_template(CHAT[:1])
    ids = theirs.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=False)
    assert ours.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": '{"chat_template": "A"}'}, "A"),
        ({"tokenizer_config.json": '{"chat_template": [{"name": "t", "template": "B"},'
          '{"name": "default", "template": "A"}]}'}, "A"),
        ({"tokenizer_config.json": '{"chat_template": "A"}', "chat_template.json": '{"chat_template": "C"}'}, "C"),
        ({"chat_template.json": '{"chat_template": "C"}', "chat_template.jinja": "D"}, "D"),
        ({}, None),
    ],
)  # fmt: skip
def test_where_templates_are_found(files: dict[str, str], expected: str | None, data_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").symlink_to(data_dir / "checkpoints/stories260K/tokenizer.json")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.chat_template == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only user turns') }}", "only user turns"),
        ("{% for", "does not parse"),
        ("{{ messages[0].x.y.z }}", "no attribute 'x'"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        (None, "no chat template"),
    ],
)
def test_template_errors(template: str | None, message: str, pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    tokenizer = Tokenizer(pair_of("stories260K")[0]._backend, None, template)
    with pytest.raises(TokenizerError, match=message):
        tokenizer.apply_chat_template(CHAT)


# Streaming


def first_stop_cut(text: str, stops: list[str]) -> str:
    """`text` before the stop string that is complete first, found one character at a time."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def check_stream(tokenizer: Tokenizer, ids: list[int], stops: list[str], skip: bool) -> None:
    stream = TextStream(tokenizer, stops, skip)
    whole = tokenizer.decode(ids, skip)
    cut = first_stop_cut(whole, stops)
    pieces = [*map(stream.push, ids), stream.flush()]
    assert "".join(pieces) == stream.text == cut
    assert stream.stopped == (cut != whole or any(first_stop_cut(whole, [s]) != whole for s in stops))


@pytest.mark.parametrize("name", ["stories260K", "tinystories656K", "qwen2", "gpt2", "spm"])
def test_stream_equals_decode(name: str, pair_of: Callable[[str], tuple[Tokenizer, Any]], spm_folder: Path) -> None:
    tokenizer = load_tokenizer(spm_folder) if name == "spm" else pair_of(name)[0]
    assert tokenizer is not None
    rng = random.Random(11)
    texts = [t * 2 for t in TEXTS if t]
    for round_ in range(600):
        if round_ % 2:
            ids = tokenizer.encode(rng.choice(texts))
            ids = [i if rng.random() < 0.9 else rng.randrange(tokenizer.vocab_size) for i in ids]
        else:  # many bytes, valid and not, among the first ids of each vocabulary
            ids = [rng.randrange(rng.choice([260, tokenizer.vocab_size])) for _ in range(rng.randrange(30))]
        skip = rng.random() < 0.5
        whole = tokenizer.decode(ids, skip) or "x"
        starts = [rng.randrange(len(whole)) for _ in range(rng.randrange(4))]
        stops = [whole[a : a + rng.randrange(1, 6)] for a in starts]
        stops += ["".join(rng.choice(whole) for _ in range(2))] * (rng.random() < 0.3)
        check_stream(tokenizer, ids, stops, skip)


def test_stream_of_unknown_decoders(pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders
    from tokenizers.models import WordLevel

    from nibblelm.tokenizer import _JsonBackend

    words = ["the", "▁the", "##ing", "cat", "▁", ".", "é"]
    rng = random.Random(5)
    for decoder in (None, decoders.WordPiece(), decoders.Metaspace(), decoders.CTC()):
        backend = Backend(WordLevel({w: i for i, w in enumerate(words)}, unk_token="the"))
        if decoder is not None:
            backend.decoder = decoder
        section = None if decoder is None else json.loads(decoder.__getstate__())
        tokenizer = Tokenizer(_JsonBackend(backend, {}), section, None)
        if isinstance(decoder, decoders.CTC):
            continue  # merges repeated tokens: not a decoder of a language model
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


def test_stop_strings_are_never_shown_in_part(pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    tokenizer = pair_of("gpt2")[0]
    stream = TextStream(tokenizer, ["###", "end"])
    shown = [stream.push(tokenizer.encode(c)[0]) for c in "a##b#en"]
    assert shown == ["a", "", "", "##b", "", "#", ""]
    assert stream.flush() == "en"
    stream = TextStream(tokenizer, ["###"])
    assert "".join(stream.push(tokenizer.encode(c)[0]) for c in "a#### b") == "a"
    assert stream.stopped
    assert stream.flush() == ""
    with pytest.raises(RequestError, match="empty"):
        TextStream(tokenizer, [""])


@pytest.mark.parametrize("name", ["gpt2", "stories260K"])
def test_ten_thousand_tokens_are_fast(name: str, pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    tokenizer = pair_of(name)[0]
    rng = random.Random(0)
    ids = [rng.randrange(tokenizer.vocab_size) for _ in range(10_000)]
    started = time.perf_counter()
    stream = TextStream(tokenizer, ["no such text", "\n \n \n"])
    for token_id in ids:
        stream.push(token_id)
    stream.flush()
    assert time.perf_counter() - started < 1.0  # 0.05 s measured; decoding everything again takes minutes
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


# SentencePiece without tokenizer.json


@pytest.fixture(scope="session")
def spm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-like tokenizer.model: BPE, byte fallback, no trimming of spaces."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("spm")
    text = folder / "text"
    text.write_text("\n".join(f"the cat number {i} sat on the mat with {i * 7} other cats." for i in range(500)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=330, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        split_digits=True, minloglevel=2,
    )  # fmt: skip
    return folder


def slow_oracle(folder: Path) -> Any:
    from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return SentencePieceBackend(vocab_file=str(folder / "tokenizer.model"), legacy=True, **tokens)


def test_sentencepiece_legacy_equals_transformers_slow(spm_folder: Path, data_dir: Path, tmp_path: Path) -> None:
    for source in (spm_folder, data_dir / "checkpoints/stories260K"):
        folder = tmp_path / source.name
        folder.mkdir()
        (folder / "tokenizer.model").symlink_to(source / "tokenizer.model")
        ours, theirs = load_tokenizer(folder), slow_oracle(source)
        assert ours is not None
        rng = random.Random(2)
        for text in [*TEXTS, *(random_text(rng) for _ in range(200))]:
            if "▁" in text:
                continue
            expected = theirs(text, add_special_tokens=False).input_ids
            assert ours.encode(text, add_special_tokens=False) == expected, text
            assert ours.encode(text) == [1, *expected]
        assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (1, 2, len(theirs))


def test_sentencepiece_modern_equals_transformers_llama(spm_folder: Path, tmp_path: Path) -> None:
    """legacy false against transformers' LlamaTokenizer on the same pieces and merges."""
    import sentencepiece
    from transformers import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    model = sentencepiece.SentencePieceProcessor(str(spm_folder / "tokenizer.model"))
    vocab = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    theirs = LlamaTokenizer(vocab=vocab, merges=generate_merges(vocab), legacy=False)
    (tmp_path / "tokenizer.model").symlink_to(spm_folder / "tokenizer.model")
    config = {"legacy": False, "add_eos_token": True, "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    rng = random.Random(4)
    texts = [*TEXTS, *(random_text(rng) for _ in range(300)), "<s> the cat</s>the mat<s>  x", "a<s> "]
    for text in texts:
        if text.startswith((" ", "▁")) or not text:  # there SentencePiece keeps the space, the class does not
            continue
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text, add_special_tokens=False) == expected, text
        assert ours.encode(text) == [*expected, 2]
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
    assert ours.encode(" the") == [*model.encode(" the"), 2]


def test_sentencepiece_reads_stories260k_as_its_tokenizer_json(
    data_dir: Path, tmp_path: Path, pair_of: Callable[[str], tuple[Tokenizer, Any]]
) -> None:
    source = data_dir / "checkpoints/stories260K"
    for name in ("tokenizer.model", "tokenizer_config.json", "config.json"):
        (tmp_path / name).symlink_to(source / name)
    ours, theirs = load_tokenizer(tmp_path), pair_of("stories260K")[1]
    assert ours is not None
    story = (data_dir / "text/tinystories_sample_2MiB.txt").read_text(encoding="utf-8").split("<|endoftext|>")[0]
    for text in [story.replace("\n", " "), "Once upon a time", "héllo 😀"]:
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text).input_ids, skip_special_tokens=True)


def test_import_stays_light() -> None:
    heavy = ("torch", "jinja2", "sentencepiece", "transformers", "tokenizers")
    code = f"import sys, nibblelm.tokenizer; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_byte_alphabet_is_transformers() -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    from nibblelm.detokenizer import byte_of_char

    assert byte_of_char() == {char: byte for byte, char in bytes_to_unicode().items()}
    assert codecs.decode(bytes(range(128)), "ascii")
