# make help lists the commands.
SHELL := /bin/bash
PYTHON ?= python3
BIN := $(CURDIR)/.venv/bin
PROJECT := build/my-project

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

train: .venv/installed ## Generate a project with the default answers and train it on 2 processes
	cd $(PROJECT) && PATH="$(BIN):$$PATH" $(MAKE) --no-print-directory train

test: .venv/installed ## The tests: about 5 minutes, no root
	cd template && $(BIN)/pytest -q -m "not slow and not gpu"
	$(BIN)/pytest -q -m "not slow and not root"

test-all: .venv/installed ## All tests, the slow and the privileged ones too
	cd template && $(BIN)/pytest -q
	$(MAKE) --no-print-directory test-cpus
	$(BIN)/pytest -q

# On another CPU sums round otherwise: what is tested of numbers must not follow from the last bit.
NUMERIC := $(addprefix tests/test_,batches.py embedding.py evaluation.py metrics.py optim.py resume.py same_curve.py segmentation.py sharded.py streams.py)
test-cpus: .venv/installed ## The numeric tests with the instructions of older CPUs
	cd template && ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(BIN)/pytest -q -m "not slow and not gpu" $(NUMERIC)
	cd template && ATEN_CPU_CAPABILITY=avx2 $(BIN)/pytest -q -m "not slow and not gpu" $(NUMERIC)

test-gpu: .venv/installed ## What only GPUs can show (1, 2, 4 or 8 of them), as a table
	$(BIN)/python benchmarks/gpu.py

lint: .venv/installed ## Formatting, lint, types, shell scripts
	PATH="$(BIN):$$PATH" $(MAKE) --no-print-directory -C template lint
	$(BIN)/ruff format --check . recipes/copy_recipe.py
	$(BIN)/ruff check . recipes/copy_recipe.py
	$(BIN)/pyright
	$(BIN)/shellcheck .ci/run

bench: .venv/installed ## The loop against hand-written PyTorch, in one run
	PATH="$(BIN):$$PATH" $(BIN)/python benchmarks/loop.py

clean: ## Remove what make has built, the trained runs included
	rm -rf .venv build

# Cookiecutter copies the whole folder, .venv included, so it is given what git tracks.
$(PROJECT): | .venv/bin/cookiecutter
	rm -rf build/tracked && mkdir -p build/tracked
	git ls-files -z | xargs -0 cp --parents --no-dereference -t build/tracked
	$(BIN)/cookiecutter --no-input --output-dir build build/tracked

.venv/bin/uv:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check uv

.venv/bin/cookiecutter: | .venv/bin/uv
	$(BIN)/uv pip install --quiet --python .venv --group dev

# The project lists what its own recipe needs, the template what all of them do.
.venv/installed: pyproject.toml template/pyproject.toml | $(PROJECT)
	$(BIN)/uv pip install --quiet --compile-bytecode --python .venv --group dev --requirements template/pyproject.toml --all-extras --editable $(PROJECT)
	touch $@

.PHONY: help train test test-all test-cpus test-gpu lint bench clean
