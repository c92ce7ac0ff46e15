# make demo: everything from nothing to two trained translation models and their comparison.
# make test: everything from nothing to the test suite.
# make fuzz: more of the suite's random cases, for MINUTES, from SEED on, in two processes.
# make bench: everything from nothing to benchmarks/README.md's tables; wants an idle machine.

PYTHON ?= python3
VENV ?= .venv
DEMO_MINUTES ?= 5
MINUTES ?= 10
SEED ?= 0
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: test lint fuzz demo bench

# Two processes of one thread each: tests are small, and threads would wait for each other. In the
# order of the folders, since the long ones, of whole command lines, are in the first of them.
test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile \
		--no-loadscope-reorder

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz/run.py both --minutes $(MINUTES) --seed $(SEED)

demo: $(INSTALLED)
	$(BIN)/python recipes/iwslt15_envi/demo.py --minutes $(DEMO_MINUTES)

bench: $(INSTALLED)
	$(BIN)/python benchmarks/bench.py

# fairseq is compiled here. Without build isolation it uses the torch that is installed already
# instead of fetching another one; so torch and what the compilation needs come first.
$(INSTALLED): setup.py pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip setuptools wheel
	$(BIN)/python -m pip install torch cython numpy
	$(BIN)/python -m pip install --no-build-isolation 'fairseq-fixed>=0.12.3.1'
	$(BIN)/python -m pip install --editable '.[all]'
	touch $@
