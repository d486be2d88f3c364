# Every target makes the virtual environment that it needs; nothing has to be installed or exported before.
# `make PYTHON=python3.12 test` chooses the interpreter, which has to be Python 3.11 or newer.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
NEWEST := .venv-newest/bin
# Two processes, a file of tests at a time: more would need more memory than cores are worth.
PARALLEL := -n 2 --dist loadfile
ALLOWED := --allowed-skips tests/allowed_skips.txt
# `make SHARE=1/2 test-newest` runs every second test.
SHARED = $(if $(SHARE),--share $(SHARE))
# The rings of tests; docs/contributing/tests.md says what is in each.
QUICK := -m "quick and not full"
REST := -m "full and not gpu"

.PHONY: help help-all demo test test-all test-share test-compile test-mutations test-newest test-migration test-gpu lint format docs linkcheck inventories dist bench bench-gpu clean

help:
	@echo "make demo      train on digits in float32, float16 and bfloat16, and compare them"
	@echo "make test      run the quick tests, in four minutes; later, with what was compiled, in three"
	@echo "make test-all  run all tests, with coverage"
	@echo "make lint      run ruff and pyright, and check the GitHub files"
	@echo "make format    format the code"
	@echo "make docs      build the site in out/docs and run its notebooks"
	@echo "make help-all  list the other targets"

help-all: help
	@echo
	@echo "make test-compile    compile steps for GPUs and TPUs that are not here, and check dtypes and memory"
	@echo "make test-mutations  plant twenty faults, one at a time, and check that the quick tests catch them"
	@echo "make test-newest     run the quick tests near jax on the newest Python and jax"
	@echo "make test-migration  run other libraries' code from the migration pages, beside ours"
	@echo "make test-gpu        run tests/gpu, on a GPU if there is one, otherwise on the CPU"
	@echo "make linkcheck       check the links of the site over the network"
	@echo "make inventories     refresh the names that the site links to in other projects' docs"
	@echo "make dist            build wheel and sdist in dist/ and try them on Python 3.11 and 3.13"
	@echo "make bench           measure steps, many devices, imports, autocast and graph operations"
	@echo "make bench-gpu       measure steps and graph operations on a GPU, in parts that resume"
	@echo "make clean           remove what make made"

demo: .venv/.train
	$(BIN)/jmp-train compare digits --policies float32 autocast_float16 autocast_bfloat16 --growth-interval 20 --out out/demo

# Only files that name the marker are imported, as in test-newest.
test: .venv/.dev
	$(BIN)/python -m pytest $(PARALLEL) $(QUICK) $(ALLOWED) jmp_train $$(grep -rl --include='test_*.py' mark.quick tests)

test-all: .venv/.dev .venv-plan/.plan
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu" $(ALLOWED) --cov --cov-report=
	$(BIN)/coverage report
	$(BIN)/coverage report --include='policies/*' --fail-under=95 --format=total

# Every 120th test of those that `make test` leaves out: `make test-share SHARE=3/120`.
test-share: .venv/.dev .venv-plan/.plan
	$(BIN)/python -m pytest $(PARALLEL) $(REST) $(ALLOWED) --share $(SHARE)

# Steps, loss scales and optimizers for GPUs and TPUs that are not here; all of it is in `make test-all` too.
test-compile: .venv/.dev .venv-plan/.plan
	$(BIN)/python -m pytest tests/compile $(ALLOWED)

# Plants a fault at a time in a copy, where a quick test has to fail.
test-mutations: .venv/.dev
	$(BIN)/python tests/mutate.py --planted --record

NEWEST_PYTHON ?= $(shell .ci/newest-python)

test-newest:
	@if [ -z "$(NEWEST_PYTHON)" ]; then echo "no Python 3.12 or 3.13 here: the newest jax is not tested"; \
	else $(MAKE) .venv-newest/.dev run-test-newest; fi

# Only files that name the marker are imported.
.PHONY: run-test-newest
run-test-newest:
	$(NEWEST)/python -c 'import jax; print("jax", jax.__version__); assert jax.__version_info__ >= (0, 11)'
	$(NEWEST)/python -m pytest $(PARALLEL) -m "newest and not full" $(ALLOWED) $(SHARED) $$(grep -rl mark.newest tests)

# DGL's side runs where `make .venv-dgl/.dgl` has made its environment, of 5 GB.
test-migration: .venv/.dev .venv-peers/.peers
	$(BIN)/python -m pytest tests/project/test_migration.py $(ALLOWED)

# GPU_PYTHON=/path/to/python names an environment that has jax for a GPU; else one is made for the driver.
test-gpu:
	@.ci/gpu-python -m pytest --durations 5 -m gpu tests/gpu $(SHARED)

