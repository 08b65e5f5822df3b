# make help lists the targets. Settings: STUDY (which study), CORES, PYTHON, PORT, VENV (an environment of your own),
# PIP_ARGS, SNAKEMAKE_ARGS, PYTEST_ARGS, BENCH_ARGS.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help book test lint checks bench serve lab clean distclean

PYTHON ?= python3
VENV ?= .venv
STUDY ?= study.yml
CORES ?= all
PORT ?= 8000
PIP_ARGS ?=
SNAKEMAKE_ARGS ?=
BENCH_ARGS ?=
STAMP := $(VENV)/.installed
BOOK := book/_build/html/index.html
RUN := PATH="$(abspath $(VENV))/bin:$$PATH"
SNAKEMAKE := $(RUN) snakemake --cores $(CORES) --config study=$(STUDY) --rerun-incomplete --keep-going \
    --quiet rules host $(SNAKEMAKE_ARGS)

help:  ## list the targets
	@sed -nE 's/^([a-z]+):.*  ## (.*)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	    "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	@test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing the pinned packages into $(VENV); the first time takes a few minutes."
	$(VENV)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) \
	    --constraint constraints.txt --editable '.[test]'
	@touch $@

book: $(STAMP)  ## run the study and build the book
	@$(RUN) python -m eelib.book.study_file $(STUDY)
	@mkdir -p .snakemake && touch .snakemake/asked
	@$(SNAKEMAKE) || { echo "The book was not built. The reasons are in logs/."; exit 1; }
	@if [ -z "$(SNAKEMAKE_ARGS)" ] && [ ! $(BOOK) -nt .snakemake/asked ]; then echo "Nothing has changed: the book is up to date."; fi
	@echo "Open file://$(CURDIR)/$(BOOK) or run 'make serve'."

test: book  ## build the book, then run all tests
	@tests/browser.sh
	@$(RUN) python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder \
	    --durations=10 $(PYTEST_ARGS)

lint: $(STAMP)  ## check format, style, stripped notebooks and types
	@$(RUN) ruff format --check --quiet . || { echo "Run: $(VENV)/bin/ruff format ."; exit 1; }
	@$(RUN) ruff check --quiet .
	@$(RUN) nbstripout --verify --keep-id notebooks/*.ipynb
	@$(RUN) mypy

checks: $(STAMP)  ## run the long checks of the engine, except the benchmark; data/checks gets their results
	@for check in families crashes bad_input reproducible joint_memory coverage; do echo "== $$check"; \
	    $(RUN) python -m checks.$$check || { echo "$$check did not finish"; exit 1; }; done
	@echo "What changed in data/checks:"; git status --short -- data/checks; git --no-pager diff --stat -- data/checks

bench: $(STAMP)  ## time a trace beside its floor, the plain way and the peers; BENCH_ARGS passes options
	@$(RUN) python -m checks.speed $(BENCH_ARGS)

serve: book  ## build the book and open it in a browser
	@echo "Serving the book at http://127.0.0.1:$(PORT)/ (Ctrl-C ends it)."
	@($(RUN) python -m webbrowser -t http://127.0.0.1:$(PORT)/ >/dev/null 2>&1 || true) &
	@$(RUN) python -m http.server --bind 127.0.0.1 --directory $(dir $(BOOK)) $(PORT)

lab: $(STAMP)  ## open the notebooks in JupyterLab
	@$(RUN) jupyter lab notebooks

clean:  ## remove the book, results and logs; traces and the environment stay
	rm -rf book/_build book/_toc.yml book/generated book/results results logs .snakemake

distclean: clean  ## remove the traces, the environments and what the benchmark keeps
	rm -rf runs .venv checks/.cache
