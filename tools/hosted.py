"""The two cells by which a notebook opens on a host such as Colab, written into every notebook from one address.

    python -m tools.hosted            write them into notebooks/ and exercises/ (make links)
    python -m tools.hosted --check    change nothing, fail where a notebook has other ones (make check)

The address is `Repository` under [project.urls] in pyproject.toml. Below a notebook's title then stand a badge, which
opens this notebook in Colab, and a code cell, which installs pipelab where it is missing and does nothing elsewhere.
Without an address there is nothing to install from, and neither cell is written. Authors never type them.
"""

from __future__ import annotations

import argparse
import copy
import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell

from tools.book import to_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
FOLDERS = ("notebooks", "exercises")
BRANCH = "main"
GITHUB = "https://github.com/"
INSTALL = """\
from importlib.util import find_spec

if find_spec("pipelab") is None:  # on a host such as Colab; where pipelab is installed this cell does nothing
    %pip install --quiet "pipelab @ git+{address}" scikit-learn"""
BADGE = """\
[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]\
(https://colab.research.google.com/github/{project}/blob/{branch}/{place})"""


def repository(root: Path) -> str | None:
    """The project's address, without a slash or .git at its end; None where pyproject.toml names none."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = str(project.get("urls", {}).get("Repository", ""))
    return address.rstrip("/").removesuffix(".git") or None


def hosted(notebook: nbformat.NotebookNode, address: str | None, place: str | None = None) -> nbformat.NotebookNode:
    """A copy of `notebook` with the cells that `address` asks for, in place of those it has.

    `place` is the notebook's path in the repository; without it, or where the address is not on GitHub, there is no
    badge, for Colab opens notebooks from GitHub only.
    """
    notebook = copy.deepcopy(notebook)
    cells = [cell for cell in notebook.cells if "hosted" not in cell.metadata.get("tags", ())]
    ours = []
    if address and address.startswith(GITHUB) and place:
        badge = BADGE.format(project=address.removeprefix(GITHUB), branch=BRANCH, place=place)
        ours.append(new_markdown_cell(badge, id="hosted-badge"))
    if address:
        # It prints nothing where the outputs are stored, so it may count as executed where the others are.
        count = 1 if any(cell.get("execution_count") for cell in cells) else None
        ours.append(new_code_cell(INSTALL.format(address=address), id="hosted-install", execution_count=count))
    for cell in ours:
        cell.metadata["tags"] = ["hosted", "remove-cell"]  # ours; and nothing for a reader of the web pages
    notebook.cells = [*cells[:1], *ours, *cells[1:]]
    return notebook


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 1 where --check finds a notebook with other cells than it should have, else 0."""
    parser = argparse.ArgumentParser(description="Write the cells by which notebooks open on a host such as Colab.")
    parser.add_argument("--check", action="store_true", help="change nothing, fail where a notebook is not up to date")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository, with its pyproject.toml")
    given = parser.parse_args(arguments)
    address = repository(given.root)
    wrong = 0
    for path in sorted(path for folder in FOLDERS for path in (given.root / folder).rglob("*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        notebook = nbformat.read(path, as_version=4)
        wanted = hosted(notebook, address, path.relative_to(given.root).as_posix())
        if wanted == notebook:
            continue
        wrong += 1
        if given.check:
            print(f"{path}: other cells for hosts than Repository = {address!r} in pyproject.toml asks for")
        else:
            path.write_text(to_text(wanted), encoding="utf-8", newline="\n")
            print(path)
    if given.check and wrong:
        print("run make links")
    return min(1, wrong) if given.check else 0


if __name__ == "__main__":
    sys.exit(main())
