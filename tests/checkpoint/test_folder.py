"""Folders: config first, single and sharded weights, links, pickles, the hub's cache."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from nibblelm.checkpoint import Checkpoint, open_checkpoint, resolve
from nibblelm.errors import CheckpointError, ConfigError

INDEX = "model.safetensors.index.json"
TENSORS = {f"t{i}.weight": torch.full((i, 3), float(i)) for i in range(1, 6)}
SHARDS = {
    "model-1.safetensors": ["t1.weight", "t2.weight"],
    "model-2.safetensors": ["t3.weight", "t4.weight", "t5.weight"],
}


def single(folder: Path, config: Any = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(TENSORS, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    return folder


def sharded(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for shard, names in SHARDS.items():
        save_file({name: TENSORS[name] for name in names}, folder / shard)
    (folder / "config.json").write_text('{"model_type": "llama", "auto_map": {"AutoModel": "evil.Model"}}')
    write_index(folder, {name: shard for shard, names in SHARDS.items() for name in names})
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


@pytest.mark.parametrize("build", [single, sharded])
def test_reads_tensors_by_name(build: Any, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(build(tmp_path / "m")))
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation_config == {}
    assert checkpoint.quantization is None
    assert checkpoint.modules_quantized == []
    assert sorted(checkpoint.names()) == sorted(TENSORS)
    assert "t3.weight" in checkpoint
    assert "t3" not in checkpoint
    for name, expected in TENSORS.items():
        assert torch.equal(checkpoint.tensor(name), expected)
        assert checkpoint.info(name).shape == tuple(expected.shape)
        weight = checkpoint.weight(name.removesuffix(".weight"))
        assert isinstance(weight, torch.Tensor)
        assert torch.equal(weight, expected)
    assert torch.equal(checkpoint.rows("t5.weight", 1, 3), TENSORS["t5.weight"][1:3])
    checkpoint.release("t5.weight")
    with pytest.raises(CheckpointError, match=r"no tensor 't9.weight'"):
        checkpoint.weight("t9")


def test_config_is_read_before_any_weight(tmp_path: Path) -> None:
    folder = single(tmp_path)
    (folder / "model.safetensors").write_bytes(b"damaged beyond recognition")
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    checkpoint = Checkpoint(folder)
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config == {"temperature": 0.5}
    with pytest.raises(CheckpointError, match="claims a header"):
        checkpoint.names()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[1]", "JSON list"),
        (b'{"a": 1, "a": 2}', "'a' is given twice"),
        (b'{"a": "\xff"}', "codec can't decode"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[" * 100_000, "too deeply"),
        (b"{}" + b" " * (32 << 20), "at most 33554432 are read"),
        (b'{"quantization_config": 4}', "must be an object"),
    ],
)
def test_malformed_config(text: bytes, message: str, tmp_path: Path) -> None:
    (single(tmp_path) / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        Checkpoint(tmp_path)


def test_missing_config_and_missing_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "adapter.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor .*adapter\.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_refused_with_the_way_to_convert_them(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=f"{name}.*refused.*save_pretrained"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "shard",
    [
        *("../model-1.safetensors", "/etc/model-1.safetensors", "sub/model-1.safetensors", "sub\\model-1.safetensors"),
        *("C:model-1.safetensors", "\0.safetensors", "..", "", ".", "model-1.bin", 3, None, ["model-1.safetensors"]),
        *("\ud800.safetensors", "x" * 5000 + ".safetensors"),
    ],
)
def test_shard_names_are_bare_safetensors_names(shard: Any, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model-1.safetensors")
    folder = sharded(tmp_path / "m")
    write_index(folder, {"t1.weight": shard})
    with pytest.raises(CheckpointError):
        Checkpoint(folder).names()


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    good = {name: shard for shard, names in SHARDS.items() for name in names}
    for weight_map, message in [
        ({}, "must be a filled object"),
        ([], "must be a filled object"),
        ({**good, "t6.weight": "model-1.safetensors"}, "not in the shard it names: 't6.weight'"),
        ({**good, "t1.weight": "model-2.safetensors"}, "not in the shard it names: 't1.weight'"),
        ({**good, "t6.weight": "model-3.safetensors"}, "missing: 'model-3.safetensors'"),
        ({k: v for k, v in good.items() if k != "t5.weight"}, "not where the index says: 't5.weight'"),
    ]:
        write_index(folder, weight_map)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(folder).names()
    write_index(folder, good)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing: 'model-2\.safetensors'"):
        Checkpoint(folder).names()


def test_links_may_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    outside = single(tmp_path / "outside")
    folder = single(tmp_path / "m")
    for name in ("model.safetensors", "config.json"):
        kept = (folder / name).rename(folder / f"kept_{name}")
        (folder / name).symlink_to(outside / name)
        with pytest.raises(CheckpointError, match="leads out of the folder"):
            Checkpoint(folder).names()
        (folder / name).unlink()
        (folder / name).symlink_to(kept.name)
        assert len(Checkpoint(folder).names()) == len(TENSORS), "a link within the folder is fine"
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")
    with pytest.raises((CheckpointError, ConfigError)):
        Checkpoint(folder)
    (tmp_path / "link").symlink_to(outside)
    assert len(Checkpoint(tmp_path / "link").names()) == len(TENSORS), "a link to the whole folder is fine"
    for name in ("..", "", "a/b", "/etc/passwd"):
        with pytest.raises(CheckpointError, match="not a bare file name"):
            Checkpoint(outside).file(name)


REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up hub cache that holds "org/tiny", with the network switched off."""
    from huggingface_hub import constants

    root = tmp_path / "hub"
    model = root / "models--org--tiny"
    source = sharded(tmp_path / "source")
    snapshot = model / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (model / "blobs").mkdir()
    for index, path in enumerate(sorted(source.iterdir())):
        path.rename(model / "blobs" / f"{index:040x}")
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / f"{index:040x}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(REVISION)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return root


