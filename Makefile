# Two commands for a newcomer: `make run` (the main job on bundled text) and `make test`.
PYTHON ?= python3
VENV ?= $(if $(filter python3,$(PYTHON)),.venv,.venv-$(notdir $(PYTHON)))
BIN = $(VENV)/bin

.PHONY: run test test-tpu lint bench clean

run: $(VENV)/ready
	$(BIN)/distaff quickstart

# In their order: by default files of few tests come last, and some of those take long.
test: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# What the compiler of TPUs makes of a step, on any machine. libtpu lies beside the environment, in which jax would look
# for a TPU because of it.
test-tpu: $(VENV)/ready
	@libtpu=$$($(BIN)/python -c 'import importlib.metadata as m; print(next(r.split(";")[0] for r in m.requires("jax") if r.startswith("libtpu")))'); \
	if test -d build/libtpu || $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/libtpu "$$libtpu"; then \
	  JAX_PLATFORMS=cpu PYTHONPATH=build/libtpu $(BIN)/python -m pytest tests/test_fit_tpu.py; \
	else rm -rf build/libtpu; echo "skipped: $$libtpu cannot be installed here"; fi

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
