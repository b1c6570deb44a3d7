PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test lint bench clean

demo: .venv/demo  ## Train a tiny model for five minutes, evaluate it, and write runs/demo/report.html
	$(BIN)/gecko train tiny --out runs/demo --resume

test: .venv/test  ## Style, types, import directions, and every test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n auto

bench: .venv/bench  ## The numbers of benchmarks/results, measured on this machine
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/decoding.py

clean:
	rm -rf .venv build

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gecko needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[train]'
	touch $@

.venv/test: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[dev]'
	touch $@

.venv/bench: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[benchmark]'
	touch $@
