# make help lists the targets. Settings: STUDY (which study), CORES, PYTHON, PORT, VENV (an environment of your own),
# PIP_ARGS, SNAKEMAKE_ARGS, PYTEST_ARGS, BENCH_ARGS.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help book cluster test test-all lint checks bench serve lab clean distclean

PYTHON ?= python3
VENV ?= .venv
STUDY ?= study.yml
CORES ?= all
PORT ?= 8000
JOBS ?= 100
PARTITION ?=
ACCOUNT ?=
PIP_ARGS ?=
SNAKEMAKE_ARGS ?=
BENCH_ARGS ?=
STAMP := $(VENV)/.installed
BOOK := book/_build/html/index.html
RUN := PATH="$(abspath $(VENV))/bin:$$PATH"
MEMORY := $(shell free -m 2>/dev/null | awk '/^Mem:/ {print $$2}')
SNAKEMAKE := $(RUN) python -m eestudy.book.turn snakemake --cores $(CORES) $(if $(MEMORY),--resources mem_mb=$(MEMORY)) --config study=$(STUDY) --rerun-incomplete --keep-going \
    --quiet rules host $(SNAKEMAKE_ARGS)

TESTS := $(RUN) python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations=10

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/make \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

$(STAMP): constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	    "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11")'
	@test -x $(VENV)/bin/python -a ! -e $(VENV).making || { \
	    clear=; if [ -e $(VENV).making ]; then clear=--clear; fi; touch $(VENV).making; \
	    $(PYTHON) -m venv $$clear $(VENV) && rm $(VENV).making; }
	@echo "Installing the pinned packages into $(VENV); the first time takes a few minutes."
	$(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-compile $(PIP_ARGS) \
	    --constraint constraints.txt --editable '.[test]'
	@$(VENV)/bin/python -m compileall -qq -j 0 $(VENV)/lib || true  # on all cores, as pip does not; some are no Python
	@touch $@

book: $(STAMP)  ## run the study and build the book
	@$(RUN) python -m eestudy.book.study_file $(STUDY)
	@mkdir -p .snakemake && touch .snakemake/asked
	@$(SNAKEMAKE) || { echo "The book was not built. The reasons are in logs/."; exit 1; }
	@if [ -z "$(SNAKEMAKE_ARGS)" ] && [ ! $(BOOK) -nt .snakemake/asked ]; then echo "Nothing has changed: the book is up to date."; fi
	@echo "Open file://$(CURDIR)/$(BOOK) or run 'make serve'."

cluster: $(STAMP)  ## run the study on a Slurm cluster, then build the book; PARTITION, ACCOUNT, JOBS
	@$(RUN) python -m eestudy.book.study_file $(STUDY)
	@$(VENV)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_ARGS) \
	    --constraint constraints.txt snakemake-executor-plugin-slurm
	@$(RUN) python -m eestudy.book.turn snakemake --workflow-profile workflow/profiles/slurm --jobs $(JOBS) --config study=$(STUDY) cluster=slurm \
	    $(if $(PARTITION)$(ACCOUNT),--default-resources runtime=1440 $(if $(PARTITION),slurm_partition=$(PARTITION)) \
	    $(if $(ACCOUNT),slurm_account=$(ACCOUNT))) $(SNAKEMAKE_ARGS) || { \
	    echo "The study is not finished. The reasons: above, in logs/ (.before: of an earlier call), in .snakemake/slurm_logs/."; \
	    exit 1; }

test: $(STAMP)  ## run the quick tests: no book, no browser
	@$(TESTS) -m 'not slow' $(PYTEST_ARGS)

test-all: book  ## build the book, then run all tests; one that can't run here fails, but for those that need a GPU
	@tests/browser.sh
	@$(TESTS) --nothing-skipped $(PYTEST_ARGS)

lint: $(STAMP)  ## check format, style, stripped notebooks and types
	@$(RUN) ruff format --check --quiet . || { echo "Run: $(VENV)/bin/ruff format ."; exit 1; }
	@$(RUN) ruff check --quiet .
	@$(RUN) nbstripout --verify --keep-id notebooks/*.ipynb
	@$(RUN) mypy

checks: $(STAMP)  ## run the long checks of the engine, except the benchmark and the cluster; data/checks gets their results
	@for check in families crashes many_prompts bad_input reproducible joint_memory coverage intervals; do echo "== $$check"; \
	    $(RUN) python -m checks.$$check || { echo "$$check did not finish"; exit 1; }; done
	@echo "What changed in data/checks:"; git status --short -- data/checks; git --no-pager diff --stat -- data/checks

bench: $(STAMP)  ## time traces beside floor, plain way and peers (BENCH_ARGS passes options), early exit beside plain decoding, and the lens
	@$(RUN) python -m checks.speed $(BENCH_ARGS)
	@$(RUN) python -m checks.exits
	@tests/browser.sh
	@$(RUN) python -m checks.lens

serve: book  ## build the book and open it in a browser
	@echo "Serving the book at http://127.0.0.1:$(PORT)/ (Ctrl-C ends it)."
	@($(RUN) python -m webbrowser -t http://127.0.0.1:$(PORT)/ >/dev/null 2>&1 || true) &
	@$(RUN) python -m http.server --bind 127.0.0.1 --directory $(dir $(BOOK)) $(PORT)

lab: $(STAMP)  ## open the notebooks in JupyterLab
	@$(RUN) jupyter lab notebooks

clean:  ## remove the book, results and logs; traces and the environment stay
	rm -rf book/_build book/_toc.yml book/generated book/results results logs .snakemake

distclean: clean  ## remove the traces, the environments and what the benchmark keeps
	rm -rf runs .venv .venv.making checks/.cache
