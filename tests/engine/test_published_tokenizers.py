"""Tokenizer folders as they are published, with classes and files that transformers does not write today."""

import base64
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tokenizers import Regex, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto as auto

from nibblelm.errors import TokenizerError
from nibblelm.models import NESTED, families
from nibblelm.tokenizer import Tokenizer, load_tokenizer
from nibblelm.tokenizer.detokenizer import byte_level_bytes
from nibblelm.tokenizer.files import CLASS_DEFAULTS, CLASS_NOT_BELIEVED, CLASS_OF_MODEL_TYPE, GENERIC

TEXTS = ["Hello world 2023\n\nIt's", " two  spaces\t\n x", "é 日本 😀 12345 a1b2", "IT'S  \r\n\r\n!?... (x)", ""]
GENERIC_TYPES = [name for name, kind in CLASS_OF_MODEL_TYPE.items() if kind == GENERIC]


def loaded(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def test_classes_of_families_are_those_of_transformers() -> None:
    """Of the classes that are rebuilt here; the files of others say everything."""
    rebuilt = {**{name: name for name in CLASS_DEFAULTS}, "TokenizersBackend": GENERIC, "MistralCommonBackend": GENERIC}
    for name in (*families(), *NESTED):
        want = rebuilt.get(str(auto.TOKENIZER_MAPPING_NAMES.get(name)).removesuffix("Fast"))
        assert CLASS_OF_MODEL_TYPE.get(name) == want, name
        believed = name not in auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        assert believed == (name not in CLASS_NOT_BELIEVED) or want == GENERIC, name


@pytest.fixture(scope="module")
def gpt2(data_dir: Path) -> Path:
    return data_dir / "tokenizers" / "gpt2"


@pytest.fixture(scope="module")
def digits(gpt2: Path) -> Backend:
    """A tokenizer.json with a split of its own, as OLMo 2's and Granite's have: GPT-2's words, digits apart."""
    vocab = json.loads((gpt2 / "vocab.json").read_text())
    lines = (gpt2 / "merges.txt").read_text().splitlines()[1:]
    backend = Backend(BPE(vocab, [(a, b) for a, b in (line.split(" ") for line in lines if line)]))
    split = pre_tokenizers.Split(Regex(r"\p{N}|\s+|[^\s\p{N}]+"), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def written(folder: Path, backend: Backend, model_type: str, class_name: str | None, **config: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    named = {} if class_name is None else {"tokenizer_class": class_name}
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, **config}))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.mark.parametrize("class_name", ["GPT2Tokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", None])
@pytest.mark.parametrize("model_type", GENERIC_TYPES)
def test_the_file_decides_where_classes_are_wrong(
    model_type: str, class_name: str | None, digits: Backend, tmp_path: Path
) -> None:
    ours = loaded(written(tmp_path, digits, model_type, class_name))
    for text in TEXTS:
        assert ours.encode(text) == digits.encode(text).ids, text
        assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize("model_type", ["olmo2", "granite", "stablelm", "mistral", "gpt_neox", "cohere", "codegen"])
