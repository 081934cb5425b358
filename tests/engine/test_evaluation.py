"""The protocol of `nibblelm eval` against transformers: every token's context is found again, token by token."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from nibblelm import LLM, convert
from nibblelm.checkpoint import open_checkpoint
from nibblelm.cli import main
from nibblelm.errors import RequestError
from nibblelm.evaluation import score, windows
from nibblelm.ops import cuda
from nibblelm.ops.reference import dequantize

BOS, SEPARATOR = 1, "<|endoftext|>"


@pytest.fixture(autouse=True)
def _one_torch_thread():
    """The tensors here are small: waking threads for them costs more than it gives."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def log_probabilities(model, context):
    """Of what follows `context`, float64."""
    with torch.no_grad():
        return model(torch.tensor([context])).logits[0, -1].double().log_softmax(-1).numpy()


def by_token(model, source, documents, bos, ctx, stride):
    """Perplexity, its standard error and the KL by the definition: one forward pass per token."""
    room = ctx - len(bos)
    losses, divergences, same, change = {}, [], [], []
    for number, ids in enumerate(documents):
        for i, token in enumerate(ids):
            window = max(0, math.ceil((i + 1 - room) / stride))  # the first that reaches the token
            context = [*bos, *ids[window * stride : i]]
            if not context:
                continue
            q, p = log_probabilities(model, context), log_probabilities(source, context)
            losses.setdefault((number, window), []).append(-q[token])
            divergences.append((np.exp(p) * (p - q)).sum())
            same.append(p.argmax() == q.argmax())
            change.append(np.exp(q[token]) - np.exp(p[token]))
    sums, counts = (np.array([f(v) for v in losses.values()], float) for f in (sum, len))
    mean, n = sums.sum() / counts.sum(), len(sums)
    error = math.sqrt(((sums - counts * mean) ** 2).sum() * n / (n - 1)) / counts.sum()
    return {
        "ppl": math.exp(mean),
        "ppl_stderr": math.exp(mean) * error,
        "kl_mean": np.mean(divergences),
        "kl_p90": np.sort(divergences)[math.ceil(0.9 * len(divergences)) - 1],
        "top1_agreement": np.mean(same),
        "p_change_rms": np.sqrt(np.mean(np.square(change))),
        "tokens": counts.sum(),
    }


@pytest.mark.parametrize(("bos", "ctx", "stride"), [([BOS], 16, None), ([BOS], 17, 5), ([], 16, None), ([], 9, 3)])
def test_figures_are_those_of_transformers(bos, ctx, stride, data_dir, tmp_path):
    source = data_dir / "checkpoints" / "stories260K"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(1 + 0.05 * torch.randn_like(value))
    model.save_pretrained(tmp_path)
    documents = [torch.randint(3, 512, (size,)).tolist() for size in (1, 16, 17, 40)]
    found = score(
        windows(bos, documents, ctx, stride), LLM(tmp_path, dtype="fp32").logits, LLM(source, dtype="fp32").logits
    )
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    expected = by_token(model, original, documents, bos, ctx, stride or ctx - len(bos))
    for name, value in expected.items():
        # both sum fp32 logits in fp64; the logits of two fp32 implementations differ by about 1e-6
        assert found[name] == pytest.approx(value, rel=2e-4), name


