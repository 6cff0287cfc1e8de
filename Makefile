# pipelab: `make lab` opens the book, `make test` proves it. Every target sets up .venv first, which takes seconds the second time.
#
#   PYTHON=/path/to/python3  the interpreter of a new .venv           PORT=8888     where JupyterLab listens
#   NB=notebooks/03_x.ipynb  one notebook for book, html and test-book   NO_BROWSER=1  print the address, open nothing

.DEFAULT_GOAL := help
.PHONY: help setup lab test test-all test-code test-book check fix book bench html

# The environment's programs come first, so that `!python` and `!torchrun` in a cell mean ours.
RUN := PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python
NOTEBOOKS = $(sort $(wildcard notebooks/*.ipynb solutions/*.ipynb solutions/*/*.ipynb))
EXERCISES = $(sort $(wildcard exercises/*.ipynb exercises/*/*.ipynb))
NB ?= $(NOTEBOOKS)

# Two pytest processes: one for the package, one for all notebooks. The second runs also where the first fails.
STRICT := -c tests/notebooks/strict.ini --rootdir=.
BOTH = status=0; \
	eval "$(RUN) -m pytest $$ALL" || status=1; \
	$(RUN) -m pytest $(STRICT) $(NOTEBOOKS) $(EXERCISES) || status=1; \
	exit $$status

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

setup: ## make .venv and install what constraints.txt pins
	@tools/setup.sh

lab: setup ## open JupyterLab at the first chapter
	@$(RUN) tools/lab.py

test: setup ## every check: the package, then every notebook against its stored outputs
	@$(BOTH)

test-all: setup ## as test, with the exhaustive cases
	@ALL='-m ""'; $(BOTH)

test-code: setup ## the package only
	@$(RUN) -m pytest

test-book: setup ## the notebooks only
	@$(RUN) -m pytest $(STRICT) $(NB)

check: setup ## style, types and canonical notebooks, in under a minute
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check
	@$(RUN) -m mypy
	@$(RUN) tools/book.py --lint $(NOTEBOOKS) $(EXERCISES)

fix: setup ## mend what ruff can mend
	@$(RUN) -m ruff check --fix
	@$(RUN) -m ruff format

book: setup ## execute the notebooks and store their outputs in canonical form
	@$(RUN) tools/book.py $(NB)

html: setup ## the stored notebooks as web pages, in build/html
	@$(RUN) -m nbconvert --to html --embed-images --output-dir build/html $(NB)

bench: setup ## print every benchmark's table
	@for benchmark in benchmarks/*.py; do echo "== $$benchmark" && $(RUN) "$$benchmark" || exit 1; done
