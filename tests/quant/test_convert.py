"""What the converter decides: schemes, tied embeddings, shards, companions, and clear refusals."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from nibblelm import convert
from nibblelm.checkpoint import Scheme, open_checkpoint
from nibblelm.converter import source as source_reader
from nibblelm.errors import CheckpointError, ConfigError, ConvertError, RequestError
from nibblelm.ops.reference import dequantize
from nibblelm.ops.types import QuantizedWeight
from nibblelm.sizes import parse_size

TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def schemes(folder):
    """Module -> Scheme as a reader of the folder finds it."""
    checkpoint = open_checkpoint(folder)
    assert checkpoint.quantization is not None
    return {module: checkpoint.quantization.scheme(module) for module in checkpoint.modules_quantized}


def read_config(folder):
    return json.loads((folder / "config.json").read_text())


def edit(folder, change):
    """Apply `change` to the state dict of a single-file checkpoint."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file({name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors")


def test_defaults(save, tmp_path):
    source = save("qwen3", hidden_size=256, intermediate_size=384, head_dim=64)
    assert set(schemes(convert_to(source, tmp_path / "four")).values()) == {Scheme(4, 128, False), Scheme(8, -1, False)}
    assert schemes(tmp_path / "four")["lm_head"] == Scheme(8, -1, False)
    assert set(schemes(convert_to(source, tmp_path / "eight", bits=8)).values()) == {Scheme(8, -1, False)}


def convert_to(source, folder, **options):
    convert(source, folder, **options)
    return folder


def test_group_that_does_not_divide_falls_back(save, tmp_path):
    source = save("mistral", hidden_size=128, intermediate_size=208, head_dim=24)  # o_proj: K = 96
    report = convert(source, tmp_path / "out", bits=4, group_size=128)
    found = schemes(tmp_path / "out")
    assert found["model.layers.0.self_attn.q_proj"] == Scheme(4, 128, False)
    assert found["model.layers.0.self_attn.o_proj"] == Scheme(4, 32, False)
    assert found["model.layers.0.mlp.down_proj"] == Scheme(4, -1, False)
    groups = read_config(tmp_path / "out")["quantization_config"]["config_groups"]
    assert len(groups) == 4  # these three and the head
    assert any("208 columns" in note and "one scale per row" in note for note in report.notes)
    assert any("96 columns" in note and "groups of 32" in note for note in report.notes)
    record = json.loads((tmp_path / "out" / "nibblelm.json").read_text())
    assert record["notes"] == report.notes
    assert record["tensors"]["model.layers.1.mlp.down_proj"]["group_size"] == -1


