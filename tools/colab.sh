#!/bin/sh
# Runs notebooks with the versions of Google Colab: `make colab`, or tools/colab.sh NOTEBOOK...
#
# Makes .venv-colab with the pins of tools/colab.txt, installs pipelab into it as Colab would, without any extra, and
# executes each notebook in an empty folder. The first run downloads and takes minutes; Python is that of .venv.
set -eu
cd "$(dirname "$0")/.."

venv=.venv-colab
[ -x "$venv/bin/python" ] || .venv/bin/python -m venv "$venv"
# What Colab brings along beside Jupyter and torch, and nbclient, which runs the notebooks here
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c tools/colab.txt \
    ipykernel ipython scikit-learn nbclient .
export PATH="$PWD/$venv/bin:$PATH"
export PYDEVD_DISABLE_FILE_VALIDATION=1 # else an old ipykernel warns of a debugger that nobody starts
exec "$venv/bin/python" -m tools.colab "$@"
