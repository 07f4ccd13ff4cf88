# leakscope: setup build demo test check eval fuzz bench. Every target sets up what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: setup system-packages samples build demo test check eval fuzz bench gpu-check clean

setup: system-packages $(VENV)/.installed

# Debian packages, a mounted tracefs: needs root; as an ordinary user everything but `record` works without.
system-packages:
	@tools/system-packages.sh base

$(VENV)/.installed: pyproject.toml
	@tools/make-venv.sh "$(PYTHON)" "$(VENV)"
	@touch $@

samples: setup
	@$(MAKE) -s -C samples

build: setup
	$(BIN)/pip wheel -q --no-deps -w dist .

demo: samples
	@$(BIN)/python samples/demo.py

test: samples
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Grades `leakscope attribute` on a folder of leak cases (LEAKSCOPE_CASES).
eval: setup
	@tools/eval.sh "$(BIN)"

fuzz: setup
	LEAKSCOPE_HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -m "fuzz or not fuzz" -k "hypothesis or fuzz or hostile or random or damage" tests

bench: samples
	@tools/system-packages.sh bench
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# What needs a real GPU: the CUDA sample against the installed driver.
gpu-check: samples
	@tools/gpu-check.sh "$(BIN)"

clean:
	rm -rf $(VENV) build dist *.egg-info
	$(MAKE) -s -C samples clean
