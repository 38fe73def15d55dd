# Every target is a line or two; there are no other scripts.

PYTHON ?= python3
# More options of pip, for example an index with CPU builds of torch.
PIP_FLAGS ?=
# Processes that share the tests: more than there may be cores, because many tests wait for clocks.
WORKERS ?= 3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
# Made last by setup, so that an interrupted one is repeated.
READY := $(VENV)/.ready
WHEEL_VENV := build/wheel-venv
WHEEL_TESTS := tests/test_public_api.py tests/test_packaging.py

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help setup fmt lint type unit test sim mutants demo restarts wheel docs check clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with everything that development needs; nothing to do the second time

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install -qq $(PIP_FLAGS) --constraint constraints.txt torch
	$(BIN)/python -m pip install -qq $(PIP_FLAGS) --constraint constraints.txt --group dev --editable .
	touch $@

fmt: setup ## correct what can be corrected, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lint: setup ## style, format, spelling, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/lint-imports --no-cache

type: setup ## types of package and tests, and a second opinion on the public ones
	$(BIN)/mypy
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python

unit: setup ## the fast tests: one process each, no Trainer, no server
	$(BIN)/pytest -n $(WORKERS) -m "not slow and not multiprocess and not integration" $(ARGS)

test: setup ## all tests
	$(BIN)/pytest -n $(WORKERS) $(ARGS)

# SEED=n replays one world, SAVES=n one run that saves, LOADS=n one job that resumes, RESTARTS=n one
# job of many starts; SEEDS=n runs as many worlds, SCENARIO=file takes its world from there.
sim: setup ## 300 simulated worlds with every promise checked; SEED=n tells the story of one
	$(BIN)/python -m lightning_resilience.drill \
		$(if $(SEED),--seed $(SEED)) $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SAVES),--saves $(SAVES)) $(if $(LOADS),--loads $(LOADS)) $(if $(RESTARTS),--restarts $(RESTARTS)) $(if $(SITES),--sites $(SITES)) $(if $(SCENARIO),--scenario $(SCENARIO)) $(if $(DIGEST),--digest $(DIGEST)) $(ARGS)

mutants: setup ## plant one bug after the other, and see that the simulated worlds find each
	$(BIN)/python -m tests.simulation.mutate $(ARGS)

demo: setup ## survive a storage outage under torchrun, without and with the callback
	$(BIN)/python examples/01_survive_an_outage.py $(ARGS)

restarts: setup ## two bad days of an elastic job, without and with the rendezvous backend
	$(BIN)/python examples/02_elastic_restart/run.py $(ARGS)

# The wheel's environment borrows the installed dependencies by their path, and does not follow the
# link to the source tree that lies beside them: what it imports of ours is the wheel.
wheel: setup ## build the wheel and test it from an empty folder, without the source tree
	rm -rf dist build && mkdir -p build/empty
	$(BIN)/python -m build --wheel --no-isolation --outdir dist . > build/build.log || { cat build/build.log; exit 1; }
	$(BIN)/python -m venv --without-pip $(WHEEL_VENV)
	$(BIN)/python -m pip --python $(WHEEL_VENV)/bin/python install -qq --no-deps --no-index dist/*.whl
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > "$$($(WHEEL_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/dependencies.pth"
	cd build/empty && WHEEL="$$(ls $(CURDIR)/dist/*.whl)" PYTHONSAFEPATH=1 $(CURDIR)/$(WHEEL_VENV)/bin/python -m pytest \
		-c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) -p no:cacheprovider $(addprefix $(CURDIR)/,$(WHEEL_TESTS))

docs: setup ## links, option table, and every fenced Python block
	$(BIN)/pytest tests/test_docs.py

check: lint type docs wheel sim test ## everything, as CI runs it; the summary of all tests comes last

clean: ## remove what the other targets made, but not .venv
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
