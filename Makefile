# One word per job, the same for people and CI.
VENV ?= .venv
ROUNDS ?= 20
JOBS ?= 2
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq --retries 5
DISTS := shared[embedded] services/gateway services/scheduler services/gpu-worker services/predictor[train] \
	services/reconfigurator bench
MANIFESTS := constraints.txt requirements-dev.txt pyproject.toml shared/pyproject.toml \
	$(wildcard services/*/pyproject.toml) bench/pyproject.toml
EXPERIMENTS := calibration fig10 ahead overhead ablation fig11 fig13 realday quality fig3 fig4 fig9 \
	predictor deciding table5 table6 fig8 fig12 planning planpolicies live
NOT_HERE := not slow and not gpu and not compose

.DEFAULT_GOAL := help
.PHONY: help setup up test test-compose soak lint fix bench experiments docs clean

help:
	@echo "make setup         virtual environment with everything that the other words need"
	@echo "make up            the whole stack on this machine, and one streamed answer as proof"
	@echo "make test          all tests that need neither a GPU nor Docker, JOBS=2 files at a time"
	@echo "make test-compose  the container images and docker-compose.yml, for real"
	@echo "make soak          the mix of TP degrees changes ROUNDS=20 times under load; an hour or more"
	@echo "make lint          ruff and mypy --strict"
	@echo "make fix           what ruff can mend by itself"
	@echo "make bench         throughput of the whole stack against the bare engine"
	@echo "make experiments   every full run behind docs/experiments.md; an hour or more"
	@echo "make docs          docs/ as far as it follows from the code and from kept results"
	@echo "make clean         build products and caches, not the virtual environment"

setup: $(VENV)/.installed

# torch comes first and alone: the other packages then find it installed, at the pinned version.
$(VENV)/.installed: $(MANIFESTS)
	@test -n "$(PYTHON)" || { echo "no Python found; install Python 3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is too old; install Python 3.11, or PYTHON=/path make setup" >&2; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(PIP) install -c constraints.txt torch==2.13.0
	$(PIP) install -c constraints.txt -r requirements-dev.txt $(foreach d,$(DISTS),-e $(d))
	@touch $@

up: setup
	$(BIN)/dilaserve up --sample

test: setup
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile -m "$(NOT_HERE)"

test-compose: setup
	$(BIN)/python -m pytest tests/compose -m compose -s -rs

soak: setup
	DILASERVE_SOAK_ROUNDS=$(ROUNDS) $(BIN)/python -m pytest tests/faults/test_replan.py -s

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/python -m dilaserve_bench.throughput

# What was measured is kept: after an interruption the same word goes on.
experiments: setup
	for name in $(EXPERIMENTS); do \
		$(BIN)/dilaserve experiment $$name --out bench/results/$$name.json || exit 1; \
	done
	$(BIN)/python docs/build.py

docs: setup
	$(BIN)/python docs/build.py

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -not -path './$(VENV)/*' -type d -prune -exec rm -rf {} +