def test_keep_rules_the_last_match_wins(save, tmp_path):
    source = save("llama")
    keep = ["layers=8", r"\.v_proj=16", r"layers\.1\.self_attn\.v_proj=4", "lm_head=16", r"layers\.1\..*o_proj=4:-1"]
    convert(source, tmp_path / "out", bits=4, group_size=32, keep=keep)
    found = schemes(tmp_path / "out")
    assert "model.layers.0.self_attn.v_proj" not in found
    assert "lm_head" not in found
    assert found["model.layers.1.self_attn.v_proj"] == Scheme(4, 32, False)
    assert found["model.layers.1.self_attn.q_proj"] == Scheme(8, -1, False)
    assert found["model.layers.1.self_attn.o_proj"] == Scheme(4, -1, False)
    ignore = read_config(tmp_path / "out")["quantization_config"]["ignore"]
    assert set(ignore) == {"model.layers.0.self_attn.v_proj", "lm_head"}
    before = load_file(source / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    for name in (HEAD, "model.layers.0.self_attn.v_proj.weight", TABLE, "model.norm.weight"):
        assert torch.equal(before[name], after[name])


@pytest.mark.parametrize(
    "rule", ["down_proj", "down_proj=5", "(=4", "embed_tokens=8", "nothing=8", "=x", "o=4:7", "o=16:32", "o=4:"]
)
def test_keep_rules_that_mean_nothing_are_refused(rule, save, tmp_path):
    with pytest.raises(ConvertError, match="keep rule"):
        convert(save("llama"), tmp_path / "out", keep=[rule])
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_all_modules_kept_gives_a_plain_checkpoint(save, tmp_path):
    source = save("llama")
    convert(source, tmp_path / "out", keep=[".=16"])
    assert "quantization_config" not in read_config(tmp_path / "out")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


class TestTied:
    """Where the head and the embedding come from in each of the four cases."""

    def head(self, folder):
        weight = open_checkpoint(folder).weight("lm_head")
        assert isinstance(weight, QuantizedWeight)
        assert (weight.bits, weight.group_size) == (8, -1)
        assert read_config(folder)["tie_word_embeddings"] is False
        return dequantize(weight)

    def near(self, head, table):
        step = table.float().aminmax(dim=1)
        allowed = (step.max.clamp(min=0) - step.min.clamp(max=0)) / 255 * 1.02
        assert bool(((head - table.float()).abs() <= allowed.unsqueeze(1)).all())

    def test_tied_without_head(self, save, tmp_path):
        source = save("llama", tie_word_embeddings=True)
        table = load_file(source / "model.safetensors")[TABLE]
        out = convert_to(source, tmp_path / "out")
        self.near(self.head(out), table)
        assert torch.equal(load_file(out / "model.safetensors")[TABLE], table)

    @pytest.mark.parametrize("same", [True, False])
    def test_tied_with_head_shipped(self, same, save, tmp_path):
        source = save("llama", tie_word_embeddings=True)
        edit(source, lambda state: state.update({HEAD: state[TABLE].clone() if same else state[TABLE].flip(0)}))
        shipped = load_file(source / "model.safetensors")
        out = convert_to(source, tmp_path / "out")
        self.near(self.head(out), shipped[HEAD])  # transformers does not tie two that differ
        assert torch.equal(load_file(out / "model.safetensors")[TABLE], shipped[TABLE])
        if same:
            convert(source, tmp_path / "tied", keep_tied=True)
            assert HEAD not in load_file(tmp_path / "tied" / "model.safetensors")
        else:
            with pytest.raises(ConvertError, match="differ"):
                convert(source, tmp_path / "tied", keep_tied=True)

    @pytest.mark.parametrize("keep_tied", [True, False])
    def test_only_head_shipped(self, keep_tied, save, tmp_path):
        source = save("llama", tie_word_embeddings=True)
        edit(source, lambda state: state.update({HEAD: state.pop(TABLE)}))
        table = load_file(source / "model.safetensors")[HEAD]
        out = convert_to(source, tmp_path / "out", keep_tied=keep_tied)
        assert torch.equal(load_file(out / "model.safetensors")[TABLE], table)
        if keep_tied:
            assert read_config(out)["tie_word_embeddings"] is True
        else:
            self.near(self.head(out), table)

    @pytest.mark.parametrize("keep_tied", [True, False])
    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            (HEAD, lambda table: table[:100], r"lm_head.weight has shape \[100, "),
            (HEAD, lambda table: table[0, 0], r"lm_head.weight has shape \[\]"),
            ("lm_head.bias", lambda table: table[:, 0], "unexpected: 'lm_head.bias'"),
            ("lm_head.weight_scale", lambda table: table[:, :1], "missing: 'lm_head.weight_packed'"),
        ],
    )
    def test_what_else_a_tied_folder_may_hold(self, name, change, message, keep_tied, save, tmp_path):
        source = save("llama", tie_word_embeddings=True)
        edit(source, lambda state: state.update({name: change(state[TABLE]).clone()}))
        with pytest.raises(CheckpointError, match=message):
            convert(source, tmp_path / "out", keep_tied=keep_tied)

    @pytest.mark.parametrize("tied", [True, False])
    def test_the_last_rule_wins_by_either_name(self, tied, save, tmp_path):
        source = save("gpt_neox", tie_word_embeddings=tied)
        for keep in (["embed_out=8", "lm_head=4"], ["lm_head=8", "embed_out=4"], [".=8", "lm_head=4"]):
            out = convert_to(source, tmp_path / keep[0], keep=keep)
            assert schemes(out)["embed_out"].bits == 4
        out = convert_to(source, tmp_path / "full", keep=["embed_out=16"])
        assert ("embed_out.weight" in load_file(out / "model.safetensors")) is not tied

    def test_untied(self, save, tmp_path):
        source = save("llama", tie_word_embeddings=False)
        self.near(self.head(convert_to(source, tmp_path / "out")), load_file(source / "model.safetensors")[HEAD])

    def test_full_head_of_a_tied_model_stays_tied(self, save, tmp_path):
        out = convert_to(save("llama", tie_word_embeddings=True), tmp_path / "out", keep=["lm_head=16"])
        assert read_config(out)["tie_word_embeddings"] is True
        assert HEAD not in load_file(out / "model.safetensors")


