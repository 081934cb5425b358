# make demo | test | check-long | lint | types | wheel-test | cuda | wheel | clean
PYTHON ?= python3
BIN := .venv/bin
DEMO := demo/stories-7m
PROMPT := Once upon a time

# constraints.txt holds for build environments too, under both names that pip has had for it, which it splits at spaces
space := $(subst ,, )
export PIP_CONSTRAINT := file://$(subst $(space),%20,$(CURDIR))/constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

SOURCES := pyproject.toml constraints.txt demo/chat.html $(shell find csrc -type f)

# prints what extras of pyproject.toml need; installing ".[test]" instead would compile the extension again
EXTRA := import sys, tomllib; known = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; print(*sum(map(known.get, sys.argv[1:]), []))

.PHONY: demo test check-long lint types wheel-test cuda wheel clean

demo: out/demo-int4/config.json
	$(BIN)/nibblelm generate -m out/demo-int4 -p "$(PROMPT)" --echo

out/demo-int4/config.json: .venv/.installed $(wildcard $(DEMO)/*)
	$(BIN)/nibblelm convert $(DEMO) out/demo-int4 --bits 4 --overwrite

test: .venv/.installed-test
	$(BIN)/pytest -n 2 --dist loadfile

# What `make test` takes a sample of: random schedules of the engine, prompts with drafts, families in all formats
LONG := benchmarks/cpu/check_long.json
check-long: .venv/.installed-test
	$(BIN)/pytest -n 2 tests/engine/test_scheduler.py tests/engine/test_exactness.py tests/engine/test_speculation.py \
		--schedules 2000 --record $(LONG)
	$(BIN)/pytest -n 2 tests/models tests/engine/test_exactness.py --every --record $(LONG)

lint: .venv/.installed-lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $$(find csrc scripts -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

types: .venv/.installed-lint .venv/.installed-test
	$(BIN)/pyright

# Tests against the built wheel, outside the checkout, in an environment that borrows the installed dependencies
wheel-test: .venv/.installed-test
	scripts/wheel_test.sh

# The CUDA extension and the program beside it for one architecture, on a machine with nvcc and perhaps no GPU: they
# compile, and the extension loads
cuda: .venv/.installed
	rm -rf build/cuda-wheel
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir build/cuda-wheel . \
		--config-settings=cmake.define.NIBBLELM_CUDA=ON --config-settings=cmake.define.NIBBLELM_CUDA_ARCHS=90a \
		--config-settings=build-dir=build/cuda
	$(BIN)/pip install --quiet --no-deps --upgrade --target build/cuda-wheel/site build/cuda-wheel/*.whl
	cd build/cuda-wheel/site/nibblelm && "$(CURDIR)/$(BIN)/python" -c "import _cuda; print(_cuda.__doc__)"
	nvcc -std=c++20 -O3 -gencode arch=compute_90a,code=sm_90a -Icsrc scripts/bench_step.cu \
		$$(for f in csrc/cuda/*.cu; do find build/cuda -name "$$(basename $$f).o"; done) -o build/bench_step

# One wheel with both extensions, CUDA for every architecture of csrc/CMakeLists.txt: long to build, quick to install
wheel: .venv/.installed
	$(BIN)/python scripts/build_wheel.py

.venv/.created:
	$(PYTHON) -m venv .venv
	touch $@

.venv/.installed: .venv/.created $(SOURCES)
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/.installed-test: .venv/.installed
	$(BIN)/pip install --quiet $$($(BIN)/python -c '$(EXTRA)' serve test)
	touch $@

.venv/.installed-lint: .venv/.installed
	$(BIN)/pip install --quiet $$($(BIN)/python -c '$(EXTRA)' lint)
	touch $@

clean:
	rm -rf .venv build dist out
