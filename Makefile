# Every command here works from a clean checkout: it sets up .venv first if that is missing or out of date.

# An installed python3.11 can be a stub that only says which versions exist, so ask it to run.
PYTHON ?= $(shell python3.11 -c 'print("python3.11")' 2>/dev/null || echo python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train test test-all test-cluster test-stores lint bench bench-checkpoint bench-order bench-overhead wheel clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 14

setup: .venv/.stamp ## make .venv from requirements.lock, or reuse it

train: .venv/.stamp ## train the built-in recipe; ARGS="digits --nproc 2" is passed on
	$(BIN)/unisono train $(ARGS)

test: .venv/.stamp ## run the tests, without the slow ones; ARGS is passed to pytest
	$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

test-all: .venv/.stamp ## run every test that needs nothing but this machine's Python
	$(BIN)/python -m pytest -m "not cluster" $(ARGS)

test-cluster: .venv/.stamp ## run on hosts simulated here (as root; needs iproute2; uses mpirun and Slurm where installed)
	$(BIN)/python -m pytest -m cluster $(ARGS)

test-stores: .venv-stores/.stamp ## stage from and to a server that speaks S3 (an environment of its own; one more minute)
	PYTHONPATH=src .venv-stores/bin/python -m pytest -c /dev/null --rootdir . tests/stores $(ARGS)

lint: .venv/.stamp ## check style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

bench: .venv-bench/.stamp ## measure a step beside raw DDP, FSDP2, Accelerate, Fabric and DeepSpeed (an environment of its own)
	PYTHONPATH=src .venv-bench/bin/python -m unisono bench $(ARGS)

bench-checkpoint: .venv/.stamp ## measure a checkpoint beside torch.save and torch.distributed.checkpoint
	$(BIN)/python benchmarks/checkpoint.py $(ARGS)

bench-order: .venv/.stamp ## measure the sample order against what others do
	$(BIN)/python benchmarks/order.py $(ARGS)

bench-overhead: .venv/.stamp ## measure what the engine adds to a step of one process
	$(BIN)/python benchmarks/overhead.py

wheel: .venv/.stamp ## build dist/*.whl
	@# setuptools would pack files that an older build/ still holds.
	rm -rf build
	$(BIN)/python -m build --wheel --no-isolation

clean: ## remove what was built and cached; .venv and runs/ stay
	rm -rf build dist src/*.egg-info .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Two stamps, so that an edit of pyproject.toml costs seconds and only a new lock costs a new environment.
.venv/.lock-stamp: requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "unisono needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1); set PYTHON=... to another one." >&2; \
	    exit 1; }
	@echo "Setting up .venv from requirements.lock (once; one to five minutes with a CPU torch, more where torch brings CUDA) ..."
	@$(PYTHON) -m venv --clear .venv
	@$(PIP) -r requirements.lock
	@touch $@

.venv-stores/.stamp: requirements-stores.lock
	@$(PYTHON) -m venv --clear .venv-stores
	@.venv-stores/bin/python -m pip --disable-pip-version-check -qq install -r requirements-stores.lock
	@touch $@

.venv-bench/.stamp: requirements-bench.lock
	@$(PYTHON) -m venv --clear .venv-bench
	@.venv-bench/bin/python -m pip --disable-pip-version-check -qq install -r requirements-bench.lock
	@touch $@

.venv/.stamp: .venv/.lock-stamp pyproject.toml
	@echo "Installing unisono into .venv (a few seconds) ..."
	@# The build uses the pinned setuptools of .venv: nothing is downloaded, and it is the same everywhere.
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@
