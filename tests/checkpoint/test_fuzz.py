"""Seeded mutation of every input of the reader: only the project's typed errors come out, soon, in little memory."""

import json
import random
import re
import resource
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from nibblelm.checkpoint import Checkpoint, Quantization, SafetensorsFile, Scheme, quantization_config
from nibblelm.errors import CheckpointError, NibbleLMError
from nibblelm.tokenizer import load_tokenizer
from nibblelm.tokenizer.chat_template import render

CASES = 2000
SECONDS_PER_CASE = 1.0  # of this process; a case takes a few milliseconds
MEMORY = 256 << 20
STRANGE: list[Any] = [None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, 1e999, "", "..", "/", "\0"]
STRANGE += [
    "re:",
    "re:(",
    "re:(a+)+$",
    "x" * 2000,
    "\ud800",
    [],
    {},
    [[]],
    [None],
    {"": {}},
    [2**62, 4],
    "F32",
    "I64",
    -4,
    "\x1b]0;title\x07\x9b2J\u202e\n",
]


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """One to four flips, cuts, copies of a piece to elsewhere, insertions, or interesting numbers."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(result) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(result):
            result[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del result[at:]
        elif kind == 2:
            begin = rng.randrange(len(result) + 1)
            result[at : at + rng.randrange(16)] = result[begin : begin + rng.randrange(64)]
        elif kind == 3:
            result[at:at] = rng.randbytes(rng.randrange(9))
        elif kind == 4:
            result[0:8] = struct.pack(
                "<Q", rng.choice([0, 1, 2, len(result), 2**31, 2**63, rng.randrange(2 * len(result) + 1)])
            )
        else:
            result[at : at + 1] = rng.choice([b'"', b"{", b"[", b"0", b"9", b"-", b"\\u0000", b"e9"])
    return bytes(result)


def mutate_json(value: Any, rng: random.Random) -> Any:
    """A copy of `value` with one node replaced, removed, doubled, renamed, or nudged."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        result, key = dict(value), rng.choice(list(value))
        kind = rng.randrange(10)
        if kind == 0:
            del result[key]
        elif kind == 1:
            result[str(rng.choice(STRANGE))] = result.pop(key)
        elif kind == 2:
            result[str(rng.choice(STRANGE))] = rng.choice([*STRANGE, value[key]])
        else:
            result[key] = mutate_json(value[key], rng)
        return result
    if isinstance(value, list) and value and rng.random() < 0.8:
        result = list(value)
        at = rng.randrange(len(result))
        result[at : at + rng.randint(0, 1)] = [mutate_json(value[at], rng)] * rng.randint(0, 2)
        return result
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice([-8, -4, -1, 1, 4, 8, 2**32])
    return rng.choice(STRANGE)


def run_cases(case: Callable[[random.Random], None], count: int = CASES) -> tuple[int, int]:
    """How many seeded cases were accepted and how many refused; anything but a typed error fails with its seed."""
    accepted = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for seed in range(count):
        begin = time.process_time()
        try:
            case(random.Random(seed))
            accepted += 1
        except NibbleLMError as error:
            if len(str(error)) > 2000 or not str(error).isprintable():  # what is printable no terminal obeys
                raise AssertionError(f"seed {seed}, {len(str(error))} characters: {str(error)!r}") from error
        except Exception as error:
            raise AssertionError(f"seed {seed} raised {type(error).__name__}: {error}") from error
        assert time.process_time() - begin < SECONDS_PER_CASE, f"seed {seed} took too long"
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < MEMORY, f"{grown >> 20} MiB more memory than before"
    return accepted, count - accepted


def read_everything(file: SafetensorsFile) -> None:
    for name in file.names():
        info, tensor = file.info(name), file.tensor(name)
        assert (tensor.dtype, tuple(tensor.shape), tensor.nbytes) == (info.dtype, info.shape, info.nbytes)
        tensor.reshape(-1).view(torch.uint8).sum()
        file.release(name)


def small_file() -> bytes:
    tensors = {"a": torch.arange(63, dtype=torch.float32).view(3, 21), "b": torch.ones(17, dtype=torch.bfloat16)}
    tensors |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(1), "codes": torch.ones(5, 2, dtype=torch.int32)}
    return save(tensors, metadata={"format": "pt"})


