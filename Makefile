# Every target works in a fresh clone that has Python >= 3.11 and a C++ compiler; the first one fills .venv.
PYTHON ?= python3
# Arguments for the program behind a target, e.g. make demo ARGS="--steps 3", make test ARGS="-k zoo".
ARGS ?=

# KvikIO's tests run over a stub of the CUDA driver, without the 1.2 GB of CUDA packages that it asks for. Where it cannot
# be installed, they are skipped and say so.
KVIKIO := kvikio-cu13 libkvikio-cu13 rapids-logger

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint docs format bench clean

help:
	@echo "make demo      train a small GPT-2 with and without offloading: loss, memory, time"
	@echo "make test      run the tests that take seconds"
	@echo "make test-all  run all tests"
	@echo "make lint      ruff and pyright"
	@echo "make docs      build the site of docs/ into site/; a warning is an error"
	@echo "make format    let ruff rewrite the sources"
	@echo "make bench     paired comparison of step time and memory"
	@echo "make clean     remove .venv, caches and build output"
	@echo "ARGS=... goes to the program behind demo, test, test-all, docs and bench."

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "%s is Python %d.%d; ssdtrain-fx needs 3.11 or newer. Name one: make PYTHON=python3.12 ..." % ((sys.executable,) + sys.version_info[:2]))'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --constraint constraints.txt --editable '.[dev]'
	-$(BIN)/python -m pip install --constraint constraints.txt --no-deps $(KVIKIO)
	@touch $@

demo: $(INSTALLED)
	$(BIN)/ssdtrain-fx demo $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

docs: $(INSTALLED)
	$(BIN)/mkdocs build --strict $(ARGS)

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(INSTALLED)
	$(BIN)/ssdtrain-fx bench $(ARGS)

clean:
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis ssdtrain_fx.egg-info
	find ssdtrain_fx tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
