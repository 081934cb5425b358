"""Methods that look at activations: GPTQ against its definition, AWQ as the same function, both as folders."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from nibblelm import LLM, convert
from nibblelm.checkpoint import open_checkpoint
from nibblelm.cli import main
from nibblelm.converter.calibration import read_calibration
from nibblelm.errors import ConvertError, TokenizerError
from nibblelm.models import family
from nibblelm.ops.reference import dequantize
from nibblelm.ops.types import QuantizedWeight
from nibblelm.quant import gptq
from nibblelm.quant.affine import pack_zero_point
from nibblelm.quant.rows import quantize_rows

TEXT = "The fox saw a red ball and ran. It was late, so the fox went home to sleep. " * 70
FAMILIES = {
    "llama": dict(attention_bias=True, mlp_bias=True),
    "mistral": dict(sliding_window=5),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": {},
}


@pytest.fixture
def source(save, tmp_path):
    """`source(family, **config)`: a random checkpoint with a byte-level tokenizer, and the text beside it."""

    def make(family, dtype=torch.bfloat16, **changes):
        folder = save(family, dtype, **FAMILIES.get(family, {}) | changes)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>"], initial_alphabet=alphabet)
        tokenizer.train_from_iterator([TEXT], trainer)
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        tokenizer.save(str(folder / "tokenizer.json"))
        (tmp_path / "text.txt").write_text(TEXT + "<|endoftext|>" + TEXT)
        return folder

    return make


def restored(rows, bits, group, shape):
    return dequantize(QuantizedWeight(rows.codes, rows.scale, pack_zero_point(rows.zero, bits), bits, group, shape))


def by_definition(weight, moment, scale, zero, bits, group):
    """GPTQ in float64: before a column is rounded, the columns still free are at their best given all rounded ones."""
    moment = moment + np.eye(len(moment)) * 0.01 * np.diag(moment).mean()
    order = np.argsort(-np.diag(moment), kind="stable")
    result, now = np.zeros_like(weight), weight.copy()
    for count, j in enumerate(order):
        g = j // group
        result[:, j] = scale[:, g] * np.clip(np.round(now[:, j] / scale[:, g]), -zero[:, g], 2**bits - 1 - zero[:, g])
        fixed, free = order[: count + 1], order[count + 1 :]
        error = weight[:, fixed] - result[:, fixed]
        best = -error @ moment[np.ix_(fixed, free)] @ np.linalg.inv(moment[np.ix_(free, free)])
        now[:, free] = weight[:, free] - best
    return result


def inputs(columns, seed=0):
    torch.manual_seed(seed)
    return torch.randn(900, columns) @ (torch.randn(columns, columns) * torch.logspace(0, -1.5, columns))


@pytest.mark.parametrize(("bits", "group"), [(4, -1), (4, 32), (8, -1)])
def test_gptq_is_its_definition(bits, group, monkeypatch):
    monkeypatch.setattr(gptq, "MULTIPLES", (1.0,))
    monkeypatch.setattr(gptq, "SWEEPS", 0)
    weight, x = torch.randn(17, 160), inputs(160)
    rows = gptq.quantize(weight, x.T @ x / len(x), bits, group, False, torch.float32)
    scale, zero = rows.scale.double().numpy(), rows.zero.double().numpy()
    moment = (x.T @ x / len(x)).double().numpy()
    expected = by_definition(weight.double().numpy(), moment, scale, zero, bits, 160 if group == -1 else group)
    found = restored(rows, bits, group, (17, 160)).double().numpy()
    # A tie that float32 breaks the other way changes what follows in its row, so rows are compared, and their loss.
    same = np.isclose(found, expected, atol=1e-4).all(1)
    assert same.mean() >= 0.7

    def loss(e):
        return ((e @ moment) * e).sum()

    assert loss(found - weight.numpy()) == pytest.approx(loss(expected - weight.numpy()), rel=0.02)


@pytest.mark.parametrize("group", [-1, 32, 128])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq_loses_less_in_the_output(group, symmetric):
    weight, x = torch.randn(40, 256), inputs(256)
    moment = x.T @ x / len(x)

    def loss(rows):
        e = restored(rows, 4, group, (40, 256)) - weight
        return float((e @ moment * e).sum())

    plain = loss(quantize_rows(weight, 4, group, symmetric, "mse", 1, torch.bfloat16))
    assert loss(gptq.quantize(weight, moment, 4, group, symmetric, torch.bfloat16)) < 0.5 * plain


@pytest.mark.parametrize("group", [-1, 32])
def test_sweeps_lose_less(group, monkeypatch):
    weight, x = torch.randn(40, 256), inputs(256)
    moment = x.T @ x / len(x)
    raised = (moment + torch.eye(256) * 0.01 * moment.diagonal().mean()).double()

    def losses(sweeps):
        monkeypatch.setattr(gptq, "SWEEPS", sweeps)
        rows = gptq.quantize(weight, moment, 4, group, False, torch.bfloat16)
        e = (restored(rows, 4, group, (40, 256)) - weight).double()
        return (e @ raised * e).sum(1)

    before, after = losses(0), losses(3)
    assert (after <= before * (1 + 1e-5)).all()  # of what is minimised, no row may lose more
    assert after.sum() < before.sum()


@pytest.mark.parametrize("rank", [0, 1, 5])
def test_gptq_recovers_from_a_moment_without_an_inverse(rank):
    x = torch.randn(rank, 64) * 1e4
    moment = x.T @ x - 1e-3 * torch.eye(64)  # not even positive
    rows = gptq.quantize(torch.randn(8, 64), moment, 4, -1, False, torch.float16)
    assert restored(rows, 4, -1, (8, 64)).isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [dict(method="gptq"), dict(method="gptq", rotate=True), dict(method="awq")])
def test_folders_open_and_run(family, options, source, tmp_path):
    """transformers' weights equal ours bit for bit, and its logits are those of our runtime."""
    folder, out = source(family, torch.float32), tmp_path / "out"
    keep = ["v_proj=8", "layers.1.self_attn.o_proj=16"]
    report = convert(folder, out, group_size=32, calibration=tmp_path / "text.txt", samples=4, keep=keep, **options)
    assert all(0 < tensor.relative_error < 0.3 for tensor in report.tensors)
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto", attn_implementation="eager").eval()
    ids = list(range(1, 30))
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    state, checkpoint = model.state_dict(), open_checkpoint(out)
    for module in checkpoint.modules_quantized:
        assert torch.equal(state[f"{module}.weight"], dequantize(checkpoint.weight(module))), module
    ours = LLM(out, dtype="fp32").logits(ids)
    assert (ours - theirs).norm() / theirs.norm() < 2e-4  # what README promises of fp32
    record = json.loads((out / "nibblelm.json").read_text())
    assert record["method"] == options["method"]
    assert record["calibration"] | {"file": "text.txt", "samples": 4} == record["calibration"]