def test_bytes_of_a_safetensors_file(tmp_path: Path) -> None:
    base, path = small_file(), tmp_path / "m.safetensors"

    def case(rng: random.Random) -> None:
        path.write_bytes(mutate_bytes(base, rng))
        read_everything(SafetensorsFile(path))

    accepted, refused = run_cases(case)
    assert accepted > 50, "mutations of the data itself leave a valid file"
    assert refused > CASES // 4


def test_header_of_a_safetensors_file(tmp_path: Path) -> None:
    data = small_file()
    length = int.from_bytes(data[:8], "little")
    header, tensors, path = json.loads(data[8 : 8 + length]), data[8 + length :], tmp_path / "m.safetensors"

    def case(rng: random.Random) -> None:
        changed = header
        for _ in range(rng.randint(1, 3)):
            changed = mutate_json(changed, rng)
        text = json.dumps(changed).encode()
        text += b" " * (-len(text) % rng.choice([1, 8]))
        path.write_bytes(struct.pack("<Q", len(text)) + text + tensors)
        read_everything(SafetensorsFile(path))

    accepted, refused = run_cases(case)
    assert accepted > 50
    assert refused > CASES // 4


def test_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for shard in ("1.safetensors", "2.safetensors"):
        (tmp_path / shard).write_bytes(save({f"{shard[0]}{letter}": torch.ones(3) for letter in "abc"}))
    index = {"metadata": {"total_size": 72}, "weight_map": {f"{i}{c}": f"{i}.safetensors" for i in "12" for c in "abc"}}

    def case(rng: random.Random) -> None:
        text = json.dumps(mutate_json(mutate_json(index, rng), rng)).encode()
        if rng.random() < 0.5:
            text = mutate_bytes(json.dumps(index).encode(), rng)
        (tmp_path / "model.safetensors.index.json").write_bytes(text)
        checkpoint = Checkpoint(tmp_path)
        assert {checkpoint.tensor(name).sum().item() for name in checkpoint.names()} == {3.0}

    accepted, refused = run_cases(case)
    assert accepted > 20
    assert refused > CASES // 4


