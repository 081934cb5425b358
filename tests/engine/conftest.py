"""Fixtures of text tests: real and made-up tokenizer folders, each with transformers' reading of it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nibblelm.tokenizer import Tokenizer, load_tokenizer

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
    "Съешь же ещё этих мягких французских булок; Ξεσκεπάζω την ψυχοφθόρα βδελυγμία",
    "דג סקרן שט בים; نص حكيم له سر قاطع; ऋषियों को सताने वाले; วันพฤหัสบดี; அகர முதல",
    "ვეფხისტყაოსანი; Բել դղյակի ձախ ժամն; ሰላም ለዓለም; 天地玄黄; あさきゆめみし; 다람쥐 헌 쳇바퀴에",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 ‚’“”…",
    "I'll don't we've THEY'RE 12345 3.14159 x=y**2;\n\tif (a) {\n}",
    "<s>Hi</s> there <unk> <s> x",
    "<|start_story|> a<|end_story|>b <|start_story|>\nc",
    "<|im_start|>user\nHello<|im_end|>\n<|endoftext|> tail",
    "▁▁ a▁b",
    "<0x0A> <0xFF>",
    "\x00\x01\x7f\x85\xa0\xad",
]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Texts that tokenizers are known to stumble over."""
    return TEXTS


@pytest.fixture(scope="session")
def folder_of(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Real folders by name, and folders of copies of real files with another configuration."""

    def linked(name: str, source: Path, files: dict[str, str], config: dict[str, Any] | None) -> Path:
        folder = tmp_path_factory.mktemp("tok") / name
        folder.mkdir()
        for target, origin in files.items():
            shutil.copyfile(source / origin, folder / target)
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
            case "llama_bare":
                files = {f: f for f in ("tokenizer.json", "config.json", "special_tokens_map.json")}
                return linked(name, llama, files, None)
            case "mistral_llama_class" | "qwen3_llama_class" | "unknown_class":
                class_name = "NoSuchTokenizer" if name == "unknown_class" else "LlamaTokenizerFast"
                typed = {"__type": "AddedToken", "special": True}
                config = {"tokenizer_class": class_name, "bos_token": "<s>", "unk_token": {**typed, "content": "<unk>"}}
                folder = linked(name, llama, {"tokenizer.json": "tokenizer.json"}, config)
                model_type = name.split("_", maxsplit=1)[0] if "llama" in name else "llama"
                (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
                return folder
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
