# leakscope: setup build demo test test-both check eval fuzz bench ci-sample. Every target sets up what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# Hundreds of short processes run from here: without bytecode each would compile the package anew (0.2 s).
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup system-packages samples programs nvtx build demo test test-both check eval fuzz bench ci-sample gpu-check gpu-bundle clean

setup: system-packages $(VENV)/.installed

# Debian packages, a mounted tracefs: needs root; as an ordinary user everything but `record` works without.
system-packages:
	@tools/system-packages.sh base

$(VENV)/.installed: pyproject.toml
	@tools/make-venv.sh "$(PYTHON)" "$(VENV)"
	@touch $@

samples: setup
	@$(MAKE) -s -C samples

# The probes as an object for libbpf, where clang is: hosts that record then need no compiler.
programs: nvtx
	@if command -v clang >/dev/null; then $(MAKE) -s -C bpf_programs; else echo "no clang: not building bpf_programs/leakscope.bpf.o" >&2; fi

# The library that NVTX loads into a target so that its ranges are recorded: gcc alone.
nvtx: system-packages
	@$(MAKE) -s -C bpf_programs/nvtx

build: setup programs
	$(BIN)/pip wheel -q --no-deps -w dist .

demo: samples programs
	@$(BIN)/python samples/demo.py

# Two processes: one for all that records, the other for the rest.
TESTS := $(BIN)/python -m pytest -n 2

test: samples programs
	@tools/system-packages.sh test
	$(TESTS)

# The same with every recording made under both loaders, which takes about twice as long.
test-both: samples programs
	@tools/system-packages.sh test
	LEAKSCOPE_TEST_LOADER=both $(TESTS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Verdicts on generated series beside other rules (minutes) and on a folder of leak cases (LEAKSCOPE_CASES), as they are and
# perturbed; then 100 recordings of a clean sample and 100 of a leaking one (LEAKSCOPE_EVAL_RECORDINGS), of which
# `leakscope check` may misjudge none.
eval: samples programs
	@tools/eval.sh "$(BIN)"

fuzz: setup
	LEAKSCOPE_FUZZ_ROUNDS=10000 LEAKSCOPE_HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -m "fuzz or not fuzz" -k "hypothesis or fuzz or hostile or random or damage" tests

bench: samples programs
	@tools/system-packages.sh bench
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# `leakscope check` on the captured traces of samples/ci, as a CI job would; they are made by samples/ci/record.py.
ci-sample: setup
	@tools/ci-sample.sh "$(BIN)"

# What needs a real GPU, in one run without network; without one it says of each step why it is not possible.
gpu-check:
	@[ ! -x $(BIN)/python ] || $(MAKE) -s samples programs
	@tools/gpu-check.sh "$(BIN)" $(GPU_CHECK_ARGS)

# For a GPU host without network: build/gpu-bundle, which then travels with the built tree.
gpu-bundle: samples programs
	@tools/gpu-bundle.sh "$(BIN)" $(GPU_PYTHON)

clean:
	rm -rf $(VENV) build dist *.egg-info
	$(MAKE) -s -C samples clean
	$(MAKE) -s -C bpf_programs/nvtx clean
