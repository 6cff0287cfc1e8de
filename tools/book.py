"""The book's notebooks: execute them in place and store them in one canonical form.

    python tools/book.py NOTEBOOK...            execute, then write (make book)
    python tools/book.py --format NOTEBOOK...   write only, nothing runs
    python tools/book.py --lint NOTEBOOK...     change nothing, fail where a file is not canonical (make check)

A notebook that Jupyter saved differs from the last commit in a hundred places that nobody wrote: time stamps,
widget ids, random cell ids, metadata of one person's machine. Canonical form has none of them, so executing twice
gives the same bytes, and a diff shows what an author changed:

* notebook metadata is fixed; a cell keeps its tags, its nbgrader entry and whether its source or output starts hidden
* cell ids are words: an author's id stays, a random one becomes the first words of its cell
* execution counts run 1, 2, 3, ...
* no live widget views (their ids are random): the text and the picture beside them stay
* pictures have a palette of 128 colours, a quarter of the bytes and the same to the eye
* tracebacks have no terminal colours; empty code cells at the end are gone
"""

from __future__ import annotations

import argparse
import base64
import copy
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from PIL import Image

CELL_TIMEOUT_S = 600
COLOURS = 128
NOTEBOOK_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_METADATA = ("cellView", "deletable", "editable", "jupyter", "nbgrader", "tags")
LIVE_WIDGETS = ("application/vnd.jupyter.widget-view+json", "application/vnd.jupyter.widget-state+json")
RANDOM_ID = re.compile(r"[0-9a-f]{8}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # nbformat's, JupyterLab's
TERMINAL_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def kernel_environment() -> dict[str, str]:
    """The environment of a kernel that stores or checks outputs: this one, less what would change them.

    Sets print in one order, figures come inline, and the variables go that pytest and a terminal leave behind: with
    PYTEST_CURRENT_TEST in sight ipykernel drops what child processes print.
    """
    dropped = {"PYTEST_CURRENT_TEST", "PYTHONWARNINGS", "FORCE_COLOR"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"PYTHONHASHSEED": "0", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}


def execute(notebook: nbformat.NotebookNode, folder: Path) -> None:
    """Run every cell of `notebook` in a new kernel in `folder` and keep the outputs in it.

    Raises nbclient's CellExecutionError, CellTimeoutError or DeadKernelError.
    """
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        store_widget_state=False,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=kernel_environment(), stdout=subprocess.DEVNULL)  # a copy of what child processes print


def canonical(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """A copy of `notebook` in canonical form; a notebook that is canonical comes back equal."""
    notebook = copy.deepcopy(notebook)
    notebook.metadata = nbformat.from_dict(NOTEBOOK_METADATA)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    while notebook.cells and notebook.cells[-1].cell_type == "code" and not notebook.cells[-1].source.strip():
        notebook.cells.pop()

    for cell, cell_id in zip(notebook.cells, _cell_ids(notebook.cells), strict=True):
        cell["id"] = cell_id
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in CELL_METADATA if key in cell.metadata})
        if "tags" in cell.metadata:
            cell.metadata.tags = sorted(set(cell.metadata.tags))

    executed = (cell for cell in notebook.cells if cell.cell_type == "code" and cell.execution_count is not None)
    for count, cell in enumerate(executed, start=1):
        cell.execution_count = count
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [_canonical_output(output, cell.execution_count) for output in _join_streams(cell.outputs)]
    return notebook


def to_text(notebook: nbformat.NotebookNode) -> str:
    """The bytes that a notebook file holds, as text: canonical form, one line feed at the end."""
    return str(nbformat.writes(canonical(notebook), version=4)).rstrip("\n") + "\n"


