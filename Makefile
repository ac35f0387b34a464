# Two commands for a newcomer: `make run` (the main job on bundled text) and `make test`.
PYTHON ?= python3
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN = $(VENV)/bin

.PHONY: run test lint bench clean

run: $(VENV)/ready
	$(BIN)/distaff quickstart

test: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/ready
	$(BIN)/python benchmarks/run.py

$(VENV)/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "distaff needs Python 3.11 or newer, and '$(PYTHON)' is not: install one and name it, as in 'make $(MAKECMDGOALS) PYTHON=python3.12'."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

clean:
	rm -rf .venv .venv-* build