@pytest.mark.parametrize(("bits", "scheme"), [(8, Scheme(8, -1, False)), (4, Scheme(4, 64, False))])
def test_quantized_embeddings(bits, scheme, save, tmp_path):
    source = save("llama", tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="transformers cannot open"):
        convert(source, tmp_path / "out", embeddings=bits)
    weight = open_checkpoint(tmp_path / "out").weight("model.embed_tokens")
    assert isinstance(weight, QuantizedWeight)
    assert schemes(tmp_path / "out")["model.embed_tokens"] == scheme
    table = load_file(source / "model.safetensors")[TABLE].float()
    error = (dequantize(weight) - table).norm() / table.norm()
    assert error < {8: 0.01, 4: 0.11}[bits]
    with pytest.raises(ConvertError, match="keep_tied"):
        convert(source, tmp_path / "other", embeddings=bits, keep_tied=True)


def test_shards_index_and_sharded_source(save, tmp_path):
    source = save("qwen2")
    whole = load_file(convert_to(source, tmp_path / "whole") / "model.safetensors")
    report = convert(source, tmp_path / "parts", max_shard_size="40KB")
    names = sorted(path.name for path in (tmp_path / "parts").glob("*.safetensors"))
    assert names == report.files == [f"model-{i:05}-of-{len(names):05}.safetensors" for i in range(1, len(names) + 1)]
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    parts = {name: load_file(tmp_path / "parts" / name) for name in names}
    assert index["weight_map"] == {tensor: name for name, shard in parts.items() for tensor in shard}
    assert index["metadata"]["total_size"] == report.output_bytes
    merged = {tensor: value for shard in parts.values() for tensor, value in shard.items()}
    assert merged.keys() == whole.keys()
    assert all(torch.equal(merged[name], whole[name]) for name in whole)
    for name, shard in parts.items():  # one module's tensors stay together; only a lone unit may exceed the limit
        modules = {tensor.partition(".weight")[0] for tensor in shard}
        assert sum(v.numel() * v.element_size() for v in shard.values()) <= 40_000 or len(modules) == 1, name
    # A sharded source gives the same bytes as the single file it was split from.
    again = tmp_path / "again"
    full = tmp_path / "full-parts"
    convert(source, full, keep=[".=16"], max_shard_size=50_000)
    convert(full, again)
    assert (again / "model.safetensors").read_bytes() == (tmp_path / "whole" / "model.safetensors").read_bytes()


def test_companions_are_copied_and_nothing_else(save, tmp_path):
    source = save("llama")
    for name in ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "LICENSE", "README.md", "merges.txt"):
        (source / name).write_text(name)
    for name in ("modeling.py", "pytorch_model.bin", "training_args.pt", "pytorch_model.bin.index.json", ".hidden"):
        (source / name).write_text(name)
    (source / "folder").mkdir()
    report = convert(source, tmp_path / "out")
    copied = {"tokenizer.json", "tokenizer.model", "chat_template.jinja", "LICENSE", "README.md", "merges.txt"}
    written = {"config.json", "nibblelm.json", "generation_config.json", *report.files}
    assert {path.name for path in (tmp_path / "out").iterdir()} == copied | written
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert all((tmp_path / "out" / name).read_text() == name for name in copied)
    kept = {k: v for k, v in read_config(tmp_path / "out").items() if k != "quantization_config"}
    assert kept == read_config(source)


def test_source_in_a_hub_cache_is_a_folder_of_links(save, tmp_path):
    source = save("llama", name="plain")
    (source / "tokenizer.json").write_text("{}")
    cache = tmp_path / "models--org--name"
    snapshot, blobs = cache / "snapshots" / "0123abcd", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, blobs / f"sha-{path.name}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"sha-{path.name}")
    convert(snapshot, tmp_path / "from-cache")
    convert(source, tmp_path / "from-folder")
    for path in (tmp_path / "from-folder").iterdir():
        copy = tmp_path / "from-cache" / path.name
        assert not copy.is_symlink()
        assert copy.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE"])
def test_a_link_out_of_the_folder_is_refused_before_any_work(name, save, tmp_path):
    source = save("llama")
    (tmp_path / "secret").write_text("{}")
    (source / name).symlink_to(tmp_path / "secret")
    calls = []
    with pytest.raises(CheckpointError, match=rf"{name} is a link that leads out of the folder"):
        convert(source, tmp_path / "out", progress=lambda *call: calls.append(call))
    assert not calls
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret", "source"]