def lint(path: Path) -> str | None:
    """What keeps the file from being canonical, named by its first line that differs; None where nothing does."""
    found = path.read_text(encoding="utf-8")
    wanted = to_text(nbformat.reads(found, as_version=4))
    if found == wanted:
        return None
    pairs = zip([*found.splitlines(), ""], [*wanted.splitlines(), ""], strict=False)
    differing = ((number, *pair) for number, pair in enumerate(pairs, start=1) if pair[0] != pair[1])
    number, has, should = next(differing, (found.count("\n") + 1, "", ""))
    return f"{path}:{number}: not canonical, found {has.strip()[:60]!r}, expected {should.strip()[:60]!r}"


def small_png(png: str) -> str:
    """The picture with a palette, as base64; one that already has a palette, or would grow, stays as it is."""
    raw = base64.b64decode(png)
    picture = Image.open(io.BytesIO(raw))
    if picture.mode == "P":
        return png
    opaque = Image.new("RGBA", picture.size, "white")
    opaque.alpha_composite(picture.convert("RGBA"))
    out = io.BytesIO()
    # a rare colour counts as much as a common one, or a thin line would take that of its neighbours; then each moves
    # to the middle of its pixels, or two pale areas would become one colour
    few = opaque.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=1, dither=Image.Dither.NONE)
    few.save(out, "PNG", optimize=True)
    return base64.b64encode(min(out.getvalue(), raw, key=len)).decode()


def _cell_ids(cells: Iterable[nbformat.NotebookNode]) -> Iterator[str]:
    """One id a cell, unique in its notebook: an author's own, or the first words of the cell."""
    taken: set[str] = set()
    for cell in cells:
        wanted = cell.get("id", "")
        if not wanted or RANDOM_ID.fullmatch(wanted):
            words = re.findall(r"[a-z0-9]+", cell.source.lower())
            wanted = "-".join([cell.cell_type, *words[:4]])[:48]
        cell_id = next(name for name in (wanted, *(f"{wanted}-{n}" for n in range(2, 9999))) if name not in taken)
        taken.add(cell_id)
        yield cell_id


def _join_streams(outputs: Iterable[Any]) -> list[Any]:
    """Neighbouring pieces of one stream as one piece: where a kernel cuts its text is a matter of timing."""
    joined: list[Any] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def _canonical_output(output: Any, execution_count: int | None) -> Any:
    if "execution_count" in output:
        output.execution_count = execution_count
    if "metadata" in output:
        output.metadata = nbformat.from_dict({})
    data = output.get("data", {})
    for live in LIVE_WIDGETS:
        data.pop(live, None)
    if "image/png" in data:
        data["image/png"] = small_png(data["image/png"])
    if output.output_type == "error":
        output.traceback = [TERMINAL_COLOUR.sub("", line) for line in output.traceback]
    return output


def rewrite(path: Path, *, run: bool) -> None:
    """Write `path` in canonical form, after executing it if `run`; a notebook that fails leaves the file untouched."""
    notebook = nbformat.read(path, as_version=4)
    if run:
        execute(notebook, path.parent)
    new = path.with_name(f".{path.name}.new")
    new.write_text(to_text(notebook), encoding="utf-8", newline="\n")
    new.replace(path)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 1 where a notebook failed or is not canonical, else 0."""
    parser = argparse.ArgumentParser(description="Execute notebooks in place and store them in canonical form.")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--lint", action="store_true", help="change nothing, fail where a file is not canonical")
    how.add_argument("--format", action="store_true", help="write canonical form without executing")
    parser.add_argument("notebooks", nargs="*", type=Path)
    given = parser.parse_args(arguments)

    failed = 0
    for path in given.notebooks:
        if given.lint:
            if complaint := lint(path):
                failed += 1
                print(complaint)
            continue
        begin = time.perf_counter()
        try:
            rewrite(path, run=not given.format)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            failed += 1
            print(f"{path}: failed, left as it was\n{TERMINAL_COLOUR.sub('', str(error))}")
        else:
            print(f"{path}: {time.perf_counter() - begin:.1f} s", flush=True)
    if given.lint and failed:
        print(f"{failed} of {len(given.notebooks)} not canonical: run make book NB=FILE,")
        print("or tools/book.py --format FILE where no output changed")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
