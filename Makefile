# make demo    the bundled model answers, streamed        make test    what a change must pass
# make lint    ruff and pyright                           make mutants break each law; ring 0 must notice
# make test-parallel    every layout of ranks, on every model and family
# make test-matrix    the variants of kernels and features that make test leaves out
# make test-clients, make test-ray    clients of other makers, and Ray, which these install
# make test-all    all of these                           make check-deploy    what is in deploy/
# make gpu ROWS="new table"    what only a GPU can show: tests and figures, into OUT
TORCH  ?= 2.13.0
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
OUT    ?= /tmp/pellucid-gpu

# Tests start hundreds of processes: each finds the modules compiled, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install demo test test-all test-parallel test-matrix test-clients test-ray lint mutants gpu eval check-deploy clean

install: $(VENV)/.installed

# torch first and by version: a machine that has the CPU build at hand then gets that one.
$(VENV)/.installed: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch==$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

demo: install
	@$(BIN)/pellucid demo

# What failed is tried once more, alone: a fault fails again, a test that a busy machine held up does not.
test: install
	export OMP_NUM_THREADS=1; $(BIN)/python -m pytest -n auto --dist worksteal || \
		{ test $$? -eq 1 && $(BIN)/python -m pytest --verbose --last-failed --last-failed-no-failures none; }

test-parallel: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m parallel tests/llm

test-matrix: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m matrix -n auto --dist worksteal

# Clients of other makers, some of them heavy.
test-clients: install
	$(BIN)/python -m pip install --quiet --editable ".[clients]"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/server/test_clients.py tests/server/test_load_clients.py

# Ray is heavy, and nothing else here needs it.
test-ray: install
	$(BIN)/python -m pip install --quiet --editable ".[ray]"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/nodes/test_ray.py

test-all: test test-parallel test-matrix test-clients test-ray

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

mutants: install
	$(BIN)/python -m tests.ring0.mutants

gpu: install
	$(BIN)/python benchmarks/gpu.py $(ROWS) --out $(OUT)

# Most of what is in deploy/, by the tools that it is for, those that are installed.
check-deploy:
	sh deploy/check.sh

eval: install
	$(BIN)/pellucid eval

clean:
	rm -rf $(VENV)
