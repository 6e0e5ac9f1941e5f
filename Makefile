# `make bench` and `make test` are the two commands of a fresh machine. Each sets up all it needs: a virtual environment
# in .venv with the versions of constraints.txt. `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SHAPE := .typecheck
WHAT ?= disturbed
MODELS ?= 2000
SEED ?= 1
WORKERS ?= 2
# Those of noxfile.py, and where their environments are kept: outside of the checkout.
VERSIONS ?= 2.11.0 2.12.1 2.13.0 2.14.1 2.15.0
PYTHONS ?= 3.12 3.13 3.14
VERSIONS_FOLDER ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/compiled-ddp-versions
TRAINERS_FOLDER ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/compiled-ddp-trainers
MODELS_FOLDER ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/compiled-ddp-models
# What `make results` measures, in the order of RUNS in benchmarks/remeasure.py. MODELS_PYTHON and NEWEST_PYTHON name the
# Pythons of environments that are there already, with transformers and with the newest torch.
RUNS ?= readme-1gbit readme-loopback 1gbit loopback 1gbit-float16 train compare-mlp compare-gpt2 torch-rows-1gbit torch-rows-loopback
MODELS_PYTHON ?=
NEWEST_FOLDER ?= $(VERSIONS_FOLDER)/results
NEWEST_PYTHON ?=
# Not .venv, which may have a torch for the CPU alone. GPU_PYTHON names the Python of an environment that is there already.
GPU_FOLDER ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/compiled-ddp-gpu
GPU_PYTHON ?=
WITHOUT_GPU := $(findstring --device cpu,$(ARGS))$(findstring --device=cpu,$(ARGS))

# Inductor takes g++ unless $CXX names another compiler; where only clang++ is installed, name that. Make's own default
# for CXX is no choice of the user's.
ifeq ($(origin CXX),default)
CXX := $(if $(shell command -v g++),g++,$(if $(shell command -v clang++),clang++,g++))
endif
export CXX

.DEFAULT_GOAL := help
.PHONY: help bench results test long near versions pythons trainers models gpu fuzz lint format types docs clean check-python check-compiler check-gpu shape

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

bench: check-compiler $(STAMP) ## Train benchmark models under every variant and print the tables (ARGS="--help" for options)
	@echo "==> make bench: the comparison table, python -m benchmarks.compare $(ARGS)"
	$(BIN)/python -m benchmarks.compare $(ARGS)

# As root, for the link. An environment is made before the measuring begins, and no other than the runs need.
results: check-compiler $(STAMP) ## Measure anew what the documents' tables come from, and publish it (RUNS="loopback train" picks some, ARGS=--list tells how long)
	@echo "==> make results: python -m benchmarks.remeasure $(RUNS) $(ARGS)"
ifneq ($(filter compare-gpt2,$(RUNS)),)
ifeq ($(MODELS_PYTHON)$(findstring --list,$(ARGS)),)
	$(PYTHON) -m venv $(MODELS_FOLDER)
	$(MODELS_FOLDER)/bin/python -m pip install --quiet -c constraints.txt -e '.[test,bench,models]'
endif
endif
ifneq ($(filter torch-rows-%,$(RUNS)),)
ifeq ($(NEWEST_PYTHON)$(findstring --list,$(ARGS)),)
	$(PYTHON) -m venv $(NEWEST_FOLDER)
	grep -v -e '^setuptools==' -e '^torch==' -e '^triton==' constraints.txt | cat - constraints-newest.txt > $(NEWEST_FOLDER)/constraints.txt
	$(NEWEST_FOLDER)/bin/python -m pip install --quiet -c $(NEWEST_FOLDER)/constraints.txt -e '.[test,bench]'
endif
endif
	$(BIN)/python -m benchmarks.remeasure $(RUNS) $(ARGS) \
	    --models-python $(or $(MODELS_PYTHON),$(MODELS_FOLDER)/bin/python) \
	    --newest-python $(or $(NEWEST_PYTHON),$(NEWEST_FOLDER)/bin/python)

