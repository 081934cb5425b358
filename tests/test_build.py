"""What building says on a machine that lacks something, and how large what is installed becomes."""

import os
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc"
CMAKE = shutil.which("cmake")


@pytest.mark.skipif(CMAKE is None or not SOURCES.exists(), reason="cmake or the sources are not here")
def test_without_a_compiler_the_error_names_what_to_install(tmp_path: Path) -> None:
    make = next((name for name in ("make", "ninja") if shutil.which(name)), None)
    if make is None:
        pytest.skip("neither make nor ninja is here")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / make).symlink_to(str(shutil.which(make)))
    environment = {key: value for key, value in os.environ.items() if key not in ("CXX", "CC")}
    environment |= {"PATH": str(tmp_path / "bin"), "CXX": str(tmp_path / "no-compiler")}
    generator = {"make": "Unix Makefiles", "ninja": "Ninja"}[make]
    command = [str(CMAKE), "-S", str(SOURCES), "-B", str(tmp_path / "build"), "-G", generator]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    words = " ".join(result.stderr.split())
    assert "NibbleLM needs a C++20 compiler" in words
    assert "apt install g++" in words


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch with CUDA: README says how to do without")
def test_an_environment_for_the_cpu_has_the_size_that_readme_names() -> None:
    """NibbleLM, torch and all that they need, as installed: without that line pip takes several GB."""
    section = (ROOT / "README.md").read_text().partition("## Install\n")[2]
    cpu, plain = re.findall(r"^pip install .*", section, re.MULTILINE)[:2]
    assert "torch --index-url" in cpu
    assert plain.startswith("pip install . ")
    sizes: dict[str, int] = {}

    def add(name: str) -> None:
        name = canonicalize_name(name)
        if name in sizes:
            return
        found = metadata.distribution(name)
        files = (Path(str(file.locate())) for file in found.files or ())
        sizes[name] = sum(file.stat().st_size for file in files if file.is_file())
        for requirement in map(Requirement, found.requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                add(requirement.name)

    add("nibblelm")
    named = float(re.findall(r"([\d.]+) GB", cpu)[0])
    assert sum(sizes.values()) / 1e9 == pytest.approx(named, rel=0.05), sizes
