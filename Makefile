# Every target works in a fresh clone that has Python >= 3.11 and a C++ compiler. Each installs its own extra into .venv.
PYTHON ?= python3
# Arguments for the program behind a target, e.g. make demo ARGS="--steps 3", make test ARGS="-k zoo".
ARGS ?=
# Another version of torch gets a separate environment, e.g. make TORCH=2.11.0 test.
PINNED_TORCH := 2.13.0
TORCH ?= $(PINNED_TORCH)
VENV ?= .venv$(patsubst %,-torch-%,$(filter-out $(PINNED_TORCH),$(TORCH)))
# The versions of all packages but torch.
CONSTRAINTS ?= constraints.txt

# KvikIO's tests run over a stub of the CUDA driver, without the 1.2 GB of CUDA packages that it asks for. Where it cannot
# be installed, they are skipped and say so.
KVIKIO := kvikio-cu13 libkvikio-cu13 rapids-logger

# The tests of Triton's kernels need no GPU, but the Triton that this torch goes with. It is not on the path of the other
# tests, whose start it would slow down. Where it cannot be installed, they are skipped and say so.
TRITON := triton==3.7.1

# What the tests of DeepSpeed, torchtitan and torchao need beside it. None is on the path of the other tests. torchtitan 0.3
# needs this version of spmd_types, whatever is newest.
PROGRAMS := deepspeed einops hjson msgpack ninja py-cpuinfo \
	torchtitan docstring_parser shtab spmd_types==0.2.3 torch_checkpointing torchdata typeguard tyro \
	torchao

BIN := $(VENV)/bin
# Tests run in as many processes as there are cores, but no more than fit into the memory of most machines.
PARALLEL := -n logical --maxprocesses 4 --dist worksteal
# --no-compile: Python compiles the files that it imports, once. pip would compile all of them, which doubles its processor
# time. So Python must be allowed to keep what it has compiled: without, each process needs 10 s to import torch, not 4.
PIP_INSTALL := $(BIN)/python -m pip install --no-compile $(addprefix --constraint ,$(CONSTRAINTS))
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help same-python demo test test-all newest lint docs format bench gpu clean

help:
	@echo "make demo      train a small GPT-2 with and without offloading: loss, memory, time"
	@echo "make test      run the tests that take seconds"
	@echo "make test-all  run all tests"
	@echo "make newest    run the tests of trainers with the newest release of each dependency except torch"
	@echo "make lint      ruff, pyright and import-linter"
	@echo "make docs      build the site of docs/ into site/; a warning is an error"
	@echo "make format    let ruff rewrite the sources"
	@echo "make bench     paired comparison of step time and memory"
	@echo "make gpu       on a machine with a CUDA GPU: the tests that need one, then the comparison of benchmarks/gpu.py"
	@echo "make clean     remove the environments, caches and build output"
	@echo "ARGS=... goes to the program behind demo, test, test-all, docs, bench and gpu."
	@echo "PYTHON=python3.12 and TORCH=2.15.0 choose what a new environment is made of."

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "%s is Python %d.%d; ssdtrain-fx needs 3.11 or newer. Name one: make PYTHON=python3.12 ..." % ((sys.executable,) + sys.version_info[:2]))'
	$(PYTHON) -m venv $(VENV)

# An environment keeps the Python that made it, so another one that is named must not go unnoticed.
same-python: $(BIN)/pip
ifneq ($(origin PYTHON),file)
	@made="$$($(BIN)/python --version)"; named="$$($(PYTHON) --version)"; test "$$made" = "$$named" || \
	{ echo "$(VENV) was made by $$made, not by $$named. Name another directory: make VENV=.venv-other ..." >&2; exit 1; }
endif

$(VENV)/.installed-%: pyproject.toml constraints.txt Makefile | same-python
	$(PIP_INSTALL) torch==$(TORCH) --editable '.[$*]'
	$(if $(filter test,$*),-$(PIP_INSTALL) --no-deps $(KVIKIO))
	$(if $(filter test$(PINNED_TORCH),$*$(TORCH)),-$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/triton $(TRITON))
	$(if $(filter test$(PINNED_TORCH),$*$(TORCH)),-$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/programs $(PROGRAMS))
	@touch $@

demo: $(VENV)/.installed-demo
	$(BIN)/ssdtrain-fx demo $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" $(ARGS)

test-all: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

# tests/trainers is what other people's releases break first.
newest:
	$(MAKE) CONSTRAINTS= VENV=$(VENV)-newest $(VENV)-newest/.installed-test
	$(VENV)-newest/bin/python -m pytest $(PARALLEL) tests/trainers $(ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict $(ARGS)

format: $(VENV)/.installed-lint
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.installed-demo
	$(BIN)/ssdtrain-fx bench $(ARGS)

# Every part runs, whatever became of those before. The exit code, which make prints, is that of the first that failed.
gpu: $(VENV)/.installed-test
	@failed=0; \
	run() { echo "$$*"; "$$@" || { code=$$?; test "$$failed" -ne 0 || failed=$$code; }; }; \
	run $(BIN)/python -m pytest -m gpu tests/gpu tests/runtime/memory/test_cuda.py; \
	run $(BIN)/python -m pytest tests/simulated --real-device; \
	if command -v compute-sanitizer >/dev/null; then \
		run compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python -m pytest -m gpu tests/runtime/memory/test_cuda.py; \
	else echo "compute-sanitizer is not on the PATH: skipped"; fi; \
	run $(BIN)/python benchmarks/gpu.py $(ARGS); \
	exit $$failed

clean:
	rm -rf .venv .venv-* build dist site .pytest_cache .ruff_cache .hypothesis ssdtrain_fx.egg-info
	find ssdtrain_fx tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
