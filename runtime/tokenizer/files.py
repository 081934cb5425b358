"""Builds a `tokenizers.Tokenizer` from a folder's tokenizer.json, or from vocab.json and merges.txt.

transformers' tokenizer classes for Llama, GPT-2, GPT-NeoX, Cohere and Qwen2 rebuild the text pipeline whatever
tokenizer.json says, other classes take the file as it is. Models are published against the former, so it is repeated
here: the recipes below are those of transformers 5 and the tests compare the two.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nibblelm.errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "config.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
)
"""Everything that is read of a tokenizer, under these names, and of this folder where transformers keeps chat templates
beside the one named default."""
TEMPLATES = "additional_chat_templates"
_TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # others the library would print
GENERIC = "TokenizersBackend"
# model_type -> the class transformers takes for it; GENERIC overrules the class that the folder names
CLASS_OF_MODEL_TYPE = {
    **dict.fromkeys(("glm", "glm4", "granite", "internlm2", "ministral", "ministral3", "mistral", "mistral3"), GENERIC),
    **dict.fromkeys(("mixtral", "olmo2", "olmo3", "phi3", "stablelm"), GENERIC),
    **dict.fromkeys(("codegen", "gpt2", "gptj", "opt", "phi", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "mpt"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
}
# Folders of this type name wrong classes so often that transformers does not believe them
CLASS_NOT_BELIEVED = {"qwen2"}
_OTHER_NAMES = {"CodeGenTokenizer": "GPT2Tokenizer"}
CLASS_DEFAULTS: dict[str, dict[str, str | None]] = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GPT2Tokenizer": dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    "GPTNeoXTokenizer": {
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
        "pad_token": "<|padding|>",
    },
    "CohereTokenizer": {
        **{"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "unk_token": "<UNK>"},
        **{"pad_token": "<PAD>", "cls_token": "<CLS>", "sep_token": "<SEP>", "mask_token": "<MASK_TOKEN>"},
    },
    "Qwen2Tokenizer": dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>"),
}
# Words with one leading non-letter, single digits, punctuation with its newlines, white space (Qwen2's release)
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is none; TokenizerError where it is not an object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}; a JSON object is expected")
    return value


@dataclass(frozen=True)
class Settings:
    """What tokenizer_config.json and its older companions say."""

    config: Mapping[str, Any]  # tokenizer_config.json
    class_name: str  # the transformers class that would read the folder, "" if nothing names one
    special: Mapping[str, str]  # bos_token and the like, by name
    added: Mapping[int, Mapping[str, Any]]  # id -> AddedToken fields
    extra: tuple[str, ...]  # further special tokens


def content(token: Any) -> str | None:
    """The string of a token given as a string or as a serialized AddedToken."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None


def read_settings(folder: Path) -> Settings:
    """Read the tokenizer's settings from a checkpoint folder; files that are absent count as empty."""
    config = read_json(folder / "tokenizer_config.json")
    class_name = _class_name(config, read_json(folder / "config.json"))
    named = {**CLASS_DEFAULTS.get(class_name, {}), **config}
    added: dict[int, Mapping[str, Any]] = {}
    if "added_tokens_decoder" in config:
        try:
            added = {
                int(i): {key: token[key] for key in _TOKEN_FLAGS if key in token} | {"content": str(token["content"])}
                for i, token in config["added_tokens_decoder"].items()
            }
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise TokenizerError(f"{folder}/tokenizer_config.json: bad added_tokens_decoder: {error}") from error
    else:
        named |= read_json(folder / "special_tokens_map.json")
    special = {name: text for name, token in named.items() if name.endswith("_token") and (text := content(token))}
    extra = named.get("extra_special_tokens", named.get("additional_special_tokens")) or ()
    if isinstance(extra, dict):
        special |= {name: text for name, token in extra.items() if (text := content(token))}
        extra = ()
    if not isinstance(extra, list | tuple):
        raise TokenizerError(f"{folder}/tokenizer_config.json: extra_special_tokens must be a list, got {extra!r}")
    if "added_tokens_decoder" not in config:
        known = {*special.values(), *filter(None, map(content, extra))}
        for text, i in read_json(folder / "added_tokens.json").items():
            if type(i) is not int:
                raise TokenizerError(f"{folder}/added_tokens.json: the id of {text!r} must be an integer, got {i!r}")
            added[i] = {"content": text, "special": text in known, "normalized": text not in known}
    return Settings(config, class_name, special, added, tuple(filter(None, map(content, extra))))


