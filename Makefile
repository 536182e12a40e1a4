# Two commands on a fresh machine: `make demo` and `make test`. Both build what they need in .venv first.
#
#   make demo    train a small language model on this machine's Python sources, about a minute
#   make test    lint, types and the whole test suite
#   make lint    ruff and mypy only
#   make bench   print ours, the peers' and a hand-written loop
#   make clean   remove everything these commands made
#
# PYTHON=python3.12 chooses the interpreter, PIP_ARGS="..." is handed to every pip install,
# TORCH="torch==2.13.0" the build of torch, TESTS="tests/pt -k seed" what `make test` runs, JOBS=4 on how many processes.

PYTHON   ?= python3
PIP_ARGS ?=
TORCH    ?= torch==2.13.0
TESTS    ?= tests
JOBS     ?= 2
BENCHMARKS ?= overhead checkpoint layouts scaling

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

# Needed by the suite and the linters; nothing runs without them.
TOOLS := pytest pytest-xdist hypothesis ruff mypy
# Compared with or worked beside; a test that needs an absent one skips itself and says so.
PEERS := transformers==5.22.2 datasets accelerate peft tensorboard lightning torchmetrics evaluate fsspec \
         tensorflow-cpu==2.21.0 jax ray
# Without what they ask for: tf-keras would bring a second, larger TensorFlow.
ALONE := tf-keras==2.21.0

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile

demo: $(VENV)/.core
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest $(TESTS) -q -n $(JOBS) --dist loadgroup --durations 15

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests examples $(wildcard benchmarks)
	$(BIN)/mypy

bench: $(VENV)/.dev
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py; done

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "loopwright needs Python 3.11 or newer; name one with: make PYTHON=python3.12"; exit 1; }
	@echo "Making $(VENV) ..."
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and alone: it is the large one, and every other package must accept what it brought.
$(VENV)/.core: $(VENV)/.python pyproject.toml constraints.txt
	@echo "Installing torch and loopwright into $(VENV) ..."
	$(PIP) '$(TORCH)'
	$(PIP) -e .
	@touch $@

# All in one go when possible; otherwise the tools, which must work, and then each peer on its own.
$(VENV)/.dev: $(VENV)/.core
	@echo "Installing the tools of the test suite ..."
	@$(PIP) -e '.[dev]' 2>$(VENV)/dev.log || { \
	  echo "Not everything could be installed together (see $(VENV)/dev.log); trying one by one."; \
	  $(PIP) $(TOOLS) || exit 1; \
	  for peer in $(PEERS); do \
	    $(PIP) "$$peer" 2>>$(VENV)/dev.log || echo "  $$peer is not to be had here; the tests that need it skip themselves."; \
	  done; }
	@for peer in $(ALONE); do \
	  $(PIP) --no-deps "$$peer" 2>>$(VENV)/dev.log || echo "  $$peer is not to be had here; tests that need it skip."; \
	done
	@touch $@
