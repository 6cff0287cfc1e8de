"""Executes notebooks, each in an empty folder, and says how that went for each of them: for tools/colab.sh.

    .venv-colab/bin/python -m tools.colab NOTEBOOK...

A notebook fails where a cell does. Cells that show other text than is stored are named and are no failure: other
versions may write a number in another way. Nothing is stored. A notebook that a host opens from its address has no
repository around it, hence the empty folder.
"""

from __future__ import annotations

import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from tools.book import TERMINAL_COLOUR, canonical, execute

SHOWN = ("ipykernel", "ipython", "ipywidgets", "matplotlib", "numpy", "torch", "cloudpickle")


def text(cell: Any) -> list[dict[str, Any]]:
    """What a cell shows, without its pictures."""
    parts = []
    for output in cell.get("outputs", ()):
        shown = {key: output[key] for key in ("name", "text", "ename", "evalue") if key in output}
        parts.append(shown | {kind: value for kind, value in output.get("data", {}).items() if kind != "image/png"})
    return parts


def other_cells(notebook: nbformat.NotebookNode, stored: nbformat.NotebookNode) -> list[str]:
    """The ids of cells that show other text than is stored; none of a notebook that is stored without outputs."""
    if not any(text(cell) for cell in stored.cells):
        return []
    pairs = zip(canonical(notebook).cells, stored.cells, strict=True)
    compared = [pair for pair in pairs if "nbval-ignore-output" not in pair[1].metadata.get("tags", ())]
    return [str(before.id) for now, before in compared if text(now) != text(before)]


def main(notebooks: list[str]) -> int:
    """The command line; returns 1 where a notebook failed, else 0."""
    print(f"Python {sys.version.split()[0]}, " + ", ".join(f"{name} {version(name)}" for name in SHOWN), flush=True)
    failed = 0
    for name in notebooks:
        notebook = nbformat.read(name, as_version=4)
        begin = time.perf_counter()
        try:
            with tempfile.TemporaryDirectory() as folder:
                execute(notebook, Path(folder))
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            failed += 1
            print(f"FAILED {name}\n{TERMINAL_COLOUR.sub('', str(error))}", flush=True)
            continue
        other = other_cells(notebook, nbformat.read(name, as_version=4))
        said = f"; other text than stored: {', '.join(other)}" if other else ""
        print(f"ok     {name}  {time.perf_counter() - begin:.0f} s{said}", flush=True)
    print(f"{len(notebooks) - failed} of {len(notebooks)} notebooks ran")
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
