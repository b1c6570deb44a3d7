PYTHON ?= python3
BIN := .venv/bin
# Many tests wait for other processes, so more workers than processors keep the processors busy.
WORKERS := $(shell $(PYTHON) -c 'import os; print(os.cpu_count() * 3 // 2)')
# Modules are compiled when they are first imported, and kept: most of what is installed is never imported. Where Python
# may not keep them, every process that imports torch would compile it again, for seconds.
unexport PYTHONDONTWRITEBYTECODE
PIP := -m pip install --quiet --disable-pip-version-check --no-compile
INSTALL := $(BIN)/python $(PIP) --constraint constraints.txt

# After the tests, two of these run side by side, the longest first: installations wait for the network, and some use one
# processor.
STAGES := test-vllm test-compiled test-simulated test-docs test-first-hour test-hf-oldest test-upstream docs

.PHONY: demo test ci test-style test-package test-attacks test-compiled test-kernels test-kernels-oldest test-simulated test-hf-oldest test-upstream test-vllm test-vllm-serve test-vllm-newest test-gpu test-sanitized test-first-hour test-docs release-check docs faults masks bench bench-llama-cpp bench-demo bench-gpu bench-vllm clean

demo: .venv/demo  ## Train a tiny model for six minutes, evaluate it, and write runs/demo/report.html
	$(BIN)/gecko train tiny --out runs/demo --resume

test: .venv/test  ## Check style, types and import directions, and run the tests of the package
	$(MAKE) --no-print-directory --jobs 2 test-style test-package
	$(MAKE) --no-print-directory test-attacks
	$(BIN)/python tests/faults/plant.py --check

ci: test  ## Run everything that continuous integration runs
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target $(STAGES)

test-style: .venv/test  ## Check style, types and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-package: .venv/test  ## Run the tests of the package, except attacks and compiled kernels
	$(BIN)/pytest -n $(WORKERS) --dist loadgroup --max-worker-restart 0 --durations 20 --ignore tests/serving/test_attacks.py --ignore tests/kernels/compiled

test-attacks: .venv/test  ## Attack a running server; its answers are timed, so no other test runs meanwhile
	$(BIN)/pytest tests/serving/test_attacks.py

test-first-hour:  ## Run the commands of the tutorial and README, at a small size, in a new environment that has only the wheel
	$(PYTHON) tests/documents/first_hour.py --silence 60

release-check: .venv/test docs  ## Rehearse a release: builds, metadata, changelog, notebook, installation on every Python at hand, containers
	$(BIN)/python tests/documents/release.py --pythons --containers

test-docs: .venv/test  ## Run the commands and snippets of README, docs/ and examples/ with one small model; compare what they print
	$(BIN)/python tests/documents/check.py

test-kernels: .venv/test  ## Run the Triton kernels under Triton's interpreter, where the simulator cannot be installed
	TRITON_INTERPRET=1 $(BIN)/pytest -n auto --dist loadgroup tests/kernels/interpreted

test-compiled: .venv/test  ## Compile the Triton kernels for three kinds of GPU, and check their registers, spills and barriers
	$(BIN)/pytest -n auto --dist loadgroup tests/kernels/compiled

test-kernels-oldest: build/triton-3.6/ready  ## Compile the Triton kernels with the oldest supported Triton, and check their registers and spills
	PYTHONPATH=build/triton-3.6 $(BIN)/pytest -n auto tests/kernels/compiled

test-simulated: .venv/simulated  ## Run the Triton kernels under ttsem, as compiled for sm_90, and check each launch for races
	PYTHONPATH=tests $(BIN)/pytest -p kernels.simulated -n auto --dist loadgroup tests/kernels/interpreted
	TRITON_INTERPRET=1 $(BIN)/pytest tests/kernels/interpreted/test_context.py  # has several processes, and the simulator one

test-sanitized: .venv/test  ## Run the tests of operators and decoding with the C kernels under GCC's address and undefined-behaviour sanitizers
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=tests $(BIN)/pytest -p support.sanitized \
		--ignore tests/ops/test_cpu_memory.py tests/ops tests/inference tests/models/test_weights.py

test-hf-oldest: build/transformers-oldest/ready  ## Run the tests that need transformers with the oldest supported version
	PYTHONPATH=build/transformers-oldest $(BIN)/pytest -n auto tests/hf tests/models/test_llama.py

test-upstream: .venv/upstream  ## Run the common and training tests of the newest transformers on Gecko
	PYTHONPATH=build/upstream $(BIN)/pytest -n 2 -W ignore --override-ini addopts='-q --import-mode=importlib --tb=line' \
		tests/upstream/suite.py

test-vllm: .venv-vllm/test  ## Run Gecko in vLLM on the CPU
	.venv-vllm/bin/pytest tests/vllm

test-vllm-serve: .venv-vllm/test  ## Install the wheel and vLLM in a new environment, serve an exported model by `vllm serve`, and ask it
	.venv-vllm/bin/python tests/vllm/serve_from_wheel.py

test-vllm-newest: build/vllm-newest/ready  ## Run Gecko in the Python code of the newest vLLM, on the CPU
	PYTHONPATH=build/vllm-newest .venv-vllm/bin/pytest tests/vllm

