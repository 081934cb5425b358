"""The scripts beside the package, importable, and a small checkpoint to measure."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not SCRIPTS.is_dir():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="the scripts are not beside the tests"))


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`script(name, *arguments)`: a run of it in an empty folder."""

    def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)

    return run


@pytest.fixture(scope="session")
def demo() -> Path:
    folder = ROOT / "demo" / "stories-7m"
    if not folder.is_dir():
        pytest.skip("the demo checkpoint is not beside these tests")
    return folder