def test_command_on_text(data_dir, tmp_path, capsys):
    """The command's tokens are those of the published tokenizer, its perplexity that of whole stories."""
    source = data_dir / "checkpoints" / "stories260K"
    stories = (data_dir / "text" / "tinystories_sample_2MiB.txt").read_text().split(SEPARATOR)[:6]
    (tmp_path / "text.txt").write_text(SEPARATOR.join(stories))
    convert(source, tmp_path / "int8", bits=8)
    command = ["eval", str(tmp_path / "int8"), "--text", str(tmp_path / "text.txt"), "--separator", SEPARATOR]
    assert main([*command, "--against", str(source), "--dtype", "fp32", "--json", "--record"]) == 0
    found = json.loads(capsys.readouterr().out)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    rounded = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    rounded.lm_head.weight = torch.nn.Parameter(rounded.lm_head.weight.detach().clone())  # the folder has its own
    checkpoint = open_checkpoint(tmp_path / "int8")
    for module in checkpoint.modules_quantized:
        rounded.get_submodule(module).weight.data = dequantize(checkpoint.weight(module))
    loss = count = divergence = 0
    for story in stories:
        ids = torch.tensor([BOS, *tokenizer.encode(story.strip(), add_special_tokens=False)])
        for part in (ids[1:][start : start + 511] for start in range(0, len(ids) - 1, 511)):
            row = torch.cat((ids[:1], part))
            with torch.no_grad():
                logits = model(row[None]).logits[0, :-1].double()
                log_p, log_q = logits.log_softmax(-1), rounded(row[None]).logits[0, :-1].double().log_softmax(-1)
            divergence += float((log_p.exp() * (log_p - log_q)).sum())
            loss += float(torch.nn.functional.cross_entropy(logits, part, reduction="sum"))
            count += len(part)
    assert found["tokens"] == count
    assert found["against_ppl"] == pytest.approx(math.exp(loss / count), rel=1e-5)
    assert found["kl_mean"] == pytest.approx(divergence / count, rel=0.01)
    protocol = dict(ctx=512, stride=511, bos=True, documents=6, device="cpu", dtype="fp32", kv="auto")
    assert found["protocol"] == protocol | dict(activations=24, against_activations=24)
    assert main(["info", "-m", str(tmp_path / "int8")]) == 0
    shown = capsys.readouterr().out
    assert "mse" in shown
    assert f"perplexity {found['ppl']:.4f}" in shown
    assert main([*command[:-2], "--against", str(source)]) == 0
    assert "KL divergence" in capsys.readouterr().out
    for separator in ("ZZZ", ""):
        assert main([*command[:-1], separator]) == 1
        assert f"the separator {separator!r} is not in the text" in capsys.readouterr().err


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_every_byte_of_a_text_counts(mark, data_dir, tmp_path, capsys):
    """Line ends too, but not the mark that some editors put first; of a tokenizer, what it puts before a text alone."""
    source = tmp_path / "model"
    shutil.copytree(data_dir / "checkpoints" / "stories260K", source, copy_function=shutil.copyfile)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    around = [{"SpecialToken": {"id": name, "type_id": 0}} for name in ("<s>", "</s>")]
    pieces = {"<s>": [1], "</s>": [2]}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [around[0], {"Sequence": {"id": "A", "type_id": 0}}, around[1]],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": ids, "tokens": [name]} for name, ids in pieces.items()},
    }
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = b"Once upon a time,\r\nthere was a dog.\r\n"
    (tmp_path / "text.txt").write_bytes(mark + text)
    assert main(["eval", str(source), "--text", str(tmp_path / "text.txt"), "--dtype", "fp32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ids = PreTrainedTokenizerFast(tokenizer_file=str(source / "tokenizer.json"))(text.decode()).input_ids
    assert (ids[0], ids[-1]) == (1, 2)
    row = torch.tensor([ids[:-1]])
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        expected = math.exp(float(model(row, labels=row).loss))
    assert (found["tokens"], found["ppl"]) == (len(ids) - 2, pytest.approx(expected, rel=1e-4))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_8_bit_activations_cost(device, data_dir, tmp_path, capsys):
    """A folder against itself: a tenth at most of what int4 weights cost (on the CPU), and recorded beside that."""
    if device == "cuda" and not cuda.available()[0]:
        pytest.skip(f"no CUDA: {cuda.available()[1]}")
    demo = Path(__file__).parents[2] / "demo" / "stories-7m"
    if not demo.is_dir():
        pytest.skip("the demo checkpoint is not beside these tests")
    stories = (data_dir / "text" / "tinystories_sample_2MiB.txt").read_text().split(SEPARATOR)[-21:]
    (tmp_path / "text.txt").write_text(SEPARATOR.join(stories))
    folder = str(tmp_path / "int4")
    convert(demo, folder, bits=4, group_size=-1)
    command = ["eval", folder, "--text", str(tmp_path / "text.txt"), "--separator", SEPARATOR]

    def kl(*flags, device="cpu"):
        assert main([*command, *flags, "--device", device, "--record", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return found["kl_mean"], (found["protocol"]["activations"], found["protocol"]["against_activations"])

    rounding, bits = kl("--against", folder, "--activations", "8", "--dtype", "bf16", device=device)
    assert bits == (8, 16)
    weights, bits = kl("--against", str(demo), "--dtype", "fp32")
    assert bits == (24, 24)
    assert 0 < rounding <= weights / 10
    assert main(["info", "-m", folder]) == 0
    shown = capsys.readouterr().out
    assert f"KL {rounding:.3g} of 8 bits to 16 ({device})" in shown
    assert f"KL {weights:.3g} to {demo}" in shown
    assert kl("--against", folder, "--dtype", "fp32") == (0, (24, 24))


def test_what_cannot_be_measured_is_refused(data_dir, tmp_path):
    for sizes in ((1, 1), (8, 0), (8, 8)):
        with pytest.raises(RequestError, match="stride"):
            windows([BOS], [[5, 6]], *sizes)
    with pytest.raises(RequestError, match="no token"):
        windows([], [[5]], 8, None)
    source = data_dir / "checkpoints" / "stories260K"
    other = data_dir / "checkpoints" / "tinystories656K_bf16"
    (tmp_path / "text.txt").write_text("Once upon a time")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    for more in (
        ("--text", str(tmp_path / "bytes.txt")),
        ("--text", str(tmp_path / "text.txt"), "--against", str(other)),
        ("--text", str(tmp_path / "text.txt"), "--record"),
        ("--text", str(tmp_path / "missing.txt")),
    ):
        assert main(["eval", str(source), *more]) == 1


def test_one_window_has_no_standard_error(data_dir, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("Once upon a time there was a dog.")
    command = ["eval", str(data_dir / "checkpoints" / "stories260K"), "--text", str(tmp_path / "text.txt")]
    assert main([*command, "--json", "--device", "cpu"]) == 0
    figures = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert figures["windows"] == 1
    assert "ppl_stderr" not in figures
    assert main([*command, "--device", "cpu"]) == 0
    assert "no standard error" in capsys.readouterr().out
