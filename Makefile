# make help lists the commands.
SHELL := /bin/bash
PYTHON ?= python3
BIN := $(CURDIR)/.venv/bin
GENERATED := build/my-project

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

train: .venv/installed ## Generate a project with the default answers and train it on 2 processes
	cd $(GENERATED) && PATH="$(BIN):$$PATH" $(MAKE) --no-print-directory train WHERE=cpu_2_processes
	@echo "For the next commands: cd $(GENERATED) && source $(BIN)/activate"

# as in template/Makefile
WORKERS ?= --numprocesses logical --maxprocesses 4 --dist worksteal
IN_PROJECT := $(BIN)/python tests/in_project.py
test: .venv/installed ## Run the quick tests: under 3 minutes, no root
	$(IN_PROJECT) template $(WORKERS) -m "not slow and not gpu"
	$(BIN)/pytest -q $(WORKERS) -m "not slow and not root"

# The tests on two hosts run one after the other, and mostly wait. The others run beside them, so
# time limits are doubled.
test-all: .venv/installed ## Run all tests, with the slow ones and those that need root
	@echo "Two groups of tests run side by side; each prints its results when it has ended"
	TEST_PATIENCE=$${TEST_PATIENCE:-2} $(MAKE) --no-print-directory --jobs 2 --output-sync=line test-two-hosts test-one-host

test-two-hosts: .venv/installed
	$(BIN)/pytest -q -m root

test-one-host: .venv/installed
	$(IN_PROJECT) template $(WORKERS)
	$(MAKE) --no-print-directory test-cpus
	$(BIN)/pytest -q $(WORKERS) -m "not root"

test-loop: .venv/installed ## Run the tests of the loop against a project: PROJECT=path ARGS="-k resume"
	$(IN_PROJECT) $(or $(PROJECT),template) $(WORKERS) -m "not slow and not gpu" $(ARGS)

# Sums round differently on other CPUs, and no numeric test may depend on the last bit. With AVX2,
# those in template/tests run in tests/test_lowest_versions.py, so only tests/loop runs here.
NUMERIC := $(patsubst %,tests/%.py,$(addprefix test_,loader evaluation metrics resume same_curve) $(addprefix loop/test_,optim sharded streams) $(addprefix recipes/test_,embedding segmentation))
test-cpus: .venv/installed ## Run the numeric tests with the instruction sets of older CPUs
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(IN_PROJECT) template $(WORKERS) -m "not gpu" $(NUMERIC)
	ATEN_CPU_CAPABILITY=avx2 $(IN_PROJECT) template $(WORKERS) -m "not gpu" $(filter tests/loop/%,$(NUMERIC))

test-gpu: .venv/installed ## Test and measure on 1, 2, 4 or 8 GPUs, and print a table
	$(BIN)/python benchmarks/gpu.py

lint: .venv/installed ## Check formatting, lint, types and shell scripts
	PATH="$(BIN):$$PATH" $(MAKE) --no-print-directory -C template lint
	$(BIN)/ruff format --check . recipes/copy_recipe.py
	$(BIN)/ruff check . recipes/copy_recipe.py
	$(BIN)/pyright
	$(BIN)/shellcheck .ci/run

bench: .venv/installed ## Time the loop and hand-written PyTorch in one run; PEERS=1 adds other libraries
	$(BIN)/python benchmarks/loop.py $(if $(PEERS),--peers)

faults: .venv/installed ## Test doctor, messages and resuming: 60 faults, wrong recipes, 100 sound runs, 216 kills, lost nodes: 90 minutes, partly as root
	$(BIN)/python tests/faults.py
	$(BIN)/python tests/faults.py --files
	$(BIN)/python tests/silence.py
	$(BIN)/python tests/faults.py --sound 100
	$(BIN)/python benchmarks/kills.py --kills 100 --processes 2 1 4 3 2
	$(BIN)/python tests/faults.py --kills-of-launch 56
	$(BIN)/python tests/node_faults.py
	$(BIN)/python tests/mirror_kills.py

clean: ## Remove the environment and the generated project with its runs
	rm -rf .venv build

# Cookiecutter copies a whole folder, .venv included, so it is given a copy of the tracked files.
$(GENERATED): | .venv/bin/cookiecutter
	rm -rf build/tracked && mkdir -p build/tracked
	git ls-files -z | xargs -0 cp --parents --no-dereference -t build/tracked
	$(BIN)/cookiecutter --no-input --output-dir build build/tracked

.venv/bin/uv:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check uv

.venv/bin/cookiecutter: | .venv/bin/uv
	$(BIN)/uv pip install --quiet --python .venv --group dev

# The project lists the libraries of its own recipe; the template lists those of all recipes.
.venv/installed: pyproject.toml template/pyproject.toml | $(GENERATED)
	@echo "Installing into .venv, about 7 GB: 1 to 3 minutes"
	$(BIN)/uv pip install --quiet --compile-bytecode --python .venv --group dev --requirements template/pyproject.toml --all-extras --editable $(GENERATED)
	touch $@

.PHONY: help train test test-all test-two-hosts test-one-host test-loop test-cpus test-gpu lint bench faults clean
