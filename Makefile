# What people type in a checkout. Everything runs in .venv, which is made anew when
# pyproject.toml or constraints.txt change. Another Python: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What a run needs, and what development needs beside it.
RUN := $(VENV)/.made-from-pyproject-and-constraints
DEV := $(VENV)/.with-development-tools

.DEFAULT_GOAL := help
.PHONY: help demo test nightly mutants lint style types kernels generate site tree counts dist clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(RUN)  ## Train a small model with three nodes on this machine
	$(BIN)/atoll demo $(ARGS)

test: $(DEV)  ## Check everything, then run all tests
	@$(MAKE) --no-print-directory --jobs 2 types style kernels
	$(BIN)/pytest -n 3 $(ARGS)

nightly: $(DEV)  ## Run the long tests, and 30 times as many examples of properties
	$(BIN)/pytest -m nightly -rs $(ARGS)
	$(BIN)/pytest tests/property --hypothesis-profile=nightly $(ARGS)

mutants: $(DEV)  ## Put some 200 bugs into a copy, one at a time, and count what tests notice
	$(BIN)/python tools/mutants.py $(ARGS)

lint: style types  ## Check style, types, walls and generated code

style: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python tools/generate_protocol.py --check
	PYTHONPATH=. $(BIN)/python tools/generate_reference.py --check

types: $(DEV)
	$(BIN)/mypy

# Else the first nodes of the tests would each compile them at the same time.
kernels: $(DEV)
	$(BIN)/python tools/compile_kernels.py

generate: $(DEV)  ## Write protocol/v1 anew from proto/, and docs/reference.md from the code
	$(BIN)/python tools/generate_protocol.py
	PYTHONPATH=. $(BIN)/python tools/generate_reference.py

site: $(DEV)  ## Build the pages of docs/ as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

tree:  ## Print what each file is for
	@$(PYTHON) tools/tree.py

counts: $(DEV)  ## Count files, lines, and files that a round and a push enter
	$(BIN)/python tools/counts.py $(ARGS)

dist: $(DEV)  ## Make the wheel that others install without a checkout, and the tested versions beside it
	rm -rf dist
	$(BIN)/python -m hatchling build --target wheel --directory dist
	cp constraints.txt dist

clean:  ## Remove .venv and caches; demo folders stay
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

$(RUN): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  sys.exit(None if (3, 11, 1) <= v < (3, 14) else \
	    f"Atoll needs Python 3.11.1 to 3.13, and $(PYTHON) is {v[0]}.{v[1]}.{v[2]}; name one: make PYTHON=python3.12")'
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-compile -c constraints.txt torch
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[node]'
	@# What pip would do on one core. Some packages carry files that are not for this Python.
	-@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib
	@touch $@

$(DEV): $(RUN)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@
