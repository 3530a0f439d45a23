# make train and make test each set up all they need. Nothing but Python 3.11, pip, gcc and make is needed.

PYTHON ?= python3
VENV ?= .venv
# Further options for pip, such as an index that has a CPU build of torch.
PIP_OPTIONS ?=
FLAGS ?=
# Three processes share the tests, on two cores too: each often waits for ranks to start and to answer.
WORKERS ?= -n 3 --dist worksteal

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_OPTIONS)
# torch's CUDA builds bring the Triton that they need, so it is in no file of constraints. Its interpreter needs no GPU.
TRITON := triton==3.9.0
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)
DEFINED := pyproject.toml constraints.txt

# Many processes import the source: each would compile all of it anew where this is set.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help train test test-all coverage lint types pages table docs gpu gpu-wheels clean
.DEFAULT_GOAL := help

help:
	@echo "make train   train on the built-in data set with 2 local ranks (FLAGS=... adds flags)"
	@echo "make test    lint, types, and the tests; of long ones that repeat what others prove only some"
	@echo "make test-all  lint, types, and all tests"
	@echo "make coverage  all tests again, and which lines they run"
	@echo "make lint    ruff, mypy and the check of pages alone"
	@echo "make table   write docs/convolutions.md anew"
	@echo "make docs    the site, in build/docs"
	@echo "make gpu     checks and figures on this machine's GPU, with its own Python and torch (STEPS=... names some)"
	@echo "make gpu-wheels  the packages that such a machine may lack, in .whl, to carry there"
	@echo "make clean   remove the environment and what tools left behind"

train: $(VENV)/.ready-train
	@$(BIN)/kagome train $(FLAGS)

test: lint
	@echo "== tests"
	@$(BIN)/python -m pytest $(WORKERS)

# With the variants and slow ones that `make test` leaves out (tests/shorter.py): half as long again.
test-all: lint
	@echo "== all tests"
	@$(BIN)/python -m pytest --all-tests $(WORKERS)

# Half as long again as the tests alone: processes that tests start are counted too.
coverage: $(VENV)/.ready-test
	@rm -f .coverage .coverage.*
	@COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml COVERAGE_FILE=$(CURDIR)/.coverage \
		$(BIN)/python -m coverage run -m pytest
	@COVERAGE_FILE=$(CURDIR)/.coverage $(BIN)/python -m coverage combine --quiet
	@COVERAGE_FILE=$(CURDIR)/.coverage $(BIN)/python -m coverage report --skip-covered --fail-under=85

lint: $(VENV)/.ready-test
	@echo "== ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@echo "== mypy and pages"
	@$(MAKE) --no-print-directory --jobs 2 types pages

types: $(VENV)/.ready-test
	@$(BIN)/mypy

# What `make docs` would warn of: pages and docstrings are read and their links looked up, but no site is written,
# which takes three quarters of the time. Always all pages: one that was read before warns no more.
pages: $(VENV)/.ready-test
	@$(BIN)/python -m sphinx -W --keep-going -q -E -b dummy -c docs . build/pages

table: $(VENV)/.ready-test
	@$(BIN)/python -m tests.conv_table

# README is the front page; a server looks for index.html.
docs: $(VENV)/.ready-docs
	@echo "== docs"
	@$(BIN)/python -m sphinx -W --keep-going -q -j auto -c docs . build/docs || { rm -rf build/docs/.doctrees; exit 1; }
	@cp build/docs/README.html build/docs/index.html

# On a machine with a GPU that may reach no package registry: its own Python, which has torch with CUDA and PyG.
# Wheels that were carried along are installed beside it. Results: benchmarks/gpu/runs, or GPU_OUT.
GPU_OUT ?= benchmarks/gpu/runs
STEPS ?=
gpu:
	@if ls .whl/*.whl >/dev/null 2>&1; then \
		$(PYTHON) -m pip install -q --no-index --no-deps --no-compile --upgrade --target build/gpu-site .whl/*.whl; fi
	@PYTHONPATH=build/gpu-site PYTHONUNBUFFERED=1 $(PYTHON) benchmarks/gpu/main.py --out $(GPU_OUT) $(STEPS)

# For GPU_PYTHON on x86-64 Linux. They take half a MiB.
GPU_PYTHON ?= 3.12
gpu-wheels:
	@$(PYTHON) -m pip download -q --no-deps --only-binary=:all: --implementation cp --python-version $(GPU_PYTHON) \
		$(foreach tag,2_28 2_27 2_24 2_17,--platform manylinux_$(tag)_x86_64) -d .whl -c constraints.txt \
		pymetis tyro docstring-parser typeguard

clean:
	rm -rf $(VENV) .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist docs/code
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment. torch goes first, pinned, so that no other package can choose its build.
$(VENV)/.ready-train: $(DEFINED)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Kagome needs Python 3.11 or newer: make PYTHON=python3.11")'
	@test -x $(BIN)/python || { echo "== new environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "== install torch"
	@$(PIP) "$(TORCH)"
	@echo "== install kagome"
	@$(PIP) -e ".[data]"
	@touch $@

$(VENV)/.ready-test: $(VENV)/.ready-train
	@echo "== install what tests need"
	@$(PIP) -e ".[data,tensorboard,dev]"
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) "$(TRITON)" \
		|| echo "no Triton for this machine: the tests of its kernels are skipped"
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready-train
	@echo "== install what the site needs"
	@$(PIP) -e ".[docs]"
	@touch $@
