# `make demo` and `make test` need Linux and Python 3.11 or newer; everything else is installed into VENV.
# VENV         where the environment lies (.venv); PYTHON: which interpreter it is made with (python3)
# TORCH        which torch; TORCH_INDEX: pip options for where it comes from. Without a GPU, the builds of
#              PyTorch's own index for CPUs are far smaller: make test TORCH_INDEX="--extra-index-url URL"
# WORKERS      how many processes run tests at once (2); make test adds one for the lab, which mostly waits
# RACKS        the lab's shape: 2x4 is two racks of four nodes; 4,2,2 three racks of those sizes
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
WORKERS ?= 2
RACKS ?= 2x4
export PYTHON TORCH TORCH_INDEX
# An activated environment or a caller's paths must not decide what runs here.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET
# Tests start Python thousands of times; without bytecode each start compiles all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo check test lint bench lab lab-shell lab-down lab-deps clean
.NOTPARALLEL:

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(firstword $(MAKEFILE_LIST)); sed -n '1,/^VENV/s/^# //p' $(firstword $(MAKEFILE_LIST))

demo: $(VENV)/.demo ## train a small model on eight ranks of this machine
	@$(VENV)/bin/python -m hpcrun demo

check: lint ## linters, types and the pure tests: no processes, no torch; what to run while working
	$(VENV)/bin/python -m pytest -n $(WORKERS) -m pure

test: lint ## linters, types, then every test; what .ci/run runs
	@status=0; set -x; \
	$(VENV)/bin/python -m pytest -n $(WORKERS) -m pure || status=1; \
	$(VENV)/bin/python -m pytest -n $$(($(WORKERS) + 1)) --dist loadfile --no-loadscope-reorder -m "not pure" || \
		status=1; \
	exit $$status

lint: $(VENV)/.test ## ruff and mypy
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m ruff format --check .
	$(VENV)/bin/python -m mypy

bench: $(VENV)/.test ## every benchmark, quickly
	@status=0; for script in $(filter-out benchmarks/harness.py,$(wildcard benchmarks/*.py)); do \
		echo "== $$script"; $(VENV)/bin/python $$script --quick || status=1; done; exit $$status

lab: $(VENV)/.test ## start a real Slurm of eight nodes in emulated racks on this machine (root); RACKS gives its shape
	@$(VENV)/bin/python -m tests.lab up "$(RACKS)"

lab-shell: $(VENV)/.test ## a shell on the lab's login node
	@$(VENV)/bin/python -m tests.lab shell

lab-down: $(VENV)/.test ## end the lab; nothing of it stays
	@$(VENV)/bin/python -m tests.lab down

lab-deps: $(VENV)/.test ## install the lab's Debian packages, where it cannot unpack them by itself (root)
	@$(VENV)/bin/python -m tests.lab deps

clean: ## remove the environment, caches and build outputs; runs/ stays
	@if [ -f "$(VENV)/pyvenv.cfg" ]; then rm -rf "$(VENV)"; fi
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find hpcrun templates tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.demo: setup.cfg pyproject.toml .ci/setup.sh
	@sh .ci/setup.sh "$(VENV)" train && touch $@

$(VENV)/.test: setup.cfg pyproject.toml .ci/setup.sh
	@sh .ci/setup.sh "$(VENV)" train,test && touch $@
