"""Interrupted conversions: nothing that looks finished is left, and resuming gives the same bytes."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

from nibblelm import convert
from nibblelm.checkpoint import SafetensorsFile, journal, writer
from nibblelm.checkpoint.work_folder import WorkFolder
from nibblelm.converter.source import SourceHashes
from nibblelm.errors import ConvertError

WORK = ".out.partial"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Interrupted(Exception):
    pass


def interrupt(source, out, after: int, **options):
    """Convert until `after` blocks are done, then fail as Ctrl-C does."""
    calls = 0

    def progress(*_):
        nonlocal calls
        calls += 1
        if calls > after:
            raise Interrupted

    with pytest.raises(Interrupted):
        convert(source, out, progress=progress, **options)


def test_killed_anywhere_and_resumed(save, tmp_path):
    small = save("llama", num_hidden_layers=1, name="small")
    large = save("llama", hidden_size=768, intermediate_size=2048, num_hidden_layers=2, name="large")
    script = Path(__file__).with_name("killed_conversions.py")
    command = [sys.executable, str(script), str(small), str(large), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert result.returncode == 0, result.stderr
    counts = json.loads(result.stdout)
    assert counts["events"] > 30  # 12 units, and every file of the folder more than once
    assert counts["overwriting"] >= counts["events"]


def test_resume_goes_on_from_the_last_finished_tensor(save, tmp_path):
    source = save("qwen3")
    convert(source, tmp_path / "whole", max_shard_size=60_000)
    interrupt(source, tmp_path / "out", after=9, max_shard_size=60_000)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / WORK).is_dir()
    seen = []
    report = convert(
        source,
        tmp_path / "out",
        max_shard_size=60_000,
        resume=True,
        progress=lambda done, total, name: seen.append(done),
    )
    assert report.reused_tensors == 9
    assert seen[-1] == report.source_bytes
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / WORK).exists()


def test_damaged_work_is_done_again(save, tmp_path):
    source = save("llama")
    convert(source, tmp_path / "whole")
    interrupt(source, tmp_path / "out", after=9)
    with (tmp_path / WORK / "model.safetensors").open("r+b") as file:
        file.seek(-331 * 64 * 2, os.SEEK_END)  # inside the embedding table, the first unit, which comes last as 16-bit
        file.write(b"power cut")
    with (tmp_path / WORK / "journal.jsonl").open("ab") as file:
        file.write(b'{"unit": "model.layers.1')
    assert convert(source, tmp_path / "out", resume=True).reused_tensors == 8
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_resume_with_other_options_or_source_is_refused(save, tmp_path):
    source = save("llama")
    interrupt(source, tmp_path / "out", after=9)
    for options in (dict(bits=8), dict(symmetric=True), dict(keep=["down=8"]), dict(max_shard_size=50_000)):
        with pytest.raises(ConvertError, match=r"other (options|layout)"):
            convert(source, tmp_path / "out", resume=True, **options)
    path = source / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ConvertError, match="other source"):
        convert(source, tmp_path / "out", resume=True)
    convert(source, tmp_path / "out", overwrite=True)
    convert(source, tmp_path / "fresh")
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def rewrite(path: Path, name: str) -> None:
    """Change one byte of a tensor and nothing that `stat` shows."""
    stat, info = path.stat(), SafetensorsFile(path).info(name)
    with path.open("r+b") as file:
        file.seek(info.offset)
        first = file.read(1)
        file.seek(info.offset)
        file.write(bytes([first[0] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_a_source_changed_behind_size_and_time_is_refused(rotate, name, save, tmp_path):
    """Both before an interrupted conversion is resumed, and while one runs."""
    source = save("llama")
    interrupt(source, tmp_path / "out", after=9, rotate=rotate)
    rewrite(source / "model.safetensors", name)
    with pytest.raises(ConvertError, match=rf"the source changed .*{name}.*--overwrite"):
        convert(source, tmp_path / "out", resume=True, rotate=rotate)
    assert not (tmp_path / "out").exists()
    convert(source, tmp_path / "out", overwrite=True, rotate=rotate)
    convert(source, tmp_path / "fresh", rotate=rotate)
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")


def test_a_source_changed_while_it_is_converted_is_refused(save, tmp_path, monkeypatch):
    source = save("llama")
    hashed = SourceHashes._hash
    table = "model.embed_tokens.weight"  # the first to be read; what is hashed is changed after that
    read = Event()

    def late(self, path, infos):
        assert read.wait(600)
        rewrite(path, table)
        return hashed(self, path, infos)

    monkeypatch.setattr(SourceHashes, "_hash", late)
    with pytest.raises(ConvertError, match=rf"the source changed .*{table}"):
        convert(source, tmp_path / "out", progress=lambda *_: read.set())
    assert not (tmp_path / "out").exists()


def test_resume_with_another_config_is_refused(save, tmp_path):
    """Of the same size and time, as a copy that keeps times has it."""
    source = save("llama")
    interrupt(source, tmp_path / "out", after=9)
    path = source / "config.json"
    stat, text = path.stat(), path.read_text()
    path.write_text(text.replace('"max_position_embeddings": 2048', '"max_position_embeddings": 4096'))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    assert path.read_text() != text
    with pytest.raises(ConvertError, match="other config"):
        convert(source, tmp_path / "out", resume=True)


def test_unfinished_work_is_not_thrown_away_silently(save, tmp_path):
    source = save("llama")
    interrupt(source, tmp_path / "out", after=9)
    with pytest.raises(ConvertError, match="--resume, or start again with --overwrite"):
        convert(source, tmp_path / "out")
    assert convert(source, tmp_path / "out", resume=True).reused_tensors == 9


def test_without_a_finished_tensor_nothing_is_left(save, tmp_path):
    source = save("llama")
    interrupt(source, tmp_path / "out", after=0)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_resume_without_work_starts_from_the_beginning(save, tmp_path):
    assert convert(save("llama"), tmp_path / "out", resume=True).reused_tensors == 0


def test_a_folder_is_held_from_its_making(tmp_path):
    """Before its journal has a line: another conversion neither takes it nor, when refused, takes it away."""
    (tmp_path / "source").mkdir()
    work = WorkFolder(tmp_path / "out", tmp_path / "source", resume=False, overwrite=False, needed=0)
    for options in (dict(resume=False, overwrite=False), dict(resume=False, overwrite=True)):
        with pytest.raises(ConvertError, match="another conversion is running"):
            WorkFolder(tmp_path / "out", tmp_path / "source", needed=0, **options)
    with work:
        assert (tmp_path / WORK / journal.NAME).is_file()
    assert not (tmp_path / WORK).exists()


def test_a_journal_that_leads_nowhere(tmp_path):
    """It cannot be opened however often that is tried."""
    (tmp_path / WORK).mkdir()
    (tmp_path / WORK / journal.NAME).symlink_to(tmp_path / "gone" / "journal")
    with pytest.raises(ConvertError, match="remove it"):
        WorkFolder(tmp_path / "out", tmp_path, resume=True, overwrite=False, needed=0)


def test_two_conversions_to_one_folder(save, tmp_path):
    source = save("llama")

    def second(done, total, name):
        for options in ({}, dict(resume=True), dict(overwrite=True)):
            with pytest.raises(ConvertError, match="another conversion is running"):
                convert(source, tmp_path / "out", **options)

    convert(source, tmp_path / "out", progress=second)
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(("module", "call", "room"), [(writer, "pwrite", 120_000), (journal, "write", 2_500)])
def test_disk_full_keeps_what_is_finished(module, call, room, save, tmp_path, monkeypatch):
    """The disk fills up under the weights, or under the journal; the last write is cut short, as systems do."""
    source = save("llama")
    convert(source, tmp_path / "whole")
    write, left = getattr(os, call), room

    def nearly_full(descriptor, data, *position):
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(descriptor, data[:left], *position)
        left -= count
        return count

    monkeypatch.setattr(module.os, call, nearly_full)
    with pytest.raises(ConvertError, match=r"no space left while writing .*free some space and run .* --resume"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert convert(source, tmp_path / "out", resume=True).reused_tensors > 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
