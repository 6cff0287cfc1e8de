"""A student's notebook, made fit to be graded: the answers are the student's, all else that counts the master's.

student's notebook          what is run
answer cells                as handed in                                          [1]
checks, given cells         the master's, with its hidden tests                   [2]
such a cell is missing      put back behind the last one before it                [3]
a copy of such a cell       stays as text of the student's, earns nothing         [4]
cells of the student's own  as handed in
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from pipelab.grading.markers import (
    AssignmentError,
    Cell,
    Notebook,
    cells_by_task,
    is_answer,
    is_locked,
    student_source,
    task_of,
)


@dataclass(frozen=True)
class HandedIn:
    """The notebook to run, and a sentence for everything that was put right in it."""

    notebook: Notebook
    notes: tuple[str, ...]


def restore(submitted: Notebook, master: Notebook) -> HandedIn:
    """`submitted` with every locked cell of `master` in place.

    Raises AssignmentError where the two have no cell in common, so that this is the answer to something else.
    """
    known = dict(cells_by_task(master))
    if not any(name in known for name, _ in cells_by_task(submitted)):
        raise AssignmentError(
            f"the notebook has none of the cells {', '.join(list(known)[:3])}, ... of this assignment: "
            "was another one handed in, or its cell metadata lost?"
        )
    notes: list[str] = []
    cells: list[Cell] = []
    seen: set[str] = set()
    for cell in copy.deepcopy(submitted["cells"]):
        name = task_of(cell)
        if name and (name not in known or name in seen):
            notes.append(f"{name}: a copy, or of another assignment; left out of the grading")
            cell["metadata"].pop("nbgrader")  # [4]
        elif name:
            seen.add(name)
            cell = _restored(cell, known[name], notes)
        cells.append(cell)
    for name, original in known.items():
        if name not in seen:
            notes.append(f"{name}: the cell was missing")
            cells.insert(_place(name, list(known), cells), _missing(original))  # [3]
    return HandedIn({**submitted, "cells": cells}, tuple(notes))


def _restored(cell: Cell, original: Cell, notes: list[str]) -> Cell:
    name = task_of(original)
    if is_locked(original):  # [2]
        if cell["source"].strip() != student_source(original).strip():
            notes.append(f"{name}: the cell had been changed; the master's was run")
        return copy.deepcopy(original)
    restored = {**copy.deepcopy(original), "source": cell["source"]}  # [1]
    if cell["cell_type"] != original["cell_type"]:
        notes.append(f"{name}: the cell had become {cell['cell_type']}; it was run as {original['cell_type']}")
    return restored


def _missing(original: Cell) -> Cell:
    cell = copy.deepcopy(original)
    if is_answer(original):
        cell["source"] = student_source(original)
    return cell


def _place(name: str, order: list[str], cells: list[Cell]) -> int:
    before = set(order[: order.index(name)])
    return max((i for i, cell in enumerate(cells) if task_of(cell) in before), default=-1) + 1
