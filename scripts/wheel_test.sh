#!/usr/bin/env bash
# Build the wheel, install it alone into a fresh environment that borrows .venv's dependencies (a .pth line does not
# activate .venv's editable install), run the demo without compilers, and from a copy outside the checkout the tests of
# what depends on the place: commands, server, extension, folders. Its Python is the checkout's, byte for byte, which all
# tests ran on.
#
#   scripts/wheel_test.sh [PYTEST_OPTION ...]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$root/.venv/bin/pip" wheel --quiet --no-deps --wheel-dir "$work/dist" "$root"
"$root/.venv/bin/python" -m venv --without-pip "$work/venv"
site=$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/dependencies.pth"
"$root/.venv/bin/pip" --python "$work/venv/bin/python" install --quiet --no-deps "$work"/dist/*.whl
"$root/scripts/wheel_demo.sh" "$work"/dist/*.whl
diff --recursive --exclude=__pycache__ "$root/runtime" "$site/nibblelm" | grep -v "^Only in $site/nibblelm" && exit 1
diff --recursive --exclude=__pycache__ "$root/models" "$site/nibblelm/models"
cp -r "$root/tests" "$root/scripts" "$root/docs" "$root/README.md" "$root/pyproject.toml" "$work"
cd "$work"
"$work/venv/bin/python" -c 'import nibblelm, sys; assert nibblelm.__file__.startswith(sys.prefix), nibblelm.__file__'
"$work/venv/bin/python" -m pytest -n 2 --dist loadfile "--data=$root/../shared/data" \
  tests/cli tests/server tests/ops tests/checkpoint tests/engine/test_demo.py tests/engine/test_engine.py "$@"
