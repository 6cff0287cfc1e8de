"""Executes notebooks, each in an empty folder, and says for each of them whether every cell ran: for tools/colab.sh.

    .venv-colab/bin/python -m tools.colab NOTEBOOK...

Nothing is stored. A notebook that a host opens from its address has no repository around it, hence the empty folder.
"""

from __future__ import annotations

import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from tools.book import TERMINAL_COLOUR, execute

SHOWN = ("ipykernel", "ipython", "ipywidgets", "matplotlib", "numpy", "torch", "cloudpickle")


def failure(notebook: Path) -> str | None:
    """What the first cell that failed said; None where every cell ran."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            execute(nbformat.read(notebook, as_version=4), Path(folder))
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            return TERMINAL_COLOUR.sub("", str(error))
    return None


def main(notebooks: list[str]) -> int:
    """The command line; returns 1 where a notebook failed, else 0."""
    print(f"Python {sys.version.split()[0]}, " + ", ".join(f"{name} {version(name)}" for name in SHOWN))
    failed = []
    for name in notebooks:
        begin = time.perf_counter()
        said = failure(Path(name))
        print(f"{'ok    ' if said is None else 'FAILED'} {name}  {time.perf_counter() - begin:.0f} s", flush=True)
        if said is not None:
            failed.append(name)
            print(said, flush=True)
    print(f"{len(notebooks) - len(failed)} of {len(notebooks)} notebooks ran")
    return min(1, len(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
