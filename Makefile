# pipelab: `make lab` opens the book, `make test` proves it. Every target first sets up .venv, which is instant when it is ready.
#
#   PYTHON=/path/to/python3                the interpreter of a new .venv
#   PORT=8888  NO_BROWSER=1                where JupyterLab listens; print its address and open nothing
#   NB=notebooks/03_microbatches.ipynb     one notebook for book, test-book and colab
#   TESTS=tests/test_ranks.py              some tests for coverage

.DEFAULT_GOAL := help
.PHONY: help setup lab test test-all test-code test-book coverage check fix book exercises links colab grading models html bench gpu

# The environment's programs come first, so that `!python` and `!torchrun` in a cell are ours too.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
PY := .venv/bin/python

NOTEBOOKS := $(sort $(wildcard notebooks/*.ipynb solutions/*.ipynb solutions/*/*.ipynb))
EXERCISES := $(sort $(wildcard exercises/*.ipynb exercises/*/*.ipynb))
NB ?= $(NOTEBOOKS)

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 18

setup: ## make .venv and install the versions of constraints.txt
	@tools/setup.sh

# Loopback only, with a token; no question about news of Jupyter's before the first cell (tools/lab). The port that was asked for or none. No display means no browser.
HEADLESS := $(if $(filter Linux,$(shell uname)),$(if $(DISPLAY)$(WAYLAND_DISPLAY),,yes))
LAB_OPTIONS = --LabApp.default_url=/lab/tree/notebooks/00_start.ipynb \
	--LabApp.app_settings_dir="$(CURDIR)/tools/lab" \
	--ServerApp.ip=127.0.0.1 --ServerApp.root_dir="$(CURDIR)" --log-level=WARN \
	$(if $(PORT),--ServerApp.port=$(PORT) --ServerApp.port_retries=0) \
	$(if $(NO_BROWSER)$(HEADLESS),--no-browser) \
	$(if $(filter 0,$(shell id -u)),--allow-root)

lab: setup ## open JupyterLab at the first chapter
	@exec $(PY) -m jupyterlab $(LAB_OPTIONS)

# Two pytest processes, one for the package and one for all notebooks; the second runs also where the first fails.
STRICT := -c tests/notebooks/strict.ini --rootdir=.
define EVERY_TEST
	@failed=0; \
	$(PY) -m pytest $(MARKED) || failed=1; \
	$(PY) -m pytest $(STRICT) $(NOTEBOOKS) $(EXERCISES) || failed=1; \
	exit $$failed
endef

test: setup ## every check: the package, then every notebook against its stored outputs
	$(EVERY_TEST)

test-all: MARKED := -m ""
test-all: setup ## as test, with the exhaustive cases
	$(EVERY_TEST)

test-code: setup ## the package alone
	@$(PY) -m pytest

test-book: setup ## the notebooks alone
	@$(PY) -m pytest $(STRICT) $(NB)

coverage: setup ## which lines of the package its tests reach, also those that run in ranks
	@$(PY) -m coverage erase && $(PY) -m coverage run -m pytest $(TESTS)
	@$(PY) -m coverage combine -q && $(PY) -m coverage report

check: setup ## style, types, canonical notebooks and exercises, in under a minute
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m mypy
	@$(PY) tools/book.py --lint $(NOTEBOOKS) $(EXERCISES)
	@$(PY) -m tools.exercises --check
	@$(PY) -m tools.hosted --check

fix: setup ## mend what ruff can mend
	@$(PY) -m ruff check --fix
	@$(PY) -m ruff format

book: setup ## execute the notebooks and store their outputs in canonical form
	@$(PY) tools/book.py $(NB)

exercises: setup ## make the students' notebooks from their masters in solutions/
	@$(PY) -m tools.exercises

links: setup ## write badge and first cell for Colab, if pyproject.toml has the repository's address
	@$(PY) -m tools.hosted

colab: setup ## execute the notebooks with the versions of Google Colab, in an environment of their own
	@tools/colab.sh $(if $(filter file,$(origin NB)),$(NOTEBOOKS) $(EXERCISES),$(NB))

grading: setup ## add nbgrader to .venv; its tests then run instead of being skipped
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[grade]'

models: setup ## add transformers to .venv (28 MB); its tests then run instead of being skipped
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[models]'

html: setup ## the book as web pages with contents and search, in build/html
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[html]'
	@$(PY) -m sphinx -q -b html -c docs/html . build/html
	@echo "build/html/index.html"

bench: setup ## measure everything and write benchmarks/README.md, in some twelve minutes; not while others compute
	@$(PY) -m tools.bench

gpu: setup ## the checks and the benchmark that need a GPU; without one they say so
	@$(PY) -m pytest tests/gpu
	@$(PY) benchmarks/gpu.py
