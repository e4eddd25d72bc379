PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
BUSY   := $(VENV)/.busy

.DEFAULT_GOAL := help
.PHONY: help demo test lint clean

help: ## Print this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## Set up, then run the demo
	@$(BIN)/patchcure demo

test: lint ## Set up, then check style and types and run all tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2

lint: $(READY) ## Set up, then check style and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean: ## Remove the environment, caches and what the demo wrote
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist demo-output
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment is busy until its set-up has finished; one that was left busy is made anew.
$(READY): pyproject.toml constraints.txt
	@echo "Setting up $(VENV): once, a few minutes"
	@$(PYTHON) -m venv $(if $(wildcard $(BUSY)),--clear) $(VENV)
	@rm -f $@ && touch $(BUSY)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,demo]"
	@mv $(BUSY) $@
