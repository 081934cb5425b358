"""`target_kl`: what is promoted, that the target holds on text that nothing saw, and what is said where it cannot."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nibblelm import LLM, convert
from nibblelm.checkpoint import open_checkpoint
from nibblelm.cli import main
from nibblelm.converter import target
from nibblelm.converter.target import Group, choose, rules
from nibblelm.errors import ConvertError
from nibblelm.evaluation import Window

TARGET = 0.05


@pytest.fixture(scope="module")
def texts(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A file to calibrate with, and later stories."""
    text = (data_dir / "text" / "tinystories_sample_2MiB.txt").read_text()
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text(text[:400_000])
    return path, text[-40_000:]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "rotated"])
def made(
    data_dir: Path,
    texts: tuple[Path, str],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> tuple[Path, Path]:
    source, folder = data_dir / "checkpoints" / "stories260K", tmp_path_factory.mktemp("made") / "model"
    convert(source, folder, target_kl=TARGET, calibration=texts[0], rotate=request.param)
    return source, folder


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_target_holds_on_unseen_text(made: tuple[Path, Path], texts: tuple[Path, str]) -> None:
    """Against transformers' logits of the source."""
    source, folder = made
    record = json.loads((folder / "nibblelm.json").read_text())["target"]
    assert record["reached"]
    assert 0.5 * TARGET < record["kl"] <= TARGET
    llm, reference = LLM(folder, "cpu", "fp32"), AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(texts[1])
    total = count = 0.0
    with torch.inference_mode():
        for window in (ids[at : at + 256] for at in range(0, len(ids), 256)):
            p, q = (
                x.double().log_softmax(-1) for x in (reference(torch.tensor([window])).logits[0], llm.logits(window))
            )
            total += float((p.exp() * (p - q)).sum())
            count += len(window)
    assert total / count <= 1.2 * TARGET


def test_what_runs_together_stays_together(made: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = made
    promoted = json.loads((folder / "nibblelm.json").read_text())["target"]["promoted"]
    assert promoted
    schemes = open_checkpoint(folder).quantization
    assert schemes is not None
    for layer in range(5):
        for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            assert len({schemes.scheme(f"model.layers.{layer}.{name}") for name in names}) == 1
    assert main(["info", "-m", str(folder)]) == 0
    assert "not fused" not in capsys.readouterr().out


def test_repeatable(made: tuple[Path, Path], texts: tuple[Path, str], tmp_path: Path) -> None:
    source, folder = made
    rotate = json.loads((folder / "nibblelm.json").read_text())["options"]["rotate"]
    convert(source, tmp_path / "again", target_kl=TARGET, calibration=texts[0], rotate=rotate)
    assert digests(tmp_path / "again") == digests(folder)


def test_groups_of_a_rotated_model_are_measured_beside_the_source(
    data_dir: Path, texts: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """stories260K ties its head to the table, which rotation takes apart."""
    source = data_dir / "checkpoints" / "stories260K"
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    errors: list[float] = []

    def score(pieces: list[Window], logits: object, exact: Callable[[list[int]], torch.Tensor]) -> dict[str, float]:
        for piece in pieces:
            with torch.inference_mode():
                want = reference(torch.tensor([piece.ids])).logits[0]
            errors.append(float((exact(piece.ids) - want).norm() / want.norm()))
        raise KeyboardInterrupt

    monkeypatch.setattr(target, "score", score)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", target_kl=TARGET, calibration=texts[0], rotate=True)
    assert max(errors) <= 1e-5  # what README promises of a rotated model


def test_what_cannot_be_reached_is_said(
    made: tuple[Path, Path],
    texts: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(target, "PIECES", 4)
    source, folder = made
    size = sum(open_checkpoint(folder).info(name).nbytes for name in open_checkpoint(folder).names()) - 20_000
    command = ["convert", str(source), str(tmp_path / "small"), "--calibration", str(texts[0])]
    assert main([*command, "--target-kl", "0.0005", "--max-size", str(size)]) == 0
    out = capsys.readouterr().err
    assert "NOT reached, this is the best" in out
    assert "promoted to" in out
    written = open_checkpoint(tmp_path / "small")
    assert sum(written.info(name).nbytes for name in written.names()) <= size
    assert main([*command, "--overwrite", "--target-kl", "0.0005", "--max-size", "1KB"]) == 1
    assert "the smallest conversion found takes" in capsys.readouterr().err


def test_the_best_bytes_first() -> None:
    levels = [(4, -1), (4, 32), (8, -1)]
    cheap = Group(("a.q", "a.k"), levels, [100, 110, 200], [0.4, 0.2, 0.0])
    dear = Group(("b",), levels, [1000, 1100, 2000], [0.5, 0.3, 0.0])
    assert choose([cheap, dear], 1.0, None) == (0, 0)
    assert choose([cheap, dear], 0.75, None) == (1, 0)
    assert choose([cheap, dear], 0.45, None) == (2, 1)
    assert choose([cheap, dear], 0.0, None) == (2, 2)
    assert choose([cheap, dear], 0.0, 1205) == (2, 0)
    assert rules([cheap, dear], (2, 0)) == (r"^a\.q$=8:-1", r"^a\.k$=8:-1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(target_kl=0.0), "positive number"),
        (dict(target_kl=float("nan")), "positive number"),
        (dict(target_kl=0.1, bits=8), "leave out bits"),
        (dict(target_kl=0.1, keep=["q_proj=8"]), "leave out bits"),
        (dict(target_kl=0.1, max_size="big"), "max_size must be"),
        (dict(max_size="1GB"), "give a target_kl"),
    ],
)
def test_options_that_leave_nothing_to_choose(data_dir: Path, tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        convert(data_dir / "checkpoints" / "stories260K", tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())
