PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test ci test-attacks test-kernels test-simulated test-hf-oldest test-upstream test-gpu faults bench bench-demo bench-gpu clean

demo: .venv/demo  ## Train a tiny model for six minutes, evaluate it, and write runs/demo/report.html
	$(BIN)/gecko train tiny --out runs/demo --resume

test: .venv/test  ## Check style, types and import directions, and run the tests of the package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -n auto --dist loadgroup --ignore tests/serving/test_attacks.py
	$(MAKE) --no-print-directory test-attacks

ci: test test-kernels test-simulated test-hf-oldest test-upstream  ## Run everything that continuous integration runs

test-attacks: .venv/test  ## Attack a running server; its answers are timed, so no other test runs meanwhile
	$(BIN)/pytest tests/serving/test_attacks.py

test-kernels: .venv/test  ## Run the Triton kernels under Triton's interpreter
	TRITON_INTERPRET=1 $(BIN)/pytest -n auto tests/kernels/interpreted

test-simulated: .venv/simulated  ## Run the Triton kernels under ttsem, as compiled for sm_90, and check each launch for races
	PYTHONPATH=tests $(BIN)/pytest -p kernels.simulated -n auto tests/kernels/interpreted

test-hf-oldest: .venv-oldest/test  ## Run the tests that need transformers with its oldest supported version
	.venv-oldest/bin/pytest -n auto tests/hf tests/models/test_llama.py tests/models/test_config.py

test-upstream: .venv/upstream  ## Run transformers' own common and training tests on Gecko
	$(BIN)/pytest -n 2 -W ignore --override-ini addopts='-q --import-mode=importlib --tb=line' \
		tests/upstream/suite.py

bench: .venv/bench  ## Measure the numbers in benchmarks/results that need no trained model
	$(BIN)/python benchmarks/training.py --write
	$(BIN)/python benchmarks/decoding.py
	$(BIN)/python benchmarks/inference.py --write
	$(BIN)/python benchmarks/serving_engine.py --write
	$(BIN)/python benchmarks/server_load.py --write
	$(BIN)/python benchmarks/kill_recovery.py
	$(BIN)/python benchmarks/context_exchange.py --write
	$(BIN)/python benchmarks/cpu_breakdown.py --write
	$(BIN)/python benchmarks/start_up.py --write
	$(BIN)/python benchmarks/host.py --write

bench-demo: .venv/bench demo  ## Measure the numbers in benchmarks/results that need the demo model
	$(BIN)/python benchmarks/long_reading.py --write
	$(BIN)/python benchmarks/snapshot.py --write
	$(BIN)/python benchmarks/quantization.py --write

bench-gpu: .venv/bench  ## Measure operators, training and decoding on this machine's GPU
	$(BIN)/python benchmarks/operators.py

faults: .venv/test  ## Plant each fault of tests/faults/faults.toml in a copy and expect its tests to fail
	$(BIN)/python tests/faults/plant.py

test-gpu: .venv/test  ## Run the tests of operators and models on this machine's GPU
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

.venv/upstream: .venv/test  # upstream's tests import parameterized, and need an __init__.py to be a package
	$(INSTALL) parameterized
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --constraint constraints.txt \
		--no-binary transformers --no-deps --dest build transformers
	tar -C build -xzf build/transformers-*.tar.gz
	touch $$(ls -d build/transformers-*/)tests/__init__.py $@

.venv/simulated: .venv/test
	$(INSTALL) --no-deps --ignore-requires-python ttsem==0.1.0
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