@pytest.mark.parametrize("family", ["gpt_neox", "gemma2"])
def test_gptq_walks_any_wiring(family, source, tmp_path):
    """With activations in view the logits come nearer to the source's than with the weights alone."""
    folder = source(family, torch.float32)
    options = dict(bits=4, group_size=-1, keep=["lm_head=16", "layers=4"])
    convert(folder, tmp_path / "plain", **options)
    convert(folder, tmp_path / "gptq", method="gptq", calibration=tmp_path / "text.txt", samples=8, **options)
    ids = LLM(folder).encode(TEXT[:400])
    want, plain, found = (LLM(f, dtype="fp32").logits(ids) for f in (folder, tmp_path / "plain", tmp_path / "gptq"))
    assert (found - want).norm() < 0.8 * (plain - want).norm()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "gptq", dtype="auto", attn_implementation="eager").eval()
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0]
    assert (found - theirs).norm() / theirs.norm() < 2e-4


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_resumed_conversions_are_the_same_bytes(method, source, tmp_path):
    options = dict(method=method, calibration=tmp_path / "text.txt", samples=3, rotate=method == "gptq")
    folder = source("llama")
    convert(folder, tmp_path / "whole", **options)
    (tmp_path / "other.txt").write_text(TEXT)
    for after in (3, 17, 20):
        out = tmp_path / f"out{after}"
        blocks = iter(range(after))
        with pytest.raises(StopIteration):
            convert(folder, out, progress=lambda *_, blocks=blocks: next(blocks), **options)
        with pytest.raises(ConvertError, match="calibration"):
            convert(folder, out, resume=True, **options | dict(calibration=tmp_path / "other.txt"))
        report = convert(folder, out, resume=True, **options)
        assert report.reused_tensors
        first, second = ({p.name: p.read_bytes() for p in f.iterdir()} for f in (out, tmp_path / "whole"))
        assert first == second