def test_record(save, tmp_path):
    source = save("llama")
    report = convert(source, tmp_path / "out", bits=4, group_size=32)
    record = json.loads((tmp_path / "out" / "nibblelm.json").read_text())
    data = (source / "model.safetensors").read_bytes()
    assert record["source"] == {"model.safetensors": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    before = load_file(source / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path / "out")
    assert record["tensors"].keys() == set(checkpoint.modules_quantized)
    for module, entry in record["tensors"].items():
        original = before[f"{module}.weight"].double()
        error = (dequantize(checkpoint.weight(module)).double() - original).norm() / original.norm()
        assert entry["relative_error"] == pytest.approx(float(error), rel=1e-5)
    stored = sum(checkpoint.info(name).nbytes for name in checkpoint.names())
    count = sum(value.numel() for value in before.values())
    assert record["bits_per_weight"] == report.bits_per_weight == pytest.approx(8 * stored / count)
    worst = report.worst_per_layer()
    assert [w.module.partition(".self")[0].partition(".mlp")[0] for w in worst][-1] == "lm_head"
    assert len(worst) == 3
    assert worst[0].relative_error == max(tensor.relative_error for tensor in report.tensors)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(bits=3), "bits must be one of 4, 8"),
        (dict(bits=True), "bits must be"),
        (dict(group_size=16), "group_size must be one of"),
        (dict(method="best"), "method must be one of minmax, mse"),
        (dict(embeddings=16), "embeddings must be"),
        (dict(max_shard_size="many"), "max_shard_size"),
        (dict(max_shard_size=0), "max_shard_size"),
        (dict(group_size=32.0), "group_size must be one of"),
        (dict(symmetric="no"), "symmetric is 'no'"),
        (dict(rotate=1), "rotate is 1"),
        (dict(seed=1.5, rotate=True), "seed is 1.5"),
        (dict(samples="3", method="gptq"), "samples is '3'"),
        (dict(samples=3), "samples are for gptq, awq; method mse takes none"),
        (dict(seed=0), "method mse draws nothing; a seed"),
        (dict(threads=0), "threads is 0"),
        (dict(threads="2"), "threads is '2'"),
        (dict(device="foo"), "device 'foo' is not supported"),
    ],
)
def test_options_out_of_range(options, message, save, tmp_path):
    source = save("llama")
    with pytest.raises((ConvertError, RequestError), match=message):
        convert(source, tmp_path / "out", **options)
    assert [path for path in tmp_path.iterdir() if path.name.startswith((".out", "out"))] == []


def test_no_more_threads_than_cores(save, tmp_path):
    with pytest.warns(UserWarning, match="100000 threads were asked for"):
        convert(save("llama"), tmp_path / "out", threads=100_000)


def test_sizes():
    assert parse_size("4GB") == 4 * 10**9
    assert parse_size("500 MiB") == parse_size("500M") == 500 * 2**20
    assert parse_size("1.5kb") == 1500
    assert parse_size(123) == parse_size("123") == parse_size("123B") == 123


def test_refuses_what_is_quantized_already(save, tmp_path):
    out = convert_to(save("llama"), tmp_path / "out")
    with pytest.raises(ConvertError, match="quantized already"):
        convert(out, tmp_path / "again")


def test_refuses_missing_unexpected_and_misshapen_tensors(save, tmp_path):
    source = save("llama")
    edit(source, lambda state: state.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    convert(source, tmp_path / "buffers-are-dropped")
    edit(source, lambda state: (state.pop("model.norm.weight"), state.update({"model.odd": torch.ones(1)})))
    with pytest.raises(CheckpointError, match=r"missing: 'model.norm.weight'; unexpected: 'model.odd'"):
        convert(source, tmp_path / "out")
    source = save("llama")
    edit(source, lambda state: state.update({"model.layers.1.mlp.up_proj.weight": torch.ones(171, 64).bfloat16()}))
    with pytest.raises(CheckpointError, match=r"up_proj.weight has shape \[171, 64\]; config.json says \[172, 64\]"):
        convert(source, tmp_path / "out")
    source = save("llama")
    edit(source, lambda state: state.update({"model.layers.1.mlp.up_proj.weight": torch.ones(172, 64).double()}))
    with pytest.raises(ConvertError, match="float64"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("model.layers.1.mlp.up_proj.weight", 171),
        (TABLE, 330),
        (HEAD, 64),
        ("model.norm.weight", 63),
        ("model.layers.0.input_layernorm.weight", 0),
    ],
)
def test_not_finite_weight_names_tensor_and_row(name, row, value, save, tmp_path, monkeypatch):
    monkeypatch.setattr(source_reader, "BLOCK_BYTES", 16 * 64 * 2)  # the row is counted over blocks
    source = save("llama", tie_word_embeddings=False)
    edit(source, lambda state: state[name].view(state[name].shape[0], -1)[row, -1].fill_(value))
    with pytest.raises(ConvertError, match=rf"{name}: row {row} holds a NaN or an infinity"):
        convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_strict_refuses_unknown_keys(save, tmp_path):
    source = save("llama")
    config = read_config(source)
    (source / "config.json").write_text(json.dumps({**config, "novelty": 1}))
    with pytest.raises(ConfigError, match="novelty"):
        convert(source, tmp_path / "out", strict=True)
    with pytest.warns(UserWarning, match="novelty"):
        convert(source, tmp_path / "out")
    assert read_config(tmp_path / "out")["novelty"] == 1


