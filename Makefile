# make run | test | test-slow | lab | site | lint | doctor          (GNU make, bash, Python >= 3.10)
SHELL := bash
# The first that runs and is new enough: a machine may have python3.11 alone, or an old python3.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.10 python3.13; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
    && { command -v $$p; break; }; done)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Extras of pyproject.toml besides torch; EXTRAS= is enough for `make run` on a machine offline.
EXTRAS ?= dev,site
# Further words for the command, e.g. make run ARGS="--only 01_primitive_benchmark --resume"
ARGS ?=
export WHEELHOUSE

.PHONY: run test test-slow lab site lint doctor
.DEFAULT_GOAL := run

run: $(READY)
	$(BIN)/fusion-evidence run $(ARGS)

# A file stays in one process: its tests share what they compile.
test: $(READY)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile $(ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow $(ARGS)

# Opens on the summary; in a container: ARGS="--allow-root --no-browser --ip=0.0.0.0".
lab: $(READY)
	JUPYTER_PREFER_ENV_PATH=1 $(BIN)/jupyter lab notebooks --LabApp.default_url=/lab/tree/00_summary.ipynb $(ARGS)

# From accepted, fresh results; ARGS=--skip-stale leaves the others out.
site: $(READY)
	$(BIN)/fusion-evidence publish $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	PYTHON=$(abspath $(BIN))/python .ci/types

# Only a whole environment gets the stamp; one that broke half-way is made anew.
$(READY): pyproject.toml constraints.txt lib/environment.py
	@test -n "$(PYTHON)" || { echo "error: no Python 3.10 or newer found: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) lib/environment.py $(VENV) --extras "$(EXTRAS)"
	@touch $@

# Works before anything is installed, and says what is missing.
doctor:
	@if test -x $(BIN)/python; then $(BIN)/python lib/doctor.py --quick; else $(or $(PYTHON),python3) lib/doctor.py --quick; fi