bench-gpu: MINUTES ?= 9
bench-gpu:
	@.ci/gpu-python benchmarks/gpu.py --minutes $(MINUTES)

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	.ci/lint-github

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Needs no network once the environment and the compilers for the tutorial about plans are there. A notebook that has run
# is run again where its text has changed, or after `make clean`.
docs: .venv/.dev
	$(BIN)/jmp-train plan --install
	$(BIN)/jmp-train plan --install tpu
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs out/docs
	@echo "wrote out/docs/index.html"

# Both need the network, so that CI runs neither.
linkcheck: .venv/.dev
	$(BIN)/python -m sphinx -b linkcheck -q -D nb_execution_mode=off docs out/linkcheck

inventories: .venv/.dev
	$(BIN)/python docs/extensions/refresh_inventories.py $(NAMES)

# DIST="--allow-missing" goes on without a Python that is not here; DIST="--tag v0.2.0" is what a release runs.
dist: .venv/.dev
	$(BIN)/python tests/dist.py $(DIST)

bench: .venv/.dev
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/checkpoint.py
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/autocast.py
	$(BIN)/python benchmarks/graphs.py
	$(BIN)/python benchmarks/graph_building.py
	$(BIN)/python benchmarks/graph_batches.py
	$(BIN)/python benchmarks/minibatch.py

clean:
	rm -rf .venv .venv-newest .venv-gpu .venv-plan .venv-dgl .venv-peers build dist out *.egg-info .coverage .pytest_cache .ruff_cache .hypothesis

.venv/bin/pip:
	@test -n "$(PYTHON)" || { echo "jmp_train needs Python 3.11 or newer: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "jmp_train needs Python 3.11 or newer, $(PYTHON) is older"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/.train .venv/.dev: .venv/.%: pyproject.toml | .venv/bin/pip
	@echo "installing jmp_train[$*] into .venv, which takes a while the first time"
	@$(BIN)/pip install -qq --editable '.[$*]'
	@touch $@

.venv-newest/.dev: pyproject.toml
	test -x $(NEWEST)/pip || $(NEWEST_PYTHON) -m venv .venv-newest
	@echo "installing jmp_train[dev] into .venv-newest"
	@$(NEWEST)/pip install -qq --editable '.[dev]'
	@touch $@

# With jax for the CUDA that .ci/gpu-python finds, and no more than tests/gpu and benchmarks/gpu.py need.
.venv-gpu/.dev: pyproject.toml
	test -x .venv-gpu/bin/pip || $(PYTHON) -m venv .venv-gpu
	@echo "installing jmp_train[train,$(GPU_EXTRA)] into .venv-gpu, which takes a while the first time"
	@.venv-gpu/bin/pip install -qq --editable '.[train,$(GPU_EXTRA)]' networkx pillow pytest pytest-timeout
	@touch $@

# For tests that compile ahead of time for a target GPU; see the plan extra. The compilers, 600 and 700 MB, are in a cache.
.venv-plan/.plan: pyproject.toml | .venv/.dev
	test -x .venv-plan/bin/pip || $(BIN)/python -m venv .venv-plan
	@echo "installing jmp_train[plan] into .venv-plan"
	@.venv-plan/bin/pip install -qq --editable '.[plan]'
	@$(BIN)/jmp-train plan --install
	@$(BIN)/jmp-train plan --install tpu
	@touch $@

# DGL, for benchmarks/graphs.py: 2.1.0 is the last with a wheel for CPUs on the index, and takes Python 3.11 or older.
.venv-dgl/.dgl:
	test -x .venv-dgl/bin/pip || $(PYTHON) -m venv .venv-dgl
	@echo "installing DGL 2.1.0 and torch 2.2.1 into .venv-dgl, 5 GB"
	@.venv-dgl/bin/pip install -qq dgl==2.1.0 torch==2.2.1 torchdata==0.7.1 'numpy<2' 'pandas<2.3' pydantic pyyaml
	@touch $@

# The libraries of docs/migration that are not in the extra dev; torch for CPUs, where its own index can be reached.
.venv-peers/.peers: Makefile
	test -x .venv-peers/bin/pip || $(PYTHON) -m venv .venv-peers
	@echo "installing torch 2.13.0, Lightning, Accelerate, PyTorch Geometric and mpx into .venv-peers, 2 GB"
	@.venv-peers/bin/pip install -qq --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0 lightning==2.6.6 \
		accelerate==1.15.0 torch_geometric==2.8.1 mixed-precision-for-JAX==0.1.8
	@touch $@