docs: .venv-docs/docs  ## Build the documentation site into build/site; broken links and anchors are errors
	rm -rf build/site_source && mkdir -p build/site_source/benchmarks
	cp -r docs/. CONTRIBUTING.md CODE_OF_CONDUCT.md CHANGELOG.md build/site_source
	cp -r benchmarks/results build/site_source/benchmarks
	cp examples/README.md build/site_source/examples.md
	sed -i.original 's|](\.\./|](|; s|](docs/|](|' build/site_source/*.md && rm build/site_source/*.original
	find build/site_source/benchmarks -name '*.md' -exec sed -i.original '1i ---\nsearch:\n  exclude: true\n---\n' {} + \
		&& find build/site_source/benchmarks -name '*.original' -delete
	.venv-docs/bin/zensical build --strict --clean

bench: .venv/bench  ## Measure the numbers in benchmarks/results that need no trained model
	$(BIN)/python benchmarks/training.py --write
	$(BIN)/python benchmarks/decoding.py
	$(BIN)/python benchmarks/inference.py --write
	$(BIN)/python benchmarks/serving_engine.py --write
	$(BIN)/python benchmarks/server_load.py --write
	$(BIN)/python benchmarks/kill_recovery.py
	$(BIN)/python benchmarks/context_exchange.py --write
	$(BIN)/python benchmarks/host_waits.py --write
	$(BIN)/python benchmarks/cpu_breakdown.py --write
	$(BIN)/python benchmarks/start_up.py --write
	$(BIN)/python benchmarks/first_text.py --write
	$(BIN)/python benchmarks/host.py --write

bench-llama-cpp: .venv/llama-cpp  ## Measure decoding and reading beside llama.cpp, which is built from source first
	$(BIN)/python benchmarks/inference_llama_cpp.py --write

bench-demo: .venv/bench demo  ## Measure the numbers in benchmarks/results that need the demo model
	$(BIN)/python benchmarks/long_reading.py --write
	$(BIN)/python benchmarks/snapshot.py --write
	$(BIN)/python benchmarks/quantization.py --write

bench-gpu: .venv/test  ## Measure operators, training and decoding on this machine's GPU
	$(BIN)/python benchmarks/gpu/quarter_hour.py --first --out runs/gpu
	$(BIN)/python benchmarks/gpu/quarter_hour.py --second --out runs/gpu

bench-vllm: .venv-vllm/test  ## Measure Gecko in vLLM beside a Mamba2 and a Llama of equal size, and beside our engine
	.venv-vllm/bin/python benchmarks/vllm_engine.py --write

faults: .venv/simulated  ## Plant each fault of tests/faults/faults.toml in a copy and expect its tests to fail
	$(BIN)/python tests/faults/plant.py

masks: .venv/simulated  ## Remove each mask and barrier of the kernels in a copy and expect a test to fail; takes an hour, and goes on where it stopped
	PYTHONPATH=tests $(BIN)/python tests/faults/masks.py

test-gpu: .venv/test  ## Run the tests of operators and models on this machine's GPU
	$(BIN)/pytest -v -n 4 tests/gpu/test_capture.py tests/gpu/test_sizes.py tests/gpu/test_models.py
	$(BIN)/pytest -v -n 4 tests/gpu/test_operators.py

clean:
	rm -rf .venv .venv-docs .venv-vllm build

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "gecko needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[train]'
	touch $@

.venv/test: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[dev]'
	touch $@

.venv/upstream: .venv/simulated  # one installation at a time in .venv; upstream's tests import parameterized, and need an __init__.py to be a package
	$(INSTALL) parameterized
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --constraint constraints.txt \
		--no-binary transformers --no-deps --dest build transformers
	mkdir -p build/upstream
	tar -C build/upstream --strip-components 1 --wildcards -xzf build/transformers-*.tar.gz '*/tests'
	touch build/upstream/tests/__init__.py $@

.venv/simulated: .venv/test
	$(INSTALL) --no-deps --ignore-requires-python ttsem==0.1.0
	touch $@

.venv/bench: .venv/bin/python pyproject.toml constraints.txt
	$(INSTALL) --editable '.[benchmark]'
	touch $@

# GCC 12 drops stores to the table of llama.cpp's AMX products without the last three flags, and Q8_0 crashes.
.venv/llama-cpp: .venv/bench
	CMAKE_ARGS='-DGGML_NATIVE=ON -DGGML_OPENMP=ON -DLLAVA_BUILD=OFF -DCMAKE_CXX_FLAGS="-fno-tree-dse -fno-dse -fno-tree-sra"' \
		$(INSTALL) --no-binary llama-cpp-python --editable '.[benchmark,llamacpp]'
	touch $@

.venv-docs/docs: constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python $(PIP) --constraint constraints.txt \
		mkdocstrings-python zensical
	touch $@

.venv-vllm/test: pyproject.toml constraints-vllm.txt tests/support/vllm_install.py
	$(PYTHON) tests/support/vllm_install.py .venv-vllm --editable '.[eval,serve]' accelerate hypothesis psutil pytest pytest-timeout tenacity torchao
	touch $@

build/transformers-oldest/ready: .venv/test constraints-oldest.txt  # beside the pinned versions, so without the constraints
	rm -rf build/transformers-oldest
	$(BIN)/python $(PIP) --no-deps --target build/transformers-oldest --requirement constraints-oldest.txt
	touch $@

build/triton-3.6/ready: .venv/test  # beside the pinned version, so without the constraints
	rm -rf build/triton-3.6
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/triton-3.6 triton==3.6.0
	touch $@

# There is no build of vLLM 0.33 for the CPU. Its Python, from the package for GPUs, runs with the compiled parts of 0.32.
build/vllm-newest/ready: .venv-vllm/test
	rm -rf build/vllm-newest
	.venv-vllm/bin/python $(PIP) --no-deps --target build/vllm-newest \
		vllm==0.33.0 orjson==3.13.0
	rm build/vllm-newest/vllm/*.so && cp .venv-vllm/lib/python3*/site-packages/vllm/*.so build/vllm-newest/vllm
	sed -i.original 's/^Version: .*/&+cpu/' build/vllm-newest/vllm-*.dist-info/METADATA
	touch $@