test: check-compiler $(STAMP) ## Run the tests, two at a time, but for what `make long` runs (ARGS="-k name" picks some, WORKERS=0 runs one after the other)
	@echo "==> make test: python -m pytest -n $(WORKERS) --dist worksteal -m 'not slow' $(ARGS)"
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(ARGS)

long: check-compiler $(STAMP) ## Run the tests that `make test` leaves out: what takes long and has a shorter relative, and more combinations of parameters
	@echo "==> make long: python -m pytest -n $(WORKERS) --dist worksteal -m slow $(ARGS)"
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(ARGS)

near: check-compiler lint ## Run what a change needs in two minutes or so: ruff, and the round NEAR of noxfile.py (ARGS="tests/..." adds to it)
	@echo "==> make near: the round NEAR of noxfile.py, $(WORKERS) at a time"
	WORKERS="$(WORKERS)" $(BIN)/nox --session near -- $(ARGS)

versions: check-compiler $(STAMP) ## Run the tests but for slow ones on each admitted torch (VERSIONS="2.14.1" picks some, ARGS=quick or ARGS="tests/..." others)
	@echo "==> make versions: the tests on torch $(VERSIONS), environments in $(VERSIONS_FOLDER)"
	WORKERS="$(WORKERS)" $(BIN)/nox --envdir "$(VERSIONS_FOLDER)" --sessions ${VERSIONS:%="torch(%)"} -- $(ARGS)

pythons: check-compiler $(STAMP) ## Run the quick round of tests on each admitted Python that is installed (PYTHONS="3.14" picks some)
	@echo "==> make pythons: the quick round on Python $(PYTHONS), environments in $(VERSIONS_FOLDER)"
	WORKERS="$(WORKERS)" $(BIN)/nox --envdir "$(VERSIONS_FOLDER)" --sessions $(PYTHONS:%=python-%) -- $(ARGS)

trainers: check-compiler check-python ## Run Accelerate, transformers, Lightning, Ignite, Ray Train, TRL and TorchFT with our wrappers, in an environment of their own
	@echo "==> make trainers: python -m pytest tests/integrations and their pages, environment in $(TRAINERS_FOLDER)"
	$(PYTHON) -m venv $(TRAINERS_FOLDER)
	$(TRAINERS_FOLDER)/bin/python -m pip install --quiet -c constraints.txt -e '.[test,trainers]'
	$(TRAINERS_FOLDER)/bin/python -m pytest -p no:cacheprovider tests/integrations --ignore tests/integrations/test_real_models.py $(ARGS)
	$(TRAINERS_FOLDER)/bin/python -m pytest -p no:cacheprovider tests/test_documentation.py -k "snippets_of_page and trainers"

models: check-compiler check-python ## Train models of transformers, diffusers, peft and torch_geometric under both wrappers, in an environment of their own
	@echo "==> make models: python -m pytest tests/integrations/test_real_models.py, environment in $(MODELS_FOLDER)"
	$(PYTHON) -m venv $(MODELS_FOLDER)
	$(MODELS_FOLDER)/bin/python -m pip install --quiet -c constraints.txt -e '.[test,bench,models]'
	$(MODELS_FOLDER)/bin/python -m pytest -p no:cacheprovider tests/integrations/test_real_models.py $(ARGS)

gpu: check-gpu check-compiler ## Test and measure on all GPUs, and write a page to attach to a report (GPU_PYTHON=... takes an environment with a CUDA torch)
	@echo "==> make gpu: python -m benchmarks.gpu $(ARGS), by $(or $(GPU_PYTHON),an environment in $(GPU_FOLDER))"
ifeq ($(GPU_PYTHON),)
	$(PYTHON) -m venv $(GPU_FOLDER)
	$(GPU_FOLDER)/bin/python -m pip install --quiet -c constraints.txt -e '.[test,bench]'
endif
	$(or $(GPU_PYTHON),$(GPU_FOLDER)/bin/python) -m benchmarks.gpu $(ARGS)

