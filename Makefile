# Everything a person or a CI does with Paternoster. Needs python3.11 (or later) with venv, and a package index.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup up test check wheels test-compose gpu-check invariance soak

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# Each of these two files is made when what it stands for is installed, and again when what says what to install changes.
INSTALL = $(BIN)/python -m pip install --quiet --constraint constraints.txt --editable

$(VENV)/serving: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "Paternoster needs Python 3.11 or later; name one with: make PYTHON=/path/to/python3" >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a few minutes, once"
	$(INSTALL) '.[serve]'
	touch $@

$(VENV)/installed: $(VENV)/serving
	$(INSTALL) '.[dev]'
	touch $@

setup: $(VENV)/installed ## Make .venv with all that tests need, fetch the default model
	@$(BIN)/paternoster model fetch default >/dev/null

up: $(VENV)/serving ## Serve http://127.0.0.1:8000; options: make up ARGS="--executors 2 --port 9000"
	@exec $(BIN)/paternoster up $(ARGS)

# Why so: docs/adr/0026-two-tests-at-a-time.md. ARGS="-n 0" runs them one by one, as --pdb needs it.
test: setup ## Run the whole test suite
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(ARGS)

check: $(VENV)/installed ## Lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

wheels: $(VENV)/serving ## Fill wheels/ for the images with this machine's pip
	$(BIN)/python -m tools.wheels fill

test-compose: setup ## Run the real containers on a real Docker engine
	tests/compose/run

invariance: setup ## Compare bits of rows alone and in crowds, on this CPU
	$(BIN)/python -m tools.invariance $(ARGS)

gpu-check: $(VENV)/installed ## Check kernels and system on a CUDA device
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	    then failed=0; \
	    $(BIN)/python -m tools.gpu_check || failed=1; \
	    $(BIN)/python -m pytest tests/kernels -k 'triton or gpu' $(ARGS) || failed=1; \
	    $(BIN)/python -m pytest -m cuda $(ARGS) || failed=1; \
	    exit $$failed; \
	    else echo "skipped: no CUDA device"; fi

soak: setup ## Run the full sizes of the long tests (hours)
	$(BIN)/python -m pytest -m soak --timeout 0 $(ARGS)
