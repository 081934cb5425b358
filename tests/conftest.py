"""Shared pytest options and fixtures."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--data", default=str(ROOT.parent / "shared" / "data"), help="folder of real checkpoints and text")
    parser.addoption("--every", action="store_true", help="every family in every format, not a sample of each")
    parser.addoption("--schedules", type=int, default=50, help="random schedules that the engine is tested with")


@pytest.fixture(scope="session")
def data_dir(request: pytest.FixtureRequest) -> Path:
    """The folder of real checkpoints, text and tokenizers; tests that need it skip where it is absent."""
    folder = Path(request.config.getoption("--data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; pass --data=DIR")
    return folder
