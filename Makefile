# make demo | test | lint | types | wheel-test | clean
PYTHON ?= python3
BIN := .venv/bin
DEMO := demo/stories-7m
PROMPT := Once upon a time

# constraints.txt holds for build environments too, under both names that pip has had for it
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

SOURCES := pyproject.toml constraints.txt $(shell find csrc -type f)

.PHONY: demo test lint types wheel-test clean

demo: out/demo-int4/config.json
	$(BIN)/nibblelm generate -m out/demo-int4 -p "$(PROMPT)" --echo

out/demo-int4/config.json: .venv/.installed $(wildcard $(DEMO)/*)
	$(BIN)/nibblelm convert $(DEMO) out/demo-int4 --bits 4 --overwrite

test: .venv/.installed-test
	$(BIN)/pytest -n 2 --dist loadfile

lint: .venv/.installed-lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run --Werror $$(find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

types: .venv/.installed-lint .venv/.installed-test
	$(BIN)/pyright

# The tests against the built wheel, outside the checkout, in an environment that borrows the installed dependencies
wheel-test: .venv/.installed-test
	scripts/wheel_test.sh

.venv/.created:
	$(PYTHON) -m venv .venv
	touch $@

.venv/.installed: .venv/.created $(SOURCES)
	$(BIN)/pip install --quiet --editable .
	touch $@

.venv/.installed-test: .venv/.installed
	$(BIN)/pip install --quiet --editable ".[test]"
	touch $@

.venv/.installed-lint: .venv/.installed
	$(BIN)/pip install --quiet --editable ".[lint]"
	touch $@

clean:
	rm -rf .venv build dist out
