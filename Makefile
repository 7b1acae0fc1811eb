# make demo | test | test-fast | bench | lint | clean ; each makes .venv and installs if need be.
PYTHON ?= python3
VENV ?= .venv
# The build of torch that the project is developed on; the package itself allows 2.11 to 2.15.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: install demo test test-fast bench lint clean

install: $(VENV)/.installed

# torch comes first and by pip, so that nothing later pulls another build of it.
$(VENV)/.installed: pyproject.toml
	@echo "installing into $(VENV) (about two minutes; torch is large)"
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) --editable ".[dev]"
	@touch $@

demo: install
	$(BIN)/torchstone run examples/minilm --package bundles/minilm || test $$? -eq 1  # 1: held, an answer too

test: install
	$(BIN)/python -m pytest $(ARGS)

test-fast: install
	$(BIN)/python -m pytest -m "not slow and not gpu" -q $(ARGS)

bench: install
	$(BIN)/python benchmarks/run_all.py $(ARGS)

lint: install
	$(PIP) --editable ".[lint]"
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python --min-severity error
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .ci-venv .torchstone bundles build dist
