# Needs python3 (3.11 or newer, with venv), make and, for the native module, a C++ compiler.
#
#   make demo                  train a small language model on 8 virtual devices
#   make test                  ruff, mypy --strict, the fast tests and the doctests
#   make test-slow             the tests that the fast suite leaves out
#   make test-aot              tests that compile for GPUs and TPUs that are not there (5 GB)
#   make sanitize              the C++ tests under sanitizers
#
# Another Python or JAX, in an environment of its own:
#   make test VENV=.venv313 PYTHON=python3.13 JAX_VERSION=0.12.0.1

PYTHON ?= python3
VENV ?= .venv
JAX_VERSION ?=
JAX_REQUIREMENT ?= jax$(if $(JAX_VERSION),==$(JAX_VERSION))
WORKERS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/pytest --import-mode=importlib $(PYTEST_ARGS)
# The built parts come from these; the Python files are used where they lie (editable install).
BUILT_FROM := pyproject.toml CMakeLists.txt $(wildcard cc/*.* cmake/*)
# What an environment was made with; a change makes it anew or installs again.
WANTED := $(PYTHON) | $(JAX_REQUIREMENT) | JAX_RING_NATIVE=$(JAX_RING_NATIVE) JAX_RING_CUDA=$(JAX_RING_CUDA)
SLOW := slow and not aot and not multiprocess and not netlab and not gpu
FAST := not slow and not aot and not multiprocess and not netlab and not gpu

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-slow test-aot sanitize lint format clean FORCE

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(VENV)/.installed-demo ## train a small language model on 8 virtual devices
	$(BIN)/python examples/train_language_model.py --devices 8

test: lint test-fast ## ruff, mypy --strict, the fast tests and the doctests

test-fast: $(VENV)/.installed-test ## the fast tests and the doctests
	$(PYTEST) -n $(WORKERS) --doctest-modules -m "$(FAST)" jax_ring tests

test-slow: $(VENV)/.installed-test ## the tests that test-fast leaves out
	$(PYTEST) -n $(WORKERS) -m "$(SLOW)" tests
	$(PYTEST) -m "(multiprocess or netlab) and not aot and not gpu" tests

test-aot: $(VENV)/.installed-aot ## compile for 8 and 2 x 8 H200 and for 8 TPU v5e, and read the programs
	$(PYTEST) -m aot tests/aot

sanitize: $(VENV)/.installed-test ## the C++ tests under ASan+UBSan and TSan (needs libgtest-dev)
	tools/sanitize.sh $(BIN)/python

lint: $(VENV)/.installed-test ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict -p jax_ring

format: $(VENV)/.installed-test ## let ruff format and fix what it can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove what was made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find jax_ring tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Editable: an import hook takes jax_ring's Python files from here and the native module from the
# environment. So changed Python files count at once, and no working directory can put the bare,
# unbuilt folder in front of what was installed.
$(VENV)/.installed-demo: EXTRAS := examples
$(VENV)/.installed-test: EXTRAS := examples,test,dev
$(VENV)/.installed-demo $(VENV)/.installed-test: $(VENV)/.python $(BUILT_FROM)
	$(PIP) install --quiet --editable '.[$(EXTRAS)]' '$(JAX_REQUIREMENT)'
	@touch $@

# With the CUDA kernels, by this machine's nvcc or the one that jax[cuda13] brings.
$(VENV)/.installed-aot: $(VENV)/.python $(BUILT_FROM)
	$(PIP) install --quiet 'jax[cuda13]' libtpu '$(JAX_REQUIREMENT)'
	export CUDACXX=$$(command -v nvcc || echo $(abspath $(VENV))/lib/python3*/site-packages/nvidia/cu13/bin/nvcc) && \
	  JAX_RING_CUDA=1 SKBUILD_CMAKE_DEFINE=JAX_RING_CUDA_ARCHITECTURES=90-real \
	  $(PIP) install --quiet --editable '.[examples,test]' '$(JAX_REQUIREMENT)'
	@touch $@

$(VENV)/.python: $(VENV)/.wanted
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jax_ring needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(if $(wildcard $@),--clear) $(VENV)
	@echo '$(WANTED)' > $(VENV)/.wanted
	@touch $@

$(VENV)/.wanted: FORCE
	@mkdir -p $(VENV)
	@echo '$(WANTED)' | cmp -s - $@ || echo '$(WANTED)' > $@
