#!/bin/sh
# Makes .venv ready: `make setup`, and the first step of every other target.
#
# A second run only compares the stamp in .venv with what it would install, which takes milliseconds.
# A .venv that another tool made is used as it is. PYTHON=/path/to/python chooses the interpreter of a new one.
set -eu
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/pipelab-setup
supported='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

# The first python3 that is new enough and not too new, and that can make a virtual environment.
find_python() {
    without_venv=
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        "$candidate" -c "$supported" 2>/dev/null || continue
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$candidate"
            return
        fi
        without_venv=${without_venv:-$candidate}
    done
    if [ -n "$without_venv" ]; then
        version=$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
        fail "$without_venv (Python $version) cannot make a virtual environment: its venv module is not installed." \
            "On Debian and Ubuntu: apt install python3-venv (or python$version-venv), then try again."
    fi
    fail "asked for Python 3.10 to 3.13, found none among: ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}." \
        "Install one (on Debian and Ubuntu: apt install python3 python3-venv), or name it: make setup PYTHON=/path/to/python3"
}

# What the stamp holds: the two files that decide what is installed, and the folder that the editable install points to.
fingerprint() {
    pwd
    cksum pyproject.toml constraints.txt
}

if [ -f "$stamp" ] && [ "$(fingerprint)" = "$(cat "$stamp")" ] && "$venv/bin/python" -c "$supported" 2>/dev/null; then
    exit 0
fi

if [ ! -e "$venv" ] && [ ! -L "$venv" ]; then
    python=$(find_python)
    echo "setup: making $venv with $("$python" --version), then installing (a few minutes the first time)"
    "$python" -m venv "$venv"
fi
"$venv/bin/python" -c "$supported" 2>/dev/null ||
    fail "$venv/bin/python does not start, or is not Python 3.10 to 3.13. Remove it (rm -r $venv) and try again."
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip --upgrade >/dev/null 2>&1 ||
    fail "$venv has no pip and cannot get one. Remove it (rm -r $venv) and try again."

quiet=--quiet
[ -t 1 ] && quiet= # somebody watches: show what arrives
"$venv/bin/python" -m pip install $quiet --disable-pip-version-check -c constraints.txt -e '.[lab,dev]'
fingerprint >"$stamp"
echo "setup: $venv is ready ($("$venv/bin/python" --version))"
