# make demo       replicas train a small language model; ends in a table and plots (demo-out/)
# make test       linters and tests
# make test-full  the tests that make test leaves out: more combinations, wheels, and everything that needs a GPU
# make bench      every benchmark on this machine; report and plots in bench-out/ (bench/README.md)
# make chaos      500 injected faults over real processes in about ten minutes; prints a table (tests/chaos/)
# make quality    the small part of the quality suite; prints its tables (bench/quality/README.md)
# make docs       the documentation as a site, in site/
# make wheel      a pure wheel, one with the compiled extension, and the source distribution, in dist/
# Each target first builds .venv, once. PYTHON chooses the interpreter (3.11 or newer).

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DEMO_ARGS ?=
BENCH_ARGS ?=
QUALITY_ARGS ?=
CHAOS_ARGS ?=

# Tests and demo start many Python processes. Without byte code each of them would compile torch's sources again.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile
PIP    := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test test-full lint bench chaos quality docs wheel setup clean

demo: $(READY)
	$(BIN)/python -m hdet_kernels demo $(DEMO_ARGS)

# mypy, which uses one core for half a minute, runs beside the tests; what it found is printed after them.
test: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/mypy > $(VENV)/mypy.log 2>&1 & types=$$!; \
	$(PYTEST) -m 'not full'; tested=$$?; wait $$types; typed=$$?; cat $(VENV)/mypy.log; exit $$((tested || typed))

test-full: $(READY)
	$(PYTEST) -m full

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m hdet_kernels bench $(BENCH_ARGS)

chaos: $(READY)
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

quality: $(VENV)/.quality
	$(BIN)/python -m bench.quality run $(QUALITY_ARGS)

docs: $(READY)
	$(BIN)/python -m mkdocs build --strict

wheel: $(READY)
	rm -rf build dist
	HDET_NATIVE=0 $(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -c 'from setuptools import build_meta; build_meta.build_sdist("dist")' > build/sdist.log
	@ls dist/*

$(VENV)/.quality: $(READY)
	$(PIP) install --quiet --no-compile --constraint constraints.txt --no-build-isolation --editable '.[quality]'
	@touch $@

setup: $(READY)

# torch first and by its pin: the extension is then built against it, while pip installs the rest.
$(READY): pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hdet_kernels needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) --version): make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-compile --constraint constraints.txt torch numpy 'setuptools>=77' ninja
	@$(BIN)/python setup.py build_ext --inplace > $(VENV)/native.log 2>&1 & build=$$!; \
	HDET_NATIVE=0 $(PIP) install --quiet --no-compile --constraint constraints.txt --no-build-isolation --editable '.[dev]'; \
	installed=$$?; wait $$build || { cat $(VENV)/native.log; exit 1; }; exit $$installed
	@touch $(READY)

clean:
	rm -rf $(VENV) build dist site *.egg-info hdet_kernels/*.so demo-out bench-out quality-out.json
