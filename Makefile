# `make demo` and `make test` each set up what they need in .venv; nothing else has to be installed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A person sees how far the download of PyTorch is, a log does without.
PIP := $(BIN)/python -m pip install $(if $(CI),-qq)

.DEFAULT_GOAL := help
.PHONY: help demo demo-alexnet test lint docs format clean

help:
	@echo "make demo         train LeNet-5 on CIFAR-10 images across three local tiers"
	@echo "make demo-alexnet train AlexNet at 224 x 224 the same way; takes longer"
	@echo "make test         lint, type check, documentation and tests: all that CI runs"
	@echo "make docs         build the documentation into docs/_build/html"
	@echo "make format       let ruff rewrite the sources"
	@echo "make clean        remove .venv and everything that was built"
	@echo "PYTHON=python3.12 make ... picks the interpreter that makes .venv"

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/lenet_cifar10/demo.py

demo-alexnet: $(VENV)/.installed-examples
	$(BIN)/python examples/alexnet_imagenet/train.py fit --config examples/alexnet_imagenet/config.yaml

# The files in the order of their names: those that take long come first.
test: lint docs
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.installed-dev
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -q -b doctest docs docs/_build/doctest

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; v >= (3, 11) or sys.exit("Python 3.11 or newer is needed, $(PYTHON) is %d.%d; choose another with PYTHON=..." % v)'
	$(PYTHON) -m venv $(VENV)

# A stamp is older than pyproject.toml when the requirements may have changed; otherwise nothing is installed again.
$(VENV)/.installed-demo: pyproject.toml | $(BIN)/python
	@echo "Installing what the demo needs into $(VENV); PyTorch is large, this can take some minutes."
	$(PIP) --editable .
	@touch $@

$(VENV)/.installed-examples: pyproject.toml | $(BIN)/python
	@echo "Installing what the examples need into $(VENV); PyTorch is large, this can take some minutes."
	$(PIP) --editable ".[examples]"
	@touch $@ $(VENV)/.installed-demo

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "Installing what the tests need into $(VENV); PyTorch is large, this can take some minutes."
	$(PIP) --editable ".[dev]"
	@touch $@ $(VENV)/.installed-examples $(VENV)/.installed-demo