fuzz: $(STAMP) ## Train random models and compare with autograd averaged by hand (WHAT=disturbed, models or hooks, MODELS=2000 SEED=1, ARGS="--help" for more)
	@echo "==> make fuzz: python -m fuzz.long_run --what $(WHAT) --models $(MODELS) --seed $(SEED) $(ARGS)"
	PYTHONPATH=tests $(BIN)/python -m fuzz.long_run --what $(WHAT) --models $(MODELS) --seed $(SEED) $(ARGS)

lint: $(STAMP) ## Check the sources with ruff
	@echo "==> make lint: ruff check"
	$(BIN)/ruff check

format: $(STAMP) ## Format the sources and apply ruff's safe fixes
	@echo "==> make format: ruff check --fix, ruff format"
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format

types: shape ## Type-check the package as it is installed
	@echo "==> make types: mypy of the installed shape"
	cd $(SHAPE) && ../$(BIN)/mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p compiled_ddp

docs: shape ## Build the documentation into site/, warnings being errors
	@echo "==> make docs: mkdocs build --strict"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean: ## Remove the virtual environment, caches and everything that was built
	@echo "==> make clean: remove $(VENV), caches and build output"
	rm -rf $(VENV) $(SHAPE) build dist site compiled_ddp.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The package as a user gets it: passes/ stands at compiled_ddp/passes, which mypy and mkdocstrings can read. A stale
# build/ would bring deleted modules back.
shape: $(STAMP)
	@echo "==> install the package's shape into $(SHAPE)"
	rm -rf build $(SHAPE)
	$(BIN)/python -m pip install --quiet --no-deps --target $(SHAPE) .

$(STAMP): pyproject.toml constraints.txt | check-python
	@echo "==> set-up: virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { \
	    echo "error: '$(PYTHON) -m venv' failed: the venv module or pip is missing."; \
	    echo "  Debian and Ubuntu: apt-get install python3-venv"; \
	    exit 1; }
	@echo "==> set-up: compiled-ddp and its tools, in the versions of constraints.txt"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

check-python:
	@command -v "$(PYTHON)" >/dev/null || { \
	    echo "error: '$(PYTHON)' was not found. Install Python 3.11 or newer, or name it: make PYTHON=/path/to/python3"; \
	    exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "error: Python 3.11 or newer is needed, '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1)."; \
	    echo "  Name a newer one: make PYTHON=python3.12"; \
	    exit 1; }

# Before gigabytes are installed.
check-gpu:
ifeq ($(WITHOUT_GPU),)
	@ls /dev/nvidia[0-9]* /dev/kfd /dev/dxg 2>/dev/null | grep -q . || { \
	    echo "error: no GPU was found here (/dev/nvidia0, /dev/kfd, /dev/dxg): run it where there is one, or what needs none: make gpu ARGS='--device cpu'"; \
	    exit 1; }
endif
ifneq ($(GPU_PYTHON),)
	@"$(GPU_PYTHON)" -c 'import compiled_ddp.passes, psutil, pytest, sklearn' 2>/dev/null || { \
	    echo "error: '$(GPU_PYTHON)' lacks this checkout or its tools: $(GPU_PYTHON) -m pip install -e '.[test,bench]'"; \
	    exit 1; }
endif

check-compiler: check-python
	@command -v $(firstword $(CXX)) >/dev/null || { \
	    echo "error: no C++ compiler: '$(firstword $(CXX))' was not found."; \
	    echo "  torch.compile's Inductor backend compiles its CPU kernels with one."; \
	    echo "  Debian and Ubuntu: apt-get install g++    Fedora: dnf install gcc-c++    macOS: xcode-select --install"; \
	    echo "  If one is installed elsewhere, or is called neither g++ nor clang++, name it: CXX=/path/to/g++ make ..."; \
	    exit 1; }
	@"$(PYTHON)" -c 'import os, sys, sysconfig; \
	    sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' || { \
	    echo "error: Python.h of '$(PYTHON)' was not found. Inductor's CPU kernels are compiled against it."; \
	    echo "  Debian and Ubuntu: apt-get install python3-dev    Fedora: dnf install python3-devel"; \
	    exit 1; }