@pytest.mark.parametrize("revision", [None, "main", REVISION])
def test_hub_id_out_of_the_cache(revision: str | None, cache: Path) -> None:
    folder = resolve("org/tiny", revision)
    assert folder == cache / "models--org--tiny" / "snapshots" / REVISION
    checkpoint = open_checkpoint("org/tiny", revision)
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in TENSORS.items())


def test_a_snapshot_may_not_link_out_of_its_model(cache: Path) -> None:
    folder = resolve("org/tiny")
    secret = single(cache / "models--org--other") / "model.safetensors"
    (folder / "model-1.safetensors").unlink()
    (folder / "model-1.safetensors").symlink_to(secret)
    with pytest.raises(CheckpointError, match="leads out of the folder"):
        Checkpoint(folder).names()


@pytest.mark.usefixtures("cache")
def test_what_cannot_be_resolved(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file"):
        resolve(tmp_path / "file")
    with pytest.raises(CheckpointError, match="cannot be fetched"):
        resolve("org/absent")
    with pytest.raises(CheckpointError, match="cannot be fetched"):
        resolve("org/tiny", "no-such-branch")
    with pytest.raises(CheckpointError, match="which has no revision 'main'"):
        resolve(tmp_path, "main")
    for source in ("/no/such/folder", "./x", "../org/tiny", "a/b/c", "", "a\0b", "x" * 5000, tmp_path / "absent"):
        with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
            resolve(source)


def test_an_unreadable_file_is_a_typed_error(tmp_path: Path) -> None:
    folder = single(tmp_path)
    (folder / "model.safetensors").chmod(0)
    if os.access(folder / "model.safetensors", os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(CheckpointError, match="cannot read"):
        Checkpoint(folder).names()


def test_importing_the_reader_does_not_import_heavy_libraries() -> None:
    import subprocess
    import sys

    code = (
        "import nibblelm.checkpoint, sys; print([m for m in ('transformers', 'huggingface_hub') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_what_others_make_is_named(tmp_path: Path) -> None:
    for name, text in (("adapter_config.json", "is an adapter: merge it"), ("model-Q4_0.gguf", "is for llama.cpp")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("{}")
        with pytest.raises(ConfigError, match=text):
            Checkpoint(folder)
        (folder / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(CheckpointError, match=text):
            Checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"is a GGUF file, for llama\.cpp"):
        resolve(tmp_path / "model-Q4_0.gguf" / "model-Q4_0.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match="is a pointer of Git LFS"):
        Checkpoint(tmp_path).names()


@pytest.mark.parametrize("source", [None, 3, b"folder"])
def test_what_is_no_path_is_named(source: Any) -> None:
    with pytest.raises(CheckpointError, match=r"the model is .*; supported: the path of a folder, or a hub id"):
        open_checkpoint(source)