def packed_folder(folder: Path) -> dict[str, Any]:
    """A folder with one quantized module per scheme; returns its config."""
    schemes = {"a": Scheme(4, 32, False), "b": Scheme(8, -1, True), "c": Scheme(4, -1, False), "d": Scheme(8, 32, True)}
    tensors = {"norm.weight": torch.ones(64)}
    for name, scheme in schemes.items():
        per_word, groups = 32 // scheme.bits, 1 if scheme.group_size == -1 else 64 // scheme.group_size
        tensors[f"{name}.weight_packed"] = torch.zeros(17, 64 // per_word, dtype=torch.int32)
        tensors[f"{name}.weight_scale"] = torch.ones(17, groups)
        tensors[f"{name}.weight_shape"] = torch.tensor([17, 64])
        if not scheme.symmetric:
            tensors[f"{name}.weight_zero_point"] = torch.zeros(-(-17 // per_word), groups, dtype=torch.int32)
    (folder / "model.safetensors").write_bytes(save(tensors))
    config = quantization_config(schemes, ["lm_head", "re:.*vision.*"])
    config["config_groups"]["group_0"]["targets"] += ["re:model\\.layers\\.\\d+\\..*", "Linear"]
    return {"model_type": "llama", "quantization_config": config}


def test_quantization_config(tmp_path: Path) -> None:
    config = packed_folder(tmp_path)

    def case(rng: random.Random) -> None:
        changed = config
        for _ in range(rng.randint(1, 3)):
            changed = {**changed, "quantization_config": mutate_json(changed["quantization_config"], rng)}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        checkpoint = Checkpoint(tmp_path)
        for module in (*checkpoint.modules_quantized, "norm"):
            checkpoint.weight(module)

    accepted, refused = run_cases(case)
    assert accepted > 20
    assert refused > CASES // 4


def test_packed_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(packed_folder(tmp_path)))
    data = (tmp_path / "model.safetensors").read_bytes()

    def case(rng: random.Random) -> None:
        (tmp_path / "model.safetensors").write_bytes(mutate_bytes(data, rng))
        checkpoint = Checkpoint(tmp_path)
        for module in checkpoint.modules_quantized:
            checkpoint.weight(module)

    assert min(run_cases(case)) > 50


TEMPLATE = """{%- set ns = namespace(last=0, text='') %}
{%- if messages[0]['role'] == 'system' %}{{ '<|system|>' ~ messages[0].content | trim }}{% endif %}
{%- for m in messages[1:] if m.role != 'tool' %}{% set ns.last = loop.index0 * 2 %}
{{- '<|%s|>' % m.role + m['content'].replace('e', 'i' * 3) | upper }}{{ {'n': [1, 2, 3]} | tojson(indent=2) }}
{%- else %}{{ raise_exception('no ' ~ range(9) | join(', ')) }}{% endfor %}
{%- macro f(n) %}{{ f(n - 1) if n > 0 }}{{ '{:>8}'.format(n) }}{% endmacro %}{{ f(3) }}{{ 7 ** 3 | round(1) }}
{%- if add_generation_prompt %}{{ strftime_now('%d %b') | center(20) }}{% endif %}"""
CHAT = [{"role": role, "content": f"The {role} says\x1b[2J"} for role in ("system", "user", "assistant")]


def test_chat_templates() -> None:
    """Bytes of one and of itself, numbers grown to what no machine can hold."""

    def case(rng: random.Random) -> None:
        text = mutate_bytes(TEMPLATE.encode(), rng).decode("utf-8", "replace")
        if rng.random() < 0.5:
            text = re.sub(r"\d", lambda digit: rng.choice([digit[0], digit[0] + "0" * rng.randrange(12)]), TEMPLATE)
        render(text, CHAT, {"add_generation_prompt": True})

    accepted, refused = run_cases(case, 500)
    assert accepted > 10
    assert refused > 100


def tokenizer_folder(folder: Path) -> dict[str, Any]:
    """A small tokenizer in files of its own: name -> contents."""
    vocab = {chr(c): c - 32 for c in range(32, 127)} | {"ab": 95, "abc": 96, "<s>": 97, "</s>": 98}
    model = {"type": "BPE", "vocab": vocab, "merges": [["a", "b"], ["ab", "c"]], "byte_fallback": False}
    added = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    json_file = {
        "version": "1.0",
        "added_tokens": [{"id": 97, "content": "<s>", **added}, {"id": 98, "content": "</s>", **added}],
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": " ?\\w+"}, "behavior": "Isolated", "invert": False},
        "decoder": {"type": "Fuse"},
        "model": model,
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": {"content": "</s>"}}
    config |= {"chat_template": TEMPLATE, "added_tokens_decoder": {"97": {"content": "<s>", **added}}}
    files = {"tokenizer.json": json_file, "tokenizer_config.json": config, "chat_template.json": {"chat_template": "x"}}
    files |= {"special_tokens_map.json": {"unk_token": "<unk>"}, "added_tokens.json": {"<x>": 99}}
    for name, contents in files.items():
        (folder / name).write_text(json.dumps(contents))
    return files


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_tokenizer_files(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    contents = tokenizer_folder(tmp_path)[name]
    if name == "special_tokens_map.json":  # read where no added_tokens_decoder is
        (tmp_path / "tokenizer_config.json").write_text("{}")

    def case(rng: random.Random) -> None:
        text = json.dumps(mutate_json(contents, rng)).encode()
        if rng.random() < 0.5:
            text = mutate_bytes(json.dumps(contents).encode(), rng)
        (tmp_path / name).write_bytes(text)
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer is not None
        tokenizer.decode(tokenizer.encode("abc abcd <s> \x1b é"))

    accepted, refused = run_cases(case, 500)
    assert accepted > 20
    assert refused > 50
    assert capfd.readouterr() == ("", ""), "the library says nothing of its own"


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*b", ".*.*.*.*.*.*.*.*.*x", "(a{0,400}){0,400}$", "(a?b?){300}.{0,300}.*x"]
)
def test_hostile_patterns_are_decided_soon(pattern: str) -> None:
    config = quantization_config({"x": Scheme(4, -1, True)}, [f"re:{pattern}"])
    begin = time.process_time()
    Quantization(config).scheme("a" * 500 + "!")
    assert time.process_time() - begin < SECONDS_PER_CASE


def test_a_wide_file_is_decided_soon(tmp_path: Path) -> None:
    """Two hundred thousand equal keys, and as many tensors that all begin at 0: no quadratic work."""
    path = tmp_path / "m.safetensors"
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    for names in (["k"] * 200_000, [f"k{i}" for i in range(200_000)]):
        text = ("{" + ",".join(f'"{name}":{entry}' for name in names) + "}").encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + b"1")
        begin = time.process_time()
        with pytest.raises(CheckpointError):
            SafetensorsFile(path)
        assert time.process_time() - begin < 15
