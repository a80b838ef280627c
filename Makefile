# Needs only python3 and make. Everything else goes into .venv.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
WORKERS ?= 2

BIN := .venv/bin
STAMP := .venv/.stamp

.PHONY: test lint types soak demo bench clean

test: lint types
	$(BIN)/python -m pytest -n $(WORKERS)

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/mypy --strict src

soak: $(STAMP)
	$(BIN)/python -m pytest -m soak

demo: $(STAMP)
	$(BIN)/python -m reshard demo

bench: $(STAMP)
	$(BIN)/python benchmarks/convert.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and by itself, so that TORCH decides its version. The stamp is last: a broken install is tried again.
$(STAMP): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet '$(TORCH)'
	$(BIN)/python -m pip install --quiet -e '.[dev,hf]'
	touch $@
