# make demo     on a fresh clone: environment, installation, demo model, an answer
# make test     on a fresh clone: environment, installation, demo model, all tests
# make test-unchecked the tests of the executor, its memory and the scheduler once more, without assertions on memory
# make test-all the same, each case on every kind of emulated GPU instead of on one of them; an hour
# make test-gpu the tests that use a GPU, on this machine's; needs CuPy
# make sanitize the kernel tests under compute-sanitizer's four tools; needs CuPy, an NVIDIA GPU and its toolkit
# make lint     ruff and mypy
# make docs     docs/cli.md anew, from what --help says
# make compile  every kernel for sm_90, in a few variants, and for gfx1151 and gfx942, by the vendors' compilers; needs no GPU
# make compile-all  for all supported kinds of GPUs, with limits on shared memory and on registers in memory; minutes
# make clean    remove the environment and all caches of this folder
#
# PYTHON=... chooses the interpreter for the environment; for test-gpu it is the one that runs the tests, with CuPy,
# pytest and what pyllm needs installed (default: that of .venv). PYLLM_OFFLINE=1 skips what needs the demo model, unless
# it has been fetched before.

# A test takes one core; all of them are used.
PARALLEL := -n auto --dist worksteal
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=

UNCHECKED_TESTS := $(addprefix tests/unit/test_,$(addsuffix .py,memory_check arena executor zero_copy kv_cache random_schedules scheduler running_ahead)) \
    tests/models/test_bit_equal.py tests/models/test_inputs.py
GPU_TESTS := tests/ops tests/device $(addprefix tests/models/test_,kernel_lives.py inputs.py hybrids_on_gpu.py \
    kept_on_devices.py batch_invariance.py) \
    tests/unit/test_executor.py tests/unit/test_zero_copy.py

.PHONY: demo test test-all test-unchecked test-gpu sanitize lint docs compile compile-all clean

demo: $(VENV)/.installed
	$(BIN)/pyllm pull demo > /dev/null
	$(BIN)/pyllm run demo --temp 0 "What is the capital of France?"

test: $(VENV)/.installed-dev
	[ "$${PYLLM_OFFLINE:-0}" != 0 ] || $(BIN)/pyllm pull demo > /dev/null
	PYLLM_CHECK=1 $(BIN)/python -m pytest $(PARALLEL) -m "not serial"
	PYLLM_CHECK=1 $(BIN)/python -m pytest -m serial

test-all: $(VENV)/.installed-dev
	PYLLM_ALL_LIVES=1 $(BIN)/python -m pytest $(PARALLEL)

test-unchecked: $(VENV)/.installed-dev
	PYLLM_CHECK=0 $(BIN)/python -m pytest $(PARALLEL) $(UNCHECKED_TESTS) -k "not emulated"

# The first line fails with one sentence where CuPy or the GPU is missing, and says which GPU it is.
test-gpu: $(if $(PYTHON),,$(VENV)/.installed-dev)
	@$(or $(PYTHON),$(BIN)/python) -m pyllm kernels test add --device gpu > /dev/null
	PYLLM_TEST_GPU=1 $(or $(PYTHON),$(BIN)/python) -m pytest $(GPU_TESTS) -k gpu

# Kernels are compiled first: a compiler under a memory checker takes minutes. Fresh memory is poisoned by a write, which
# initcheck would take for the program's; pyllm's arenas ask CUDA for memory themselves, so that blocks have bounds.
sanitize: $(if $(PYTHON),,$(VENV)/.installed-dev)
	$(or $(PYTHON),$(BIN)/python) -m pyllm kernels test --device gpu --small > /dev/null
	for tool in memcheck racecheck initcheck synccheck; do \
	    PYLLM_POISON=0 compute-sanitizer --tool $$tool --error-exitcode 9 \
	        $(or $(PYTHON),$(BIN)/python) -m pyllm kernels test --device gpu --small > $$tool.log 2>&1 \
	        && tail -n 2 $$tool.log || { tail -n 40 $$tool.log; exit 1; }; \
	    rm $$tool.log; \
	done

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed
	$(BIN)/python -m tools.cli_reference

compile: $(VENV)/.installed-compile
	$(BIN)/python -m pyllm.device.compile_check

compile-all: $(VENV)/.installed-compile
	$(BIN)/python -m pyllm.device.compile_check --all

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are older than setup.cfg when dependencies may have changed.
$(VENV)/.installed: setup.cfg pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-dev: setup.cfg pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-compile: setup.cfg pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[compile]'
	@touch $@

$(BIN)/pip:
	@for python in $(if $(PYTHON),"$(PYTHON)",python3 python3.14 python3.13 python3.12 python3.11); do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        echo "$$python -m venv $(VENV)"; \
	        "$$python" -m venv $(VENV) && exit 0; \
	        rm -rf $(VENV); \
	        echo "Error: $$python cannot make a virtual environment (see above)" >&2; exit 1; \
	    fi; \
	done; \
	echo "Error: pyllm needs Python 3.11 or newer; found $$("$(or $(PYTHON),python3)" --version 2>&1); try make PYTHON=/path/to/python3" >&2; \
	exit 1