@pytest.mark.parametrize("class_name", ["GPT2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer", "CodeGenTokenizer"])
@pytest.mark.parametrize("prefix", [False, True])
def test_classes_beside_a_file_are_as_transformers_has_them(
    model_type: str, class_name: str, prefix: bool, digits: Backend, tmp_path: Path
) -> None:
    folder = written(tmp_path, digits, model_type, class_name, add_prefix_space=prefix)
    ours, theirs = loaded(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids, text
    assert ours.vocab_size == len(theirs)


def test_bytes_under_llamas_class_stay_bytes(digits: Backend, tmp_path: Path) -> None:
    """DeepSeek's distilled Llama is published so; transformers knows it by its name on the hub alone."""
    ours = loaded(written(tmp_path, digits, "llama", "LlamaTokenizerFast"))
    for text in TEXTS:
        assert (ours.encode(text), ours.decode(ours.encode(text))) == (digits.encode(text).ids, text)


@pytest.mark.parametrize(
    "class_name", ["GPT2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer", "CodeGenTokenizer", None]
)
@pytest.mark.parametrize("model_type", ["gptj", "codegen", "phi", "opt", "starcoder2", "gpt_neox", "mpt", "cohere"])
def test_vocab_and_merges(model_type: str, class_name: str | None, gpt2: Path, tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(gpt2 / name, tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    if class_name is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": class_name}))
    ours, theirs = loaded(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids, text


def test_ranks_of_glm_4(gpt2: Path, tmp_path: Path) -> None:
    """ChatGLM4Tokenizer's tokenizer.model, against the library that it is for."""
    vocab = json.loads((gpt2 / "vocab.json").read_text())
    del vocab["<|endoftext|>"]
    ranks = {byte_level_bytes(piece): rank for piece, rank in vocab.items()}
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())
    (tmp_path / "tokenizer.model").write_bytes(b"".join(lines))
    with pytest.raises(TokenizerError, match=r"must name \[gMASK\] and <sop>"):
        load_tokenizer(tmp_path)
    names = ("<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>")
    added = {len(vocab) + i: {"content": name, "special": True} for i, name in enumerate(names)}
    config = {"tokenizer_class": "ChatGLM4Tokenizer", "added_tokens_decoder": added, "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    theirs = tiktoken.Encoding("glm-4", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    ours, rng = loaded(tmp_path), random.Random(5)
    letters = "aAbeéstTh '\n\r\t 0123日本😀.,!-"
    for text in [*TEXTS, *("".join(rng.choices(letters, k=40)) for _ in range(300))]:
        ids = theirs.encode_ordinary(text)
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.encode(text) == [len(vocab) + 2, len(vocab) + 4, *ids]
        assert ours.decode(ids) == text
    assert ours.encode("<|user|>\nHi", False) == [len(vocab) + 7, *theirs.encode_ordinary("\nHi")]
    assert (ours.eos_id, ours.vocab_size) == (len(vocab), len(vocab) + len(names))


_BYTES = [b"%s %d" % (base64.b64encode(bytes([byte])), byte) for byte in range(256)]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*_BYTES, b"garbage"], "has a line that is not a token in base64 and its rank"),
        ([*_BYTES, b"YWI= x"], "has a line that is not a token in base64 and its rank"),
        ([*_BYTES, b"\xff\xff 256"], "has a line that is not a token in base64 and its rank"),
        ([*_BYTES, b"YWI= -1"], "has 257 ranks; 0 to one less are expected"),
        ([*_BYTES, b"YWI= 5"], "has 257 ranks; 0 to one less are expected"),
        (_BYTES[:100], "has 100 ranks; 0 to one less are expected, with every byte among them"),
    ],
)
def test_ranks_that_are_none(lines: list[bytes], message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines))
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("file", "config", "message"),
    [
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"256": {"content": "[gMASK]", "lstrip": "no"}}},
            "cannot be",
        ),
        ("tokenizer_config.json", {"eos_token": "\ud800"}, "cannot be used"),
        ("tokenizer_config.json", {"extra_special_tokens": 5}, "extra_special_tokens must be a list, got 5"),
        ("added_tokens.json", {"[gMASK]": 256, "<sop>": "b"}, "the id of '<sop>' must be an integer, got 'b'"),
        ("added_tokens.json", {"x": [1]}, r"the id of 'x' must be an integer, got \[1\]"),
    ],
)
def test_added_tokens_that_are_none(file: str, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(_BYTES))
    (tmp_path / file).write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("named", [False, True])
def test_what_chatglm_puts_before_a_text(named: bool, spm_folder: Path, tmp_path: Path) -> None:
    """Of ChatGLM2 and ChatGLM3: [gMASK] and sop, the second and fourth id behind the pieces'."""
    import sentencepiece

    shutil.copyfile(spm_folder / "tokenizer.model", tmp_path / "tokenizer.model")
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    size = model.get_piece_size()
    names = ["[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", "<|user|>"]
    config: dict[str, Any] = {"tokenizer_class": "ChatGLMTokenizer"}
    if named:  # as in later revisions of ChatGLM3
        config["added_tokens_decoder"] = {size + i: {"content": n, "special": True} for i, n in enumerate(names)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = loaded(tmp_path)
    assert ours.encode("the cat sat") == [size + 1, size + 3, *model.encode("the cat sat")]
    assert [ours.piece(size + i) for i in range(5)] == names[:5]
    assert ours.decode([size + 1, size + 3, *model.encode("the cat")]) == "the cat"
    assert ours.opening == [size + 1, size + 3]
    if named:
        assert ours.encode("[gMASK]sop<|user|>", False) == [size + 1, size + 3, size + 5]
    else:
        assert ours.encode("the sop cat", False) == model.encode("the sop cat")


def test_single_words_alone(spm_folder: Path, tmp_path: Path) -> None:
    shutil.copyfile(spm_folder / "tokenizer.model", tmp_path / "tokenizer.model")
    token = {"content": "word", "single_word": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"400": token}}))
    ours = loaded(tmp_path)
    assert 400 not in ours.encode("swords wordy")
    assert 400 in ours.encode("a word.")
