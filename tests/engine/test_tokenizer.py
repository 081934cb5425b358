"""Tokenizers against transformers' AutoTokenizer."""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from nibblelm import convert
from nibblelm.errors import CheckpointError, TokenizerError
from nibblelm.tokenizer import TextStream, Tokenizer, load_tokenizer
from nibblelm.tokenizer.files import FILES

FOLDERS = ["stories260K", "tinystories656K", "qwen2", "gpt2", "gpt2_prefix_bos", "llama_legacy", "qwen2_json"]
FOLDERS += ["llama_bare", "mistral_llama_class", "qwen3_llama_class", "unknown_class"]


def random_text(rng: random.Random) -> str:
    alphabets = ["abc Tthe  ", "aé\u0301ßœ 日本 \U0001f600\u200d", "\n\t .,;'\"!?0123456789", "<|>s/ims_tard"]
    return "".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randrange(60)))


@pytest.mark.parametrize("name", FOLDERS)
def test_encode_equals_transformers(
    name: str, pair_of: Callable[[str], tuple[Tokenizer, Any]], texts: list[str]
) -> None:
    ours, theirs = pair_of(name)
    rng = random.Random(7)
    for text in [*texts, *(random_text(rng) for _ in range(300))]:
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


@pytest.mark.parametrize("name", ["gpt2", "qwen2", "stories260K"])
def test_text_in_many_scripts_comes_back(name: str, pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    """Bytes are never lost: byte-level BPE, and SentencePiece with byte fallback. As one text, and piece by piece."""
    ours, _ = pair_of(name)
    texts = (
        "é, Съешь, Ξεσκεπάζω, דג סקרן, نص حكيم, ऋषियों, วันพฤหัสบดี",
        "அகர, ვეფხისტ, Բել, ሰላም, 天地玄黄, あさき, 다람쥐",
    )
    for text in (*texts, "😀 🏳️‍🌈 👩🏽‍🚀 𝕏 \U0010ffff"):
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == text
        stream = TextStream(ours)
        assert "".join([*map(stream.push, ids), stream.flush()]) == text


def test_where_tokens_begin(pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    """In the text as it is written, which they need not decode to; a token's space is its own."""
    qwen, gpt, story = (pair_of(name)[0] for name in ("qwen2", "gpt2", "stories260K"))
    assert qwen.offsets("<|im_start|>user\nhi<|im_end|>\n") == [0, 12, 16, 17, 19, 29]
    assert qwen.offsets("a\u0301bc <|im_start|>") == [0, 2, 4, 5]
    assert story.offsets("  two  sp") == [0, 0, 3, 4, 5, 8]
    text = "Once upon  a time\n 共 <|endoftext|> there"
    offsets, ids = gpt.offsets(text), gpt.encode(text)
    assert offsets is not None
    for at, token_id in zip(offsets, ids, strict=True):
        assert "\ufffd" in gpt.token_text(token_id) or text[at:].startswith(gpt.token_text(token_id))


@pytest.mark.parametrize("name", ["stories260K", "tinystories656K", "qwen2", "gpt2"])
def test_decode_of_random_ids_equals_transformers(name: str, pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    ours, theirs = pair_of(name)
    rng = random.Random(3)
    for _ in range(300):
        ids = [rng.randrange(ours.vocab_size) for _ in range(rng.randrange(40))]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert ours.decode(ids, False) == theirs.decode(ids, skip_special_tokens=False)


def test_merges_without_header_and_with_crlf(
    data_dir: Path, tmp_path: Path, pair_of: Callable[[str], tuple[Tokenizer, Any]], texts: list[str]
) -> None:
    for name, merges in [("gpt2", "merges.cs336_noheader.txt"), ("qwen2", "merges.txt.crlf_as_stored")]:
        folder = tmp_path / name
        folder.mkdir()
        source = data_dir / "tokenizers" / name
        shutil.copyfile(source / "vocab.json", folder / "vocab.json")
        shutil.copyfile(source / merges, folder / "merges.txt")
        (folder / "config.json").write_text(json.dumps({"model_type": name}))
        ours = load_tokenizer(folder)
        assert ours is not None
        theirs = pair_of(name)[1]
        for text in texts:
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
        ({"vocab.json": '{"a": 0}', "merges.txt": ""}, "'GPT2Tokenizer', 'GPTNeoXTokenizer'"),
        ({"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": '"x"'}, "JSON object"),
        ({"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": '{"added_tokens_decoder": [1]}'}, "added"),
        ({"vocab.json": "{}", "merges.txt": "", "tokenizer_config.json": '{"added_tokens_decoder": {"1": 2}}'}, "bad"),
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


@pytest.mark.parametrize("name", FILES)
def test_a_link_out_of_the_folder_is_refused(name: str, data_dir: Path, tmp_path: Path) -> None:
    """In a plain folder; in a hub cache the links lead to the blobs, and nowhere else."""
    source, snapshot = data_dir / "checkpoints/stories260K", tmp_path / "models--org--name/snapshots/0123"
    outside, blobs = tmp_path / "outside", tmp_path / "models--org--name/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in {name, "tokenizer.json"}:
        present = (source / file).is_file()
        (blobs / file).write_bytes((source / file).read_bytes() if present else b"{}")
        (snapshot / file).symlink_to(Path("../../blobs") / file)
    assert load_tokenizer(snapshot) is not None
    shutil.copyfile(blobs / name, outside)
    (snapshot / name).unlink()
    (snapshot / name).symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{name} is a link that leads out of the folder"):
        load_tokenizer(snapshot)


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
    shutil.copyfile(data_dir / "checkpoints/stories260K/tokenizer.json", tmp_path / "tokenizer.json")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.chat_template == expected


def test_templates_of_which_none_is_the_default(data_dir: Path, tmp_path: Path) -> None:
    """Prompts run; a chat says why it does not."""
    shutil.copyfile(data_dir / "checkpoints/stories260K/tokenizer.json", tmp_path / "tokenizer.json")
    config = {"chat_template": [{"name": "rag", "template": "x"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=r"chat templates \['rag'\] but none named default"):
        tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("a")
    with pytest.raises(TokenizerError, match="no chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("in_files", [True, False])
def test_tools_have_a_template_of_their_own(in_files: bool, data_dir: Path, tmp_path: Path) -> None:
    """As transformers chooses, and `convert` keeps it."""
    texts = {"default": "A{{ messages[0].content }}", "tool_use": "T{{ tools | length }}", "rag": "R"}
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(data_dir / "checkpoints/stories260K", source)
    if in_files:
        (source / "chat_template.jinja").write_text(texts["default"])
        (source / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (source / "additional_chat_templates" / f"{name}.jinja").write_text(texts[name])
    else:
        known = json.loads((source / "tokenizer_config.json").read_text())
        named = [{"name": name, "template": text} for name, text in texts.items()]
        (source / "tokenizer_config.json").write_text(json.dumps(known | {"chat_template": named}))
    convert(source, out)
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    from transformers import AutoTokenizer

    for folder in (source, out):
        tokenizer, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
        assert tokenizer is not None
        for tools in ([tool, tool], None):
            want: Any = theirs.apply_chat_template(CHAT[:1], tools=tools, tokenize=False)
            assert tokenizer.apply_chat_template(CHAT[:1], tools=tools) == want
            assert want[0] == ("T" if tools else "A")


def test_a_class_for_bpe_beside_another_kind_of_model(tmp_path: Path) -> None:
    Backend(WordLevel({"a": 0, "b": 1}, "a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(TokenizerError, match="has a WordLevel model; Qwen2Tokenizer, its class, is for BPE"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only user turns') }}", "only user turns"),
        ("{% for", "does not parse"),
        ("{{ messages[0].x.y.z }}", "no attribute 'x'"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('\x1b]0;title\x07\u202e\n\x9b2J') }}", r"\\x1b\]0;title\\x07\\u202e\\n\\x9b2J"),
        (None, "no chat template"),
    ],
)
def test_template_errors(template: str | None, message: str, pair_of: Callable[[str], tuple[Tokenizer, Any]]) -> None:
    tokenizer = Tokenizer(pair_of("stories260K")[0]._backend, None, template)
    with pytest.raises(TokenizerError, match=message):
        tokenizer.apply_chat_template(CHAT)


# SentencePiece without tokenizer.json


def slow_oracle(folder: Path) -> Any:
    from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return SentencePieceBackend(vocab_file=str(folder / "tokenizer.model"), legacy=True, **tokens)


def test_sentencepiece_legacy_equals_transformers_slow(
    spm_folder: Path, data_dir: Path, tmp_path: Path, texts: list[str]
) -> None:
    for source in (spm_folder, data_dir / "checkpoints/stories260K"):
        folder = tmp_path / source.name
        folder.mkdir()
        shutil.copyfile(source / "tokenizer.model", folder / "tokenizer.model")
        ours, theirs = load_tokenizer(folder), slow_oracle(source)
        assert ours is not None
        rng = random.Random(2)
        for text in [*texts, *(random_text(rng) for _ in range(200))]:
            if "▁" in text:
                continue
            expected = theirs(text, add_special_tokens=False).input_ids
            assert ours.encode(text, add_special_tokens=False) == expected, text
            assert ours.encode(text) == [1, *expected]
        assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (1, 2, len(theirs))


def test_sentencepiece_modern_equals_transformers_llama(spm_folder: Path, tmp_path: Path, texts: list[str]) -> None:
    """legacy false against transformers' LlamaTokenizer on the same pieces and merges."""
    import sentencepiece
    from transformers import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    model = sentencepiece.SentencePieceProcessor(str(spm_folder / "tokenizer.model"))
    vocab = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    theirs = LlamaTokenizer(vocab=vocab, merges=generate_merges(vocab), legacy=False)
    shutil.copyfile(spm_folder / "tokenizer.model", tmp_path / "tokenizer.model")
    config = {"legacy": False, "add_eos_token": True, "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    rng = random.Random(4)
    cases = [*texts, *(random_text(rng) for _ in range(300)), "<s> the cat</s>the mat<s>  x", "a<s> "]
    for text in cases:
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
        shutil.copyfile(source / name, tmp_path / name)
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


def test_a_model_without_a_dummy_prefix_keeps_a_leading_space(spm_folder: Path, tmp_path: Path) -> None:
    """As SentencePiece itself decodes."""
    import sentencepiece

    from nibblelm.tokenizer.sentencepiece_backend import NO_DUMMY_PREFIX

    proto = (spm_folder / "tokenizer.model").read_bytes() + NO_DUMMY_PREFIX
    (tmp_path / "tokenizer.model").write_bytes(proto)
    tokenizer, model = load_tokenizer(tmp_path), sentencepiece.SentencePieceProcessor(model_proto=proto)
    assert tokenizer is not None
    for text in (" the cat", "    return 3", "the cat", " "):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == model.encode(text)
        stream = TextStream(tokenizer)
        assert tokenizer.decode(ids) == model.decode(ids) == "".join([*map(stream.push, ids), stream.flush()]) == text