class TestDestination:
    def test_exists(self, save, tmp_path):
        source = save("llama")
        out = convert_to(source, tmp_path / "out")
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        with pytest.raises(ConvertError, match="--overwrite"):
            convert(source, out, bits=8)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        convert(source, out, bits=8, overwrite=True)
        assert set(schemes(out).values()) == {Scheme(8, -1, False)}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]

    def test_has_chat_templates_in_a_folder(self, save, tmp_path):
        source, out = save("llama"), tmp_path / "out"
        templates = source / "additional_chat_templates"
        templates.mkdir()
        (templates / "tool_use.jinja").write_text("{{ messages[0].content }}")
        convert(source, out)
        convert(source, out, bits=8, overwrite=True)
        assert (out / templates.name / "tool_use.jinja").read_text() == "{{ messages[0].content }}"
        (out / templates.name / "notes.txt").write_text("precious")
        with pytest.raises(ConvertError, match="not overwritten"):
            convert(source, out, overwrite=True)

    def test_a_failed_overwrite_leaves_the_old_folder(self, save, tmp_path):
        source = save("llama")
        out = convert_to(source, tmp_path / "out")
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        edit(source, lambda state: state["model.layers.1.mlp.up_proj.weight"].fill_(float("inf")))
        with pytest.raises(ConvertError, match="row 0"):
            convert(source, out, bits=8, overwrite=True)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before

    def test_is_the_source_or_holds_it(self, save, tmp_path):
        source = save("llama", name="parent/source")
        (tmp_path / "link").symlink_to(source)
        for folder in (source, tmp_path / "link", tmp_path / "parent", source / ".." / "source", Path("/")):
            with pytest.raises(ConvertError, match="is the source or holds it"):
                convert(source, folder, overwrite=True)

    @pytest.mark.parametrize("kind", ["photos", "sub-folder", "file"])
    def test_is_not_a_model_folder(self, kind, save, tmp_path):
        source, out = save("llama"), tmp_path / "out"
        if kind == "file":
            out.write_text("precious")
        else:
            shutil.copytree(source, out)
            (out / "checkpoint-100").mkdir() if kind == "sub-folder" else (out / "config.json").unlink()
        with pytest.raises(ConvertError, match=r"file; name a folder|not overwritten"):
            convert(source, out, overwrite=True)
        assert out.exists()

    def test_empty_folder_and_missing_parents(self, save, tmp_path):
        source = save("llama")
        (tmp_path / "empty").mkdir()
        convert(source, tmp_path / "empty")
        convert(source, tmp_path / "a" / "b" / "c")
        assert (tmp_path / "empty" / "config.json").exists()
        assert (tmp_path / "a" / "b" / "c" / "config.json").exists()

    @pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
    def test_not_writable(self, save, tmp_path):
        source = save("llama")
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(ConvertError, match="cannot write"):
            convert(source, tmp_path / "closed" / "out")

    def test_too_little_space(self, save, tmp_path, monkeypatch):
        source = save("llama")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        with pytest.raises(ConvertError, match=r"MB more and 0\.0 MB are free"):
            convert(source, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_unreadable_and_cut_off_shards(save, tmp_path):
    source = save("llama")
    path = source / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        convert(source, tmp_path / "out")
    path.write_bytes(whole)

    def cut(done, total, name):
        if name == "model.layers.0.self_attn.q_proj.weight":
            os.truncate(path, len(whole) // 2)

    with pytest.raises(ConvertError, match="ended early"):
        convert(source, tmp_path / "out", progress=cut)
    assert not (tmp_path / "out").exists()


def test_progress_counts_source_bytes(save, tmp_path):
    calls = []
    report = convert(
        save("llama", tie_word_embeddings=True), tmp_path / "out", progress=lambda *call: calls.append(call)
    )
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert len({total for _, total, _ in calls}) == 1
    head = 331 * 64 * 2  # the table is read twice: for itself and for the head of its own
    assert done[-1] == calls[-1][1] == report.source_bytes + head


def test_a_config_with_half_a_character(save, tmp_path):
    """JSON may name it by its number; UTF-8 has none of it."""
    source = save("llama")
    config = source / "config.json"
    config.write_text(config.read_text().replace("{", '{"_name_or_path": "\\ud800",', 1))
    convert(source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["_name_or_path"] == "\ud800"