def test_a_source_changed_after_a_calibrated_layer_is_refused(source, tmp_path):
    folder, blocks = source("llama"), iter(range(17))
    options = dict(method="gptq", calibration=tmp_path / "text.txt", samples=3)
    with pytest.raises(StopIteration):
        convert(folder, tmp_path / "out", progress=lambda *_: next(blocks), **options)
    weights = folder / "model.safetensors"
    info, stat = open_checkpoint(folder).info("model.layers.0.mlp.up_proj.weight"), weights.stat()
    data = bytearray(weights.read_bytes())
    data[info.offset] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(ConvertError, match=r"the source changed .*up_proj"):
        convert(folder, tmp_path / "out", resume=True, **options)


def test_what_cannot_be_calibrated_is_refused(source, save, tmp_path):
    folder = source("llama")
    (tmp_path / "empty.txt").write_text(" ")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xff")
    for options, message in (
        (dict(method="mse", calibration=tmp_path / "text.txt"), "looks at no text"),
        (dict(method="gptq", calibration=tmp_path / "empty.txt"), "is empty"),
        (dict(method="gptq", calibration=tmp_path / "bytes.txt"), "cannot read"),
        (dict(method="gptq", calibration=tmp_path / "missing.txt"), "cannot read"),
        (dict(method="gptq", samples=0), "samples"),
    ):
        with pytest.raises(ConvertError, match=message):
            convert(folder, tmp_path / "out", **options)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConvertError, match="tokenizer"):
        convert(folder, tmp_path / "out", method="gptq")


CHAT = """{{ bos_token }}{% for message in messages %}<{{ message.role }} {{ strftime_now("%d %b %Y") }}>
{{ message.content }}{% endfor %}{% if add_generation_prompt %}<assistant>
{% endif %}"""


def test_a_chat_model_is_calibrated_through_its_template(source, tmp_path):
    """The ids are those of transformers' template of the first sentence, and of the text after it."""
    folder, texts = source("llama"), ["A fox ran. It was late.\nSo it slept.", "Balls\nare red. Are they?", "No end"]
    (folder / "chat_template.jinja").write_text(CHAT)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"})
    )
    (tmp_path / "texts.txt").write_text("<|endoftext|>".join(texts))
    theirs = AutoTokenizer.from_pretrained(folder)
    stream = []
    for text, first in zip(texts, ["A fox ran.", "Balls", "No end"], strict=True):
        said = [{"role": "user", "content": first}]
        options = dict(add_generation_prompt=True, strftime_now=lambda _: "01 Jan 2026")  # the same bytes on any day
        prompt = theirs.apply_chat_template(said, tokenize=False, **options)
        stream += theirs(prompt + text.removeprefix(first), add_special_tokens=False)["input_ids"]
    checkpoint = open_checkpoint(folder)
    config = family(checkpoint.config).read_config(checkpoint.config)
    found = read_calibration(tmp_path / "texts.txt", folder, config, 1, 0)
    assert found.ids.tolist() == [[0, *stream]]
    assert found.record["chat_template"] == hashlib.sha256(CHAT.encode()).hexdigest()
    convert(folder, tmp_path / "out", method="gptq", calibration=tmp_path / "texts.txt")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(TokenizerError, match="refused the messages: no"):
        convert(folder, tmp_path / "other", method="gptq", calibration=tmp_path / "texts.txt")


def test_the_demo_model_sees_the_bundled_stories_as_they_are(tmp_path):
    """Its template gives back how a story begins, so that README's figures are those of either way."""
    demo = Path(__file__).resolve().parents[2] / "demo" / "stories-7m"
    if not demo.exists():
        pytest.skip("the demo model is not here")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo / name, tmp_path / name)
    config = family(open_checkpoint(demo).config).read_config(open_checkpoint(demo).config)
    chats, plain = (read_calibration(None, folder, config, 999, 0) for folder in (demo, tmp_path))
    assert "chat_template" in chats.record.keys() - plain.record.keys()
    assert torch.equal(chats.ids, plain.ids)


def test_bundled_text_on_the_command_line(source, tmp_path, capsys):
    out = str(tmp_path / "out")
    flags = ["--method", "gptq", "--rotate", "--samples", "1", "--seed", "3", "--device", "cpu"]
    assert main(["convert", str(source("llama")), out, *flags]) == 0
    record = json.loads((tmp_path / "out" / "nibblelm.json").read_text())["calibration"]
    assert record["file"] == "the bundled text"
    assert (record["samples"], record["length"], record["seed"]) == (1, 512, 3)
    capsys.readouterr()
    assert main(["info", "-m", out]) == 0
    assert "method gptq, rotated, calibrated on 1 x 512 tokens of the bundled text, seed 3" in capsys.readouterr().out
