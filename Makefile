# make help lists the targets. Settings: STUDY (which study), CORES, PYTHON, PORT, VENV (an environment of your own),
# PIP_ARGS, SNAKEMAKE_ARGS, PYTEST_ARGS.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help book test test-all lint bench measure serve lab clean

PYTHON ?= python3
VENV ?= .venv
STUDY ?= study.yml
CORES ?= all
PORT ?= 8000
STAMP := $(VENV)/.installed
BOOK := book/_build/html/index.html
RUN := PATH="$(abspath $(VENV))/bin:$$PATH"
TESTS := $(RUN) python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations=10

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	@test -x $(VENV)/bin/python -a ! -e $(VENV).making || { \
	    clear=$$(test ! -e $(VENV).making || echo --clear); touch $(VENV).making; \
	    $(PYTHON) -m venv $$clear $(VENV) && rm $(VENV).making; }
	@echo "Installing the pinned packages into $(VENV); the first time takes a few minutes."
	$(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-compile $(PIP_ARGS) --constraint constraints.txt --editable '.[test]'
	@$(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib || true  # on all cores, as pip does not; some are no Python
	@touch $@

book: $(STAMP)  ## run the study and build the book
	@mkdir -p .snakemake && touch .snakemake/asked
	@$(RUN) python -m eestudy.book "$(STUDY)" --cores $(CORES) $(SNAKEMAKE_ARGS) || { echo "The book was not built. The reasons are above, or in logs/."; exit 1; }
	@if [ -z "$(SNAKEMAKE_ARGS)" ] && [ ! $(BOOK) -nt .snakemake/asked ]; then echo "Nothing has changed: the book is up to date."; fi
	@echo "Open file://$(CURDIR)/$(BOOK) or run 'make serve'."

test: $(STAMP)  ## run the quick tests: no book, no browser
	@$(TESTS) -m 'not slow' $(PYTEST_ARGS)

test-all: book  ## build the book, then run all tests; one that can't run here fails, but for those that need a GPU
	@tests/browser.sh
	@$(TESTS) --nothing-skipped $(PYTEST_ARGS)

lint: $(STAMP)  ## check format, style, words, stripped notebooks and types
	@$(RUN) ruff format --check --quiet . || { echo "Run: $(VENV)/bin/ruff format ."; exit 1; }
	@$(RUN) ruff check --quiet .
	@$(RUN) python workflow/lint_words.py
	@$(RUN) nbstripout --verify --keep-id notebooks/*.ipynb
	@$(RUN) mypy

bench: $(STAMP)  ## time traces, early exit and the lens beside the best plain ways
	@tests/browser.sh
	@$(RUN) python -m checks bench

measure: $(STAMP)  ## run what takes hours; data/measured gets the results
	@tests/browser.sh
	@$(RUN) python -m checks measure

serve: book  ## build the book and open it in a browser
	@($(RUN) python -m webbrowser -t http://127.0.0.1:$(PORT)/ >/dev/null 2>&1 || true) &
	@$(RUN) python -m http.server --bind 127.0.0.1 --directory $(dir $(BOOK)) $(PORT)

lab: $(STAMP)  ## open the notebooks in JupyterLab
	@$(RUN) jupyter lab notebooks

clean:  ## remove the book, results and logs; traces and the environment stay
	rm -rf book/_build book/_toc.yml book/generated book/results results logs .snakemake
