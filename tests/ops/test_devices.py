"""Both devices have what the code asks them for; without a GPU nothing else would say so."""

import re
from pathlib import Path

import nibblelm
from nibblelm.ops import cpu, cuda

SOURCES = Path(nibblelm.__file__).parent
CALL = re.compile(r"(?:backend|_kernels)\([^()]*(?:\([^()]*\))?[^()]*\)\.(\w+)")
ON_THE_CPU_ALONE = {"attention_with_options", "keep_freed_memory", "set_threads"}


def test_every_function_that_is_asked_for_exists() -> None:
    wanted = {name for path in SOURCES.rglob("*.py") for name in CALL.findall(path.read_text())}
    assert {"linear", "upload", "attention"} <= wanted
    missing = {name for name in wanted - ON_THE_CPU_ALONE if not hasattr(cuda, name)}
    assert not missing, f"nibblelm.ops.cuda lacks {sorted(missing)}"
    assert {"linear", "attention", "embedding"} <= {name for name in wanted if hasattr(cpu, name)}


def test_the_list_of_names_is_what_there_is() -> None:
    assert not [name for name in cuda.__all__ if not hasattr(cuda, name)]