def _class_name(tokenizer_config: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    stated = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class") or ""
    stated = str(stated).removesuffix("Fast")
    stated = _OTHER_NAMES.get(stated, stated)
    model_type = config.get("model_type")
    registered = CLASS_OF_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    if registered is None:
        return stated
    overruled = not stated or registered == GENERIC or model_type in CLASS_NOT_BELIEVED
    return registered if overruled else stated


def load_backend(folder: Path, settings: Settings) -> "Backend":
    """The folder's tokenizer with its added tokens; tokenizer.json goes before vocab.json and merges.txt."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE

    path = folder / "tokenizer.json"
    try:
        if from_file := path.is_file():
            backend = Backend.from_file(str(path))
            backend.no_truncation()
            backend.no_padding()
        else:
            path = folder / "vocab.json"
            vocab, merges = read_json(path), _read_merges(folder / "merges.txt")
            backend = Backend(BPE(vocab, merges, continuing_subword_prefix="", end_of_word_suffix=""))
        _apply_class(backend, settings, required=not from_file)
        added = [AddedToken(**settings.added[i]) for i in sorted(settings.added)]
        added += missing_special(settings, {t.content for t in (*backend.get_added_tokens_decoder().values(), *added)})
        backend.add_tokens(added)
        if backend.post_processor is None:
            # With a tokenizer.json the post-processor decides alone, and none means none
            _add_bos_eos(backend, settings, bos=not from_file, eos=not from_file)
        backend.encode_special_tokens = bool(settings.config.get("split_special_tokens", False))
    except TokenizerError:
        raise
    except Exception as error:  # the library raises bare Exception for every malformed file
        raise TokenizerError(f"{path} cannot be used: {error}") from error
    return backend


def missing_special(settings: Settings, known: set[str]) -> list["AddedToken"]:
    """The special tokens that settings name and that are not among `known`."""
    from tokenizers import AddedToken

    named = [settings.special[name] for name in SPECIAL_NAMES if name in settings.special]
    named += [text for name, text in settings.special.items() if name not in SPECIAL_NAMES]
    wanted = dict.fromkeys([*named, *settings.extra])
    return [AddedToken(text, special=True) for text in wanted if text not in known]


def _apply_class(backend: "Backend", settings: Settings, required: bool) -> None:
    """Set the pipeline of the folder's class; `required` where no tokenizer.json gives one."""
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

    prefix = settings.config.get("add_prefix_space")
    model: Any = backend.model
    if settings.class_name in CLASS_DEFAULTS and not isinstance(model, models.BPE):
        message = f"tokenizer.json has a {type(model).__name__} model; {settings.class_name}, its class, is for BPE"
        raise TokenizerError(message)
    kind, byte_level = settings.class_name, isinstance(backend.decoder, decoders.ByteLevel)
    if kind == "LlamaTokenizer" and not required and not byte_level:  # of bytes it is Llama 3's, under a wrong name
        prefix = prefix is None or bool(prefix)
        scheme = "never" if not prefix else "always" if settings.config.get("legacy") else "first"
        backend.normalizer = None  # pyright: ignore[reportAttributeAccessIssue]
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * prefix)
        model.unk_token, model.fuse_unk, model.byte_fallback, model.ignore_merges = None, True, True, False
    elif kind in CLASS_DEFAULTS and kind != "LlamaTokenizer":
        backend.decoder = decoders.ByteLevel()
        normalizer: Any = None if kind == "GPT2Tokenizer" else normalizers.NFC()
        backend.normalizer = normalizer
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=bool(prefix), use_regex=kind != "Qwen2Tokenizer")
        first: list[Any] = []
        if kind == "Qwen2Tokenizer":
            first = [pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")]
        elif kind == "CohereTokenizer":
            first = [pre_tokenizers.Digits(individual_digits=True)]
        backend.pre_tokenizer = pre_tokenizers.Sequence([*first, bytes_of])
        model.unk_token, model.fuse_unk, model.byte_fallback, model.ignore_merges = None, False, False, False
    elif required:
        raise TokenizerError(
            f"vocab.json and merges.txt do not say how to split text, and the tokenizer class is "
            f"{kind or 'not given'!r}; supported are {sorted(set(CLASS_DEFAULTS) - {'LlamaTokenizer'})} "
            "(tokenizer_class in tokenizer_config.json, or model_type in config.json); or provide a tokenizer.json"
        )


def _read_merges(path: Path) -> list[tuple[str, str]]:
    """The pairs of a merges.txt, in order; a "#version" header and CRLF line ends may be there or not."""
    if not path.is_file():
        raise TokenizerError(f"{path} is missing; vocab.json needs it, or provide a tokenizer.json")
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} is not readable UTF-8 text: {error}") from error
    pairs = []
    for number, ended in enumerate(text.split("\n"), 1):  # splitlines() would also cut at U+2028 and others
        line = ended.removesuffix("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(pair):
            raise TokenizerError(f"{path}, line {number}: got {line[:40]!r}; two tokens and one space are expected")
        pairs.append((pair[0], pair[1]))
    return pairs


def _add_bos_eos(backend: "Backend", settings: Settings, bos: bool, eos: bool) -> None:
    from tokenizers import processors

    first = settings.special.get("bos_token") if bos and settings.config.get("add_bos_token") else None
    last = settings.special.get("eos_token") if eos and settings.config.get("add_eos_token") else None
    ids = [(token, backend.token_to_id(token)) for token in (first, last) if token]
    if ids:
        template = [*([first] if first else []), "$A", *([last] if last else [])]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
