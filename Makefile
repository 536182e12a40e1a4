# Two commands on a fresh machine: `make demo` and `make test`. Both build what they need in .venv first.
#
#   make demo    train a small language model on this machine's Python sources, about a minute; ends with report.html
#   make check   lint, types, arguments, core and structure: what to run before every commit
#   make test    lint, types and the whole test suite; of large grids a spread
#   make test-grid   the large grids in full, which takes long; TESTS="tests/adversary" for one of them
#   make trackers   install W&B, MLflow and the other trackers in a separate environment (.venv-trackers, 0.9 GB)
#   make extras   install optional packages (bitsandbytes, torchao, GaLore ...) beside .venv (.venv-extras, 0.3 GB)
#   make test-xla   the tests on real XLA, on the CPU, in a separate environment (.venv-xla, 2.5 GB)
#   make test-versions   chosen tests with other versions of Python, torch and transformers (.venv-versions, 8 GB)
#   make docs    build the documentation as a site, in a separate environment (.venv-docs)
#   make dist    wheel, source archive and bill of materials of a release, in dist (.venv-release)
#   make interface   how completely the package is typed; public names compared with the last release
#   make lint    ruff and mypy only
#   make bench   measure loopwright, its peers and a hand-written loop
#   make clean   remove everything these commands made
#
# PYTHON=python3.12 chooses the interpreter, PIP_ARGS="..." is passed to every pip install,
# TORCH="torch==2.13.0" the build of torch, TESTS="tests/pt -k seed" what `make test` runs, JOBS=4 on how many processes,
# VERSIONS="python-3.12" the environments of `make test-versions`.

PYTHON   ?= python3
PIP_ARGS ?=
TORCH    ?= torch==2.13.0
TESTS    ?= tests
JOBS     ?= 3
CHECKED  := tests/core tests/args tests/callbacks tests/reporters tests/test_house.py tests/test_messages.py
BENCHMARKS ?= overhead checkpoint layouts scaling

VENV := .venv
BIN  := $(VENV)/bin
PIP  := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

# Needed by the suite and the linters; nothing runs without them.
TOOLS := pytest pytest-xdist hypothesis ruff mypy
# Compared with or worked beside; a test that needs an absent one skips itself and says so.
PEERS := transformers==5.22.2 datasets accelerate peft tensorboard lightning torchmetrics evaluate fsspec \
         tensorflow-cpu==2.21.0 jax ray optuna nbclient ipykernel
# Without what they ask for: tf-keras would bring a second, larger TensorFlow, and of axe only its script is used.
ALONE := tf-keras==2.21.0 axe-playwright-python==0.1.8

.DEFAULT_GOAL := help
.PHONY: help demo check test test-grid test-xla xla-env test-versions trackers extras docs dist interface lint bench clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   \(make .*\)/\1/p' Makefile

demo: $(VENV)/.core
	$(BIN)/python examples/demo.py

check: lint
	$(BIN)/python -m pytest $(CHECKED) -q -n $(JOBS) --dist loadgroup -m "not slow"

test: lint trackers extras
	$(BIN)/python -m pytest $(TESTS) -q -n $(JOBS) --dist loadgroup --durations 15

test-grid: $(VENV)/.dev
	$(BIN)/python -m pytest $(TESTS) -q -n $(JOBS) --dist loadgroup -m grid

# The trackers disagree with the versions of the suite, so they have an environment of their own; runs that report to
# them are started with its Python. Without it the tests that need it skip themselves.
TRACKERS_VENV := .venv-trackers

trackers: $(VENV)/.python
	@$(MAKE) --no-print-directory $(TRACKERS_VENV)/.ready || \
	  echo "  The trackers could not be installed; the tests that need them are skipped."

$(TRACKERS_VENV)/.ready: constraints-trackers.txt
	@echo "Making $(TRACKERS_VENV): W&B, MLflow and other trackers ..."
	$(PYTHON) -m venv $(TRACKERS_VENV)
	timeout 900 $(TRACKERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps --no-compile \
	  -r constraints-trackers.txt
	@touch $@

# Packages for quantized weights and further optimizers. They slow every import of PEFT and transformers, so they are in
# an environment of their own, which sees the packages of .venv; one test starts the tests that need them.
EXTRAS_VENV := .venv-extras
EXTRAS := bitsandbytes torchao galore-torch apollo-torch grokadamw schedulefree torch-optimi

PURELIB := "import sysconfig; print(sysconfig.get_path('purelib'))"

extras: $(VENV)/.dev
	@$(MAKE) --no-print-directory $(EXTRAS_VENV)/.ready || \
	  echo "  The optional packages could not be installed; the tests that need them skip themselves."

$(EXTRAS_VENV)/.ready: constraints.txt
	@echo "Making $(EXTRAS_VENV): $(EXTRAS) ..."
	$(PYTHON) -m venv $(EXTRAS_VENV)
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(PURELIB))')" \
	  >"$$($(EXTRAS_VENV)/bin/python -c $(PURELIB))/shared.pth"
	timeout 900 $(EXTRAS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) --no-deps \
	  -c constraints.txt $(EXTRAS)
	@touch $@

