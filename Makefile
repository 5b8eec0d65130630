# Everything a newcomer needs; each target makes what it stands on.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# One thread a rank: the ranks of a run share this machine's cores.
export OMP_NUM_THREADS ?= 1
export PYTHONUNBUFFERED := 1

.PHONY: help setup bert-mlperf test smoke bench lint clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/installed  ## make .venv and install the pinned packages into it

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

bert-mlperf: setup  ## train BERT on real text with two ranks to its target accuracy, log it by MLPerf's rules, draw it
	bert_mlperf/launch/demo.sh

test: setup  ## the whole test suite
	$(BIN)/pytest

smoke: setup  ## a short run of every recipe, started as a user would
	$(BIN)/python -m ci.smoke

bench: setup  ## every benchmark against its peers; prints the tables the READMEs quote
	$(BIN)/python -m ci.bench

lint: setup  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## remove what the targets above made, downloads and runs included
	rm -rf $(VENV) build data runs *.egg-info .mypy_cache .ruff_cache .pytest_cache
