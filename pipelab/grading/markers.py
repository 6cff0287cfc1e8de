"""The language of a master, which is nbgrader's: what kind of cell this is, and what of it a student sees.

A master holds task, solution and checks of every exercise in one notebook. The entry `nbgrader` in a cell's metadata
says what the cell is, and comment lines mark what is left out of the student's notebook:

    ### BEGIN SOLUTION ... ### END SOLUTION             replaced by a line that raises NotImplementedError
    ### BEGIN HIDDEN TESTS ... ### END HIDDEN TESTS     left out without a trace

Cells here are dictionaries as nbformat reads them, with their source as one string.
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

from pipelab.errors import PipelabError

Cell: TypeAlias = "dict[str, Any]"
Notebook: TypeAlias = "dict[str, Any]"

SEED = re.compile(r"^SEED = \d+", re.MULTILINE)
MARKERS = ("BEGIN SOLUTION", "END SOLUTION", "HIDDEN TESTS")
FOLDED: dict[str, Any] = {"jupyter": {"source_hidden": True}, "cellView": "form"}  # by JupyterLab, by Colab


class AssignmentError(PipelabError, ValueError):
    """A notebook is no master, or not the answer to one."""


def task_of(cell: Cell) -> str:
    """The name under which nbgrader knows a cell; "" where it does not."""
    return str(cell["metadata"].get("nbgrader", {}).get("grade_id", ""))


def is_answer(cell: Cell) -> bool:
    """Whether a student writes in this cell."""
    return bool(cell["metadata"].get("nbgrader", {}).get("solution"))


def is_check(cell: Cell) -> bool:
    """Whether this cell decides about points."""
    return bool(cell["metadata"].get("nbgrader", {}).get("grade"))


def is_locked(cell: Cell) -> bool:
    """Whether the master's text counts, whatever the student's notebook has: checks, and what is given."""
    return not is_answer(cell) and (is_check(cell) or bool(cell["metadata"].get("nbgrader", {}).get("locked")))


def points_of(cell: Cell) -> float:
    """What passing this check is worth; 0 for other cells."""
    return float(cell["metadata"]["nbgrader"]["points"]) if is_check(cell) else 0.0


def is_master(notebook: Notebook) -> bool:
    """Whether this notebook is an assignment at all: it has a cell that nbgrader knows."""
    return any(task_of(cell) for cell in notebook["cells"])


def cells_by_task(notebook: Notebook) -> Iterator[tuple[str, Cell]]:
    """Each cell that nbgrader knows, with its name."""
    return ((task_of(cell), cell) for cell in notebook["cells"] if task_of(cell))


def student_notebook(master: Notebook) -> Notebook:
    """A copy of `master` as it is handed out: no solutions, no hidden tests, no outputs, folded checks that may fail.

    A cell that nbgrader does not know may fail, too, where it stands behind an answer: it may use what is not solved.
    Raises AssignmentError where markers or metadata do not fit together.
    """
    notebook = copy.deepcopy(master)
    names: set[str] = set()
    behind_an_answer = False
    for cell in notebook["cells"]:
        name = task_of(cell)
        if name and name in names:
            raise AssignmentError(f"two cells have the nbgrader name {name!r}; every one needs its own")
        names.add(name)
        cell["source"] = student_source(cell)
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
        behind_an_answer = behind_an_answer or is_answer(cell)
        if name:
            _close(cell)
        elif cell["cell_type"] == "code" and behind_an_answer:
            _may_fail(cell)
    return notebook


def student_source(cell: Cell) -> str:
    """The text of a master's cell that a student sees. Raises AssignmentError where markers do not fit the cell."""
    without_solution, solutions = _cut(cell, "SOLUTION", _stub(task_of(cell)))
    if is_answer(cell) != bool(solutions):
        raise AssignmentError(
            f"cell {_where(cell)} is {'an answer without' if is_answer(cell) else 'no answer, but has'} a region "
            "### BEGIN SOLUTION ... ### END SOLUTION: mark both, or neither"
        )
    text, hidden = _cut({**cell, "source": without_solution}, "HIDDEN TESTS", ())
    if hidden and not is_check(cell):
        raise AssignmentError(f"cell {_where(cell)} has hidden tests and is no check: it would earn no points")
    return text


def with_seed(notebook: Notebook, seed: int) -> Notebook:
    """A copy of `notebook` whose line `SEED = ...` says `seed`. Raises AssignmentError where there is no such line."""
    changed = copy.deepcopy(notebook)
    cells = [cell for cell in changed["cells"] if cell["cell_type"] == "code" and SEED.search(cell["source"])]
    if not cells:
        raise AssignmentError("this assignment has no line 'SEED = 0', so its numbers cannot be varied")
    cells[0]["source"] = SEED.sub(f"SEED = {int(seed)}", cells[0]["source"], count=1)
    return changed


def checksum(cell: Cell) -> str:
    """nbgrader's checksum of a cell, by which it sees that a locked cell was changed."""
    parts = [cell["source"], cell["cell_type"], *map(str, (is_check(cell), is_answer(cell), is_locked(cell)))]
    parts.append(task_of(cell))
    if is_check(cell):
        parts.append(str(points_of(cell)))
    return hashlib.md5("".join(parts).encode(), usedforsecurity=False).hexdigest()


def _stub(name: str) -> tuple[str, ...]:
    return "# YOUR CODE HERE", f'raise NotImplementedError("{name} is not solved yet")'


def _cut(cell: Cell, what: str, instead: tuple[str, ...]) -> tuple[str, int]:
    """The cell's text with every region of `what` replaced by the lines `instead`, and how many there were."""
    kept: list[str] = []
    regions, inside = 0, False
    for line in cell["source"].split("\n"):
        begins, ends = f"BEGIN {what}" in line, f"END {what}" in line
        if (begins and inside) or (ends and not inside):
            raise AssignmentError(f"cell {_where(cell)}: {line.strip()!r} stands where no region can {line.split()[1]}")
        if begins:
            regions, inside = regions + 1, True
            indent = line[: len(line) - len(line.lstrip())]
            kept += [indent + one for one in instead]
        elif ends:
            inside = False
        elif not inside:
            kept.append(line)
    if inside:
        raise AssignmentError(f"cell {_where(cell)} has BEGIN {what} without END {what}")
    return "\n".join(kept), regions


def _close(cell: Cell) -> None:
    """Metadata of a cell that nbgrader knows: what Jupyter shows and lets a student do, and what Run All may meet."""
    metadata = cell["metadata"]
    metadata["deletable"] = False
    if is_locked(cell):
        metadata["editable"] = False
    if cell["cell_type"] == "code" and (is_answer(cell) or is_check(cell)):
        _may_fail(cell)
    if cell["cell_type"] == "code" and is_check(cell):
        metadata.update(copy.deepcopy(FOLDED))
    metadata["nbgrader"]["cell_type"] = cell["cell_type"]
    metadata["nbgrader"]["checksum"] = checksum(cell)


def _may_fail(cell: Cell) -> None:
    cell["metadata"]["tags"] = sorted({*cell["metadata"].get("tags", ()), "raises-exception"})


def _where(cell: Cell) -> str:
    return repr(task_of(cell) or cell.get("id") or cell["source"][:30])
