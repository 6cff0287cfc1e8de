"""tools/setup.sh says what to do where it cannot go on, and does nothing where nothing is to be done."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Interpreters as setup.sh sees them: it asks each for its version, then for ensurepip.
TOO_OLD = "exit 1"
WITHOUT_VENV = f"""
case "$2" in
    *ensurepip*) exit 1 ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what setup.sh reads, and nothing that it could install."""
    (tmp_path / "tools").mkdir()
    for name in ("tools/setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def interpreter(path: Path, script: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def setup(checkout: Path, python: str = "") -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHON=python)
    return subprocess.run([checkout / "tools/setup.sh"], env=environment, capture_output=True, text=True, check=False)


def test_setup_names_the_pythons_that_it_takes(checkout: Path) -> None:
    result = setup(checkout, interpreter(checkout / "python3.9", TOO_OLD))
    assert result.returncode == 1
    assert f"asked for Python 3.10 to 3.13, found none among: {checkout}/python3.9" in result.stderr
    assert "PYTHON=/path/to/python3" in result.stderr


def test_setup_says_what_to_install_where_the_venv_module_is_missing(checkout: Path) -> None:
    result = setup(checkout, interpreter(checkout / "python3", WITHOUT_VENV))
    assert result.returncode == 1
    assert "cannot make a virtual environment: its venv module is not installed" in result.stderr
    assert "apt install python3-venv" in result.stderr
    assert not (checkout / ".venv").exists()


def test_setup_refuses_an_environment_that_does_not_start(checkout: Path) -> None:
    interpreter(checkout / ".venv/bin/python", TOO_OLD)
    result = setup(checkout)
    assert result.returncode == 1
    assert "does not start, or is not Python 3.10 to 3.13. Remove it (rm -r .venv)" in result.stderr


def test_setup_installs_once_and_again_when_a_pin_changes(checkout: Path) -> None:
    asked = checkout / "asked"
    interpreter(
        checkout / ".venv/bin/python",
        f'case "$*" in *install*) echo "$@" >>{asked} ;; *) exec {sys.executable} "$@" ;; esac',
    )
    assert setup(checkout).returncode == 0
    assert setup(checkout).stdout == ""
    assert asked.read_text().count("-c constraints.txt -e .[lab,dev]") == 1
    (checkout / "constraints.txt").write_text("torch==2.13.0\n")
    assert ".venv is ready" in setup(checkout).stdout
    assert asked.read_text().count("-c constraints.txt -e .[lab,dev]") == 2


def test_lab_asks_nothing_before_the_first_cell() -> None:
    # JupyterLab asked every new reader about news, on top of the first chapter
    lab = subprocess.run(["make", "--dry-run", "lab"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (folder,) = re.findall(r'--LabApp.app_settings_dir="(.*?)"', lab)
    settings = json.loads((Path(folder) / "overrides.json").read_text())
    assert settings["@jupyterlab/apputils-extension:notification"] == {"fetchNews": "false", "checkForUpdates": False}
