"""The import direction, file sizes and the guard of the two source folders."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import nibblelm

PACKAGE = Path(nibblelm.__file__).parent

# A module may import from its own layer and from layers before it.
LAYERS = [
    ["errors", "memory", "sizes", "schema_limits", "_cpu", "_cuda", "pages", "nibblelm"],
    ["ops"],
    ["arguments"],
    ["config", "config_keys", "rope_config", "checkpoint", "graph"],
    ["quant"],
    ["tokenizer", "rope_scaling", "rope", "kv_cache", "weights", "random_weights", "layers"],
    ["models"],
    "shapes decode_steps prompt_steps mixed_steps runner sampling_params sampler stats structured benchmark".split()
    + "prompts request scheduler speculation choosing executor readers engine_thread engine_core engine".split(),
    ["evaluation"],
    ["converter"],
    ["server"],
    ["cli"],
    ["__main__"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> list[Path]:
    import nibblelm.models

    return [p for root in (PACKAGE, Path(nibblelm.models.__file__).parent) for p in sorted(root.rglob("*.py"))]


def layer(path: Path) -> str:
    if path.is_relative_to(PACKAGE):
        return path.relative_to(PACKAGE).parts[0].removesuffix(".py").replace("__init__", "nibblelm")
    return "models"


def imported(path: Path) -> set[str]:
    """Names of this package's layers that a file imports, at the top or inside functions, but not for types only."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or id(node) in typing_only or node.module is None:
            continue
        if node.module == "nibblelm":
            names |= {alias.name for alias in node.names if alias.name in LEVEL}
        elif node.module.startswith("nibblelm."):
            names.add(node.module.split(".")[1])
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_import_direction(path: Path) -> None:
    own = layer(path)
    assert own in LEVEL, f"{path} belongs to no layer of this test"
    upward = {name for name in imported(path) if LEVEL[name] > LEVEL[own]}
    assert not upward, f"{own} imports from {sorted(upward)}, which come after it"


@pytest.mark.parametrize("path", modules(), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


def test_transformers_and_torch_are_not_imported_early() -> None:
    code = "import sys, nibblelm.cli; nibblelm.cli.build_parser(); print({'torch', 'transformers'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
    code = "import sys, nibblelm.engine, nibblelm.converter; print('transformers' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_guard_against_the_folder_names() -> None:
    root = Path(__file__).resolve().parent.parent
    if not (root / "runtime").is_dir():
        pytest.skip("no source folders beside these tests")
    for name in ("runtime", "models"):
        result = subprocess.run(
            [sys.executable, "-c", f"import {name}"], cwd=root, capture_output=True, text=True, check=False
        )
        assert result.returncode != 0
        assert "nibblelm" in result.stderr


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()
