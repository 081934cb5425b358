#!/usr/bin/env bash
# Install a wheel into a fresh environment that borrows .venv's dependencies, and run the demo from it on a PATH on which
# there is nothing to compile with.
#
#   scripts/wheel_demo.sh WHEEL
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(realpath "$1")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$root/.venv/bin/python" -m venv --without-pip "$work/venv"
site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/dependencies.pth"
"$root/.venv/bin/pip" --python "$work/venv/bin/python" install --quiet --no-deps "$wheel"
cd "$work"
there() { env -i HOME="$work" PATH="$work/venv/bin" "$@"; }
there python - << 'PYTHON'
import importlib.util, shutil, sys
from pathlib import Path

import nibblelm

assert nibblelm.__file__.startswith(sys.prefix), nibblelm.__file__
assert (Path(nibblelm.__file__).parent / "py.typed").exists()
found = [tool for tool in ("c++", "g++", "clang++", "cc", "nvcc", "cmake", "ninja", "make") if shutil.which(tool)]
assert not found, f"this machine without compilers has {found}"
for name in ("_cpu", "_cuda"):
    if importlib.util.find_spec(f"nibblelm.{name}"):
        print(importlib.import_module(f"nibblelm.{name}").__doc__)
PYTHON
there nibblelm convert "$root/demo/stories-7m" demo-int4 --bits 4
there nibblelm generate -m demo-int4 -p "Once upon a time" --echo --temperature 0 --max-tokens 64 | tee story
[[ $(wc -w < story) -gt 30 ]]
