# Each target sets itself up in .venv from Python 3.11+ alone.
PYTHON ?= python3
BIN := .venv/bin
# Kernels and collectives share two cores with xdist workers: one thread each is fastest.
TEST_ENV := OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=2

.venv/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

.PHONY: train test check docs format clean
train: .venv/.ready
	$(BIN)/thinwire train --nproc 2 --out runs/train

test: .venv/.ready
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu"

check: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Fails on a warning, and on a public name that no page describes.
docs: .venv/.ready
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build

format: .venv/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build dist runs docs/_build
