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

# An environment of its own: the tests' holds pyrefly-torch-stubs, which mypy would take for torch's types.
LINT := $(VENV)-lint
$(LINT)/.installed: pyproject.toml
	$(PYTHON) -m venv $(LINT)
	$(LINT)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(LINT)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[lint]"
	@touch $@

lint: $(LINT)/.installed
	$(LINT)/bin/ruff check . && $(LINT)/bin/ruff format --check .
	$(LINT)/bin/mypy
	$(LINT)/bin/pyrefly check --python-interpreter-path $(LINT)/bin/python --min-severity error
	$(LINT)/bin/lint-imports

clean:
	rm -rf $(VENV) $(LINT) .ci-venv .ci-venv-lint .torchstone bundles build dist
