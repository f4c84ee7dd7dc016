# make train: the main job on real data.  make check: ruff, mypy and the docs.
# make test: everything in one process and the sharpest digests of real runs.  make test-all: all tests.
# make docs: the site, in build/docs; a warning is an error.
# Each makes .venv when it is missing or older than what it is made from.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: train test test-all check docs bench clean

# With the variable, as in many containers, each process of a test would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

train: $(VENV)/stamp
	$(BIN)/quorate run examples/fashion_mnist.py

test: $(VENV)/stamp
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

# Many of the slow ones wait, for a cluster or a timeout: three at a time.
test-all: $(VENV)/stamp
	$(BIN)/python -m pytest -n 3 --dist worksteal

check: $(VENV)/stamp docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(VENV)/stamp
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --nitpicky --fresh-env \
		--doctree-dir build/doctrees docs build/docs
	@echo 'docs: build/docs/index.html'

bench: $(VENV)/stamp
	$(BIN)/python benchmarks/peers.py

$(VENV)/stamp: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "quorate needs Python >= 3.11")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,check,docs]'
	touch $@

clean:
	rm -rf $(VENV) build src/*.egg-info
