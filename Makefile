# make setup | demo | test | test-all | check | format | docs | release-check | clean
#
# make test leaves out the tests marked `slow`: each takes long, and a faster test covers the same code. make test-all
# runs them too. .ci/run takes make test: under 15 minutes on two cores. ARGS goes to pytest:
# make test ARGS="tests/train -k resume".
PYTHON ?= python3
EXTRAS ?= dev
JOBS   ?= 2
THREADS ?= 1
BIN    := .venv/bin
PIP    := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
STAMP  := .venv/.setup-$(EXTRAS)
SITE   := .venv/.setup-docs
WHAT   := src tests $(wildcard studies benchmarks)

.PHONY: setup demo test test-all check format docs release-check clean

setup: $(STAMP)

# torch goes first and pinned, so that no later requirement picks another build of it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) --editable ".[$(EXTRAS)]"
	touch $@

demo: setup
	$(BIN)/deadweight demo

# One thread per process: the models of the tests are small, and on two cores two processes with two threads each are
# slower.
PYTEST := OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m pytest -n $(JOBS)

test: setup
	$(PYTEST) -m "not slow" $(ARGS)

test-all: setup
	$(PYTEST) $(ARGS)

check: setup
	$(BIN)/ruff format --check $(WHAT)
	$(BIN)/ruff check $(WHAT)
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format $(WHAT)
	$(BIN)/ruff check --fix $(WHAT)

# The site: open build/site/index.html. Offline once its packages are installed.
$(SITE): $(STAMP)
	$(PIP) --editable ".[docs]"
	touch $@

docs: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Builds the wheel and the sdist, and tries both in environments of their own.
release-check: setup
	$(BIN)/python scripts/release_check.py $(ARGS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
