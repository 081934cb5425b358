"""The memory of a conversion is bounded by a block, not by the model."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_convert_memory.py"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.skipif(not SCRIPT.exists(), reason="the scripts are not beside the tests")
@pytest.mark.parametrize("flags", [[], ["--method", "minmax", "--bits", "8"]], ids=["int4-mse", "int8-minmax"])
def test_300_megabytes(flags, tmp_path):
    """torch itself takes 150 MB; a conversion may add a few blocks of 32 MB, not the 300 MB of the model."""
    command = [sys.executable, str(SCRIPT), "--size", "300MB", "--shards", "4", "--folder", str(tmp_path)]
    result = subprocess.run([*command, "--limit", "300MB", "--", *flags], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found = re.search(r"peak anonymous (\d+) MB.*import torch alone (\d+) MB", result.stdout)
    assert found is not None
    assert int(found.group(1)) - int(found.group(2)) < 110


@pytest.mark.skipif(not SCRIPT.exists(), reason="the scripts are not beside the tests")
def test_the_script_can_fail_and_its_checkpoint_is_gaussian(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("check_convert_memory", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    memory_of, seen = module.memory_of, tmp_path / "seen"

    def sampled(process: int) -> dict[str, int]:
        memory = memory_of(process)
        if memory.get("RssAnon", 0) > 64 << 20:
            seen.touch()
        return memory

    monkeypatch.setattr(module, "memory_of", sampled)
    hold = "import os, sys, time; held = bytearray(b'x') * (64 << 20); time.sleep(0.3)"
    hold += "\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    peaks, seconds = module.run_measured([sys.executable, "-c", hold, str(seen)])
    assert 64 << 20 < peaks["RssAnon"] < 90 << 20
    assert seconds >= 0.3
    total = module.make_checkpoint(tmp_path, 100_000_000, 2)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) == 2
    tensors = {name: value for shard in shards for name, value in load_file(shard).items()}
    assert sum(value.numel() * 2 for value in tensors.values()) == total
    for value in tensors.values():
        assert value.dtype == torch.bfloat16
        if value.numel() > 10**5:
            assert float(value.float().std()) == pytest.approx(0.02, rel=0.02)
