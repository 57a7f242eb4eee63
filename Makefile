# Two commands for a newcomer: `make demo` and `make test`. Each sets up what it needs in .venv.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
WORKERS ?= 3
# The modules with mounts, servers and frameworks come first by name: the short ones fill the end.
DIST := --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-all lint bench setup setup-test clean

demo: $(VENV)/.ready
	$(BIN)/ckptgate demo

# The core, with real PyTorch, on real mounts.
test: $(VENV)/.ready-test
	$(BIN)/python -m pytest -m "not full" -n $(WORKERS) $(DIST) $(PYTEST_ARGS)

# Long matrices too.
test-all: $(VENV)/.ready-test
	$(BIN)/python -m pip install --quiet --group frameworks --group ecosystem
	$(BIN)/python -m pytest -n $(WORKERS) $(DIST) $(PYTEST_ARGS)

lint: $(VENV)/.ready-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright
	$(BIN)/lint-imports

# All figures, or those of some subjects: make bench BENCH="write metadata"; ARGS=--quick for a look.
bench: $(VENV)/.ready-test
	$(BIN)/python -m bench $(BENCH) $(ARGS)

setup: $(VENV)/.ready
setup-test: $(VENV)/.ready-test

$(VENV)/.ready: pyproject.toml
	@.ci/venv $(PYTHON) $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready
	@.ci/system-packages
	$(BIN)/python -m pip install --quiet --group dev --group torch
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