# The last torch that lazy torch_xla exists for. Its build in the public index is a CUDA one: without CUDA's 5 GB it
# imports with stand-ins for CUDA's libraries, which tests/xla/cuda_stubs.py makes with gcc and binutils.
XLA_VENV  := .venv-xla
XLA_SITE   = $$($(XLA_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
XLA_RUN    = LD_LIBRARY_PATH="$(XLA_SITE)/nvidia_stub" PJRT_DEVICE=CPU PYTHONPATH=src:. OMP_NUM_THREADS=1 \
             timeout 900 $(XLA_VENV)/bin/python -m pytest -q --durations 10
XLA_PIP    = $(XLA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

test-xla: xla-env
	$(XLA_RUN) tests/xla --ignore tests/xla/test_spmd.py
	CPU_NUM_DEVICES=4 $(XLA_RUN) tests/xla/test_spmd.py

xla-env: $(XLA_VENV)/.ready

$(XLA_VENV)/.ready: constraints.txt tests/xla/cuda_stubs.py
	@for tool in gcc readelf nm; do command -v $$tool >/dev/null || { echo "real XLA needs $$tool here"; exit 1; }; done
	@echo "Making $(XLA_VENV): torch 2.9.0 and torch_xla 2.9.0 ..."
	$(PYTHON) -m venv $(XLA_VENV)
	$(XLA_PIP) --no-deps torch==2.9.0 torch_xla==2.9.0
	sed -i -E '/^Requires-Dist: (nvidia|triton)/d' "$(XLA_SITE)/torch-2.9.0.dist-info/METADATA"
	grep -v '^torch==' constraints.txt > $(XLA_VENV)/constraints.txt
	$(XLA_PIP) -c $(XLA_VENV)/constraints.txt typing_extensions sympy filelock networkx jinja2 fsspec numpy absl-py \
	  pyyaml requests safetensors rich pytest hypothesis transformers==5.22.2
	$(XLA_VENV)/bin/python tests/xla/cuda_stubs.py "$(XLA_SITE)"
	LD_LIBRARY_PATH="$(XLA_SITE)/nvidia_stub" PJRT_DEVICE=CPU \
	  $(XLA_VENV)/bin/python -c 'import torch_xla; print("computing on", torch_xla.device())'
	@touch $@

test-versions: $(VENV)/.core
	$(BIN)/python tests/versions/matrix.py $(VERSIONS)

docs: .venv-docs/.ready
	.venv-docs/bin/python docs/build.py

.venv-docs/.ready: constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt \
	  zensical mkdocstrings-python
	@touch $@

RELEASE := .venv-release/bin/python
EPOCH    = SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct)

dist: .venv-release/.ready
	rm -rf dist build/lib
	$(EPOCH) $(RELEASE) -m build --outdir dist
	$(EPOCH) $(RELEASE) release/sbom.py dist/sbom.json

interface: .venv-release/.ready
	$(RELEASE) release/interface.py

.venv-release/.ready: constraints.txt
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt \
	  '$(TORCH)' numpy safetensors pyyaml rich packaging build pyright griffe
	@touch $@

lint: $(VENV)/.dev
	$(BIN)/ruff check src tests examples docs release $(wildcard benchmarks)
	$(BIN)/mypy

bench: $(VENV)/.dev
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py; done

clean:
	rm -rf $(VENV) $(XLA_VENV) $(TRACKERS_VENV) $(EXTRAS_VENV) .venv-docs .venv-versions .venv-release build dist runs \
	  .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
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
	@$(PIP) $$($(BIN)/python release/groups.py dev) 2>$(VENV)/dev.log || { \
	  echo "Not everything could be installed together (see $(VENV)/dev.log); trying one by one."; \
	  $(PIP) $(TOOLS) || exit 1; \
	  for peer in $(PEERS); do \
	    $(PIP) "$$peer" 2>>$(VENV)/dev.log || echo "  $$peer could not be installed; the tests that need it are skipped."; \
	  done; }
	@for peer in $(ALONE); do \
	  $(PIP) --no-deps "$$peer" 2>>$(VENV)/dev.log || echo "  $$peer could not be installed; the tests that need it are skipped."; \
	done
	@touch $@
