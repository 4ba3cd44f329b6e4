# make demo: set-up, then replicas train a small language model; ends in a table and plots (in demo-out/).
# make test: set-up, then the linters and the tests.
# make test-full: the tests that make test leaves out: more combinations, and everything that needs a GPU.
# make bench: set-up, then every benchmark on what is there; report and plots in bench-out/ (bench/README.md).
# make quality: set-up, then the small part of the quality suite; prints its tables (bench/quality/README.md).
# All build .venv once; a second run installs nothing. PYTHON chooses the interpreter (3.11 or newer).

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEMO_ARGS ?=
BENCH_ARGS ?=
QUALITY_ARGS ?=

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile

.PHONY: demo test test-full lint bench quality setup clean

demo: $(READY)
	$(BIN)/python -m hdet_kernels demo $(DEMO_ARGS)

test: lint
	$(PYTEST) -m 'not full'

test-full: $(READY)
	$(PYTEST) -m full

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m hdet_kernels bench $(BENCH_ARGS)

quality: $(VENV)/.quality
	$(BIN)/python -m bench.quality run $(QUALITY_ARGS)

$(VENV)/.quality: $(READY)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --no-build-isolation --editable '.[quality]'
	@touch $@

setup: $(READY)

# torch first and by its pin: the package is then built against it, without an environment of its own.
$(READY): pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hdet_kernels needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version): make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt torch numpy 'setuptools>=77' ninja
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info hdet_kernels/*.so demo-out bench-out quality-out.json
