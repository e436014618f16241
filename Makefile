# One word per job, the same for people and CI.
VENV ?= .venv
PY := $(VENV)/bin/python
DISTS := shared[embedded] services/gateway services/scheduler services/gpu-worker bench

setup: $(VENV)/.installed
$(VENV)/.installed: constraints.txt pyproject.toml shared/pyproject.toml services/*/pyproject.toml bench/pyproject.toml
	test -x $(PY) || python3.11 -m venv $(VENV)
	$(PY) -m pip install -q -c constraints.txt torch==2.13.0
	$(PY) -m pip install -q -c constraints.txt -r requirements-dev.txt $(foreach d,$(DISTS),-e $(d))
	touch $@

.PHONY: setup
