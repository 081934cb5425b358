"""`nibblelm convert` as a person types it."""

import argparse
import io
import json
import os
import pty
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nibblelm import cli
from nibblelm.cli import convert as command
from nibblelm.converter import convert

MAIN = "import sys; from nibblelm.cli import main; sys.exit(main())"


@pytest.fixture
def source(data_dir):
    return data_dir / "checkpoints" / "stories260K"


def test_report_in_words_goes_to_standard_error(source, tmp_path, capsys):
    assert cli.main(["convert", str(source), str(tmp_path / "out"), "--bits", "4"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "groups of 128 do not divide the 172 columns of 5 matrices (down_proj): one scale per row" in err
    assert "bits per weight" in err
    assert "largest relative error of each layer (the worst 6 of 6):" in err
    assert "lm_head  (int8, per row)" in err


def test_json_is_one_object_on_standard_output(source, tmp_path, capsys):
    arguments = ["convert", str(source), str(tmp_path / "out"), "--json", "--bits", "8", "--symmetric"]
    assert cli.main([*arguments, "--group-size", "32", "--keep", "v_proj=16", "--keep-tied"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    assert report["dst"] == str(tmp_path / "out")
    assert {tensor["bits"] for tensor in report["tensors"]} == {8}
    assert not any("v_proj" in tensor["module"] for tensor in report["tensors"])


def test_defaults_are_those_of_the_python_function(source, tmp_path):
    assert cli.main(["convert", str(source), str(tmp_path / "typed")]) == 0
    convert(source, tmp_path / "called")
    for path in (tmp_path / "called").iterdir():
        assert path.read_bytes() == (tmp_path / "typed" / path.name).read_bytes()


HOSTILE = "\x1b]0;title\x07\x1b[2J\u202e\x9b\n"


@pytest.mark.parametrize("place", ["tensor", "key", "value", "shard"])
def test_control_characters_of_a_checkpoint_do_not_reach_the_terminal(place, source, tmp_path, capsys):
    folder = tmp_path / "m"
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    if place == "tensor":
        state = load_file(folder / "model.safetensors")
        save_file({**state, HOSTILE: torch.ones(1)}, folder / "model.safetensors")
    elif place == "shard":
        (folder / "model.safetensors").unlink()
        index = {"weight_map": {"a": f"{HOSTILE}.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif place == "key":
        (folder / "config.json").write_text(json.dumps({**config, HOSTILE: 1}))
    else:
        (folder / "config.json").write_text(json.dumps({**config, "model_type": HOSTILE}))
    for arguments in (["info", "-m", str(folder)], ["convert", str(folder), str(tmp_path / "out")]):
        assert cli.main(arguments) == (0 if place == "key" else 1)
        out, err = capsys.readouterr()
        assert "title" in err or (place == "key" and arguments[0] == "convert")  # a warning is shown once
        assert not [c for c in out + err if not c.isprintable() and c != "\n"]
        assert place == "key" or err.count("\n") == 1


def test_expected_failures_are_one_line_and_exit_code_1(source, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("precious")
    for arguments in ([str(source), str(tmp_path / "out")], [str(tmp_path / "nothing"), str(tmp_path / "a")]):
        assert cli.main(["convert", *arguments]) == 1
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("nibblelm: error: ")
        assert err.count("\n") == 1
    assert (tmp_path / "out" / "file").read_text() == "precious"


@pytest.mark.parametrize("flags", [["--bits", "5"], ["--group-size", "100"], ["--method", "x"], ["--threads", "0"], []])
def test_usage_errors_exit_with_2(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["convert", *flags, *(["a", "b"] if flags else [])])
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_progress_bar_on_a_terminal_only(source, tmp_path):
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    arguments = [sys.executable, "-c", MAIN, "convert", str(source), str(tmp_path / "out")]
    with subprocess.Popen(arguments, stderr=terminal, stdout=subprocess.PIPE) as process:
        os.close(terminal)
        shown = io.BytesIO()
        try:
            while piece := os.read(controller, 4096):
                shown.write(piece)
        except OSError:  # the terminal closes with its last writer
            pass
        assert process.wait() == 0
    text = shown.getvalue().decode()
    assert "B/s" in text
    assert "bits per weight" in text


def test_script_is_the_command(source, tmp_path):
    script = Path(__file__).resolve().parents[2] / "scripts" / "convert.py"
    if not script.exists():
        pytest.skip("the scripts are not beside the tests")
    arguments = [sys.executable, str(script), str(source), str(tmp_path / "out"), "--json"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["method"] == "mse"


def test_flags_and_parameters_have_the_same_defaults():
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    flags = vars(parser.parse_args(["a", "b"]))
    flags.pop("json")
    defaults = dict(convert.__kwdefaults__)
    defaults.pop("progress")
    assert tuple(flags.pop("keep")) == defaults.pop("keep")
    assert {key: value for key, value in flags.items() if key not in ("src", "dst")} == defaults
