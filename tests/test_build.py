"""What building says on a machine that lacks something."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).resolve().parent.parent / "csrc"
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
