PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-kernels test-hf-oldest test-gpu bench bench-demo bench-gpu clean

demo: .venv/demo  ## Train a tiny model for six minutes, evaluate it, and write runs/demo/report.html
	$(BIN)/gecko train tiny --out runs/demo --resume

test: .venv/test  ## Style, types, import directions, and every test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n auto --dist loadgroup
	$(MAKE) --no-print-directory test-kernels test-hf-oldest

test-kernels: .venv/test  ## The Triton kernels under Triton's interpreter, by the laws of the operators
	TRITON_INTERPRET=1 $(BIN)/pytest -n auto tests/kernels/interpreted

test-hf-oldest: .venv-oldest/test  ## What needs transformers once more, with the oldest that is supported
	.venv-oldest/bin/pytest -n auto tests/hf tests/baselines/test_llama.py tests/baselines/test_config.py

bench: .venv/bench  ## The numbers of benchmarks/results that need no trained model, measured on this machine
	$(BIN)/python benchmarks/training.py --write
	$(BIN)/python benchmarks/decoding.py
	$(BIN)/python benchmarks/serving_engine.py --write
	$(BIN)/python benchmarks/server_load.py --write
	$(BIN)/python benchmarks/kill_recovery.py
	$(BIN)/python benchmarks/context_exchange.py --write
	$(BIN)/python benchmarks/cpu_breakdown.py --write
	$(BIN)/python benchmarks/start_up.py --write
	$(BIN)/python benchmarks/host.py --write

bench-demo: .venv/bench demo  ## Those of the demo model
	$(BIN)/python benchmarks/long_reading.py --write
	$(BIN)/python benchmarks/snapshot.py --write
	$(BIN)/python benchmarks/quantization.py --write

bench-gpu: .venv/bench  ## Operators, training and decoding on the GPU that is there
	$(BIN)/python benchmarks/operators.py

test-gpu: .venv/test  ## The laws of the operators, and models, on the GPU that is there
	$(BIN)/pytest -n 4 tests/gpu

clean:
	rm -rf .venv .venv-oldest build

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

.venv-oldest/test: pyproject.toml constraints.txt constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	awk -F== 'NR == FNR {replaced[$$1]; print; next} !($$1 in replaced)' \
		constraints-oldest.txt constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --constraint .venv-oldest/constraints.txt \
		--editable '.[finetune]' hypothesis pytest pytest-xdist
	touch $@
