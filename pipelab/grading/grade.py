"""Run a notebook that was handed in against its master, and say what it is worth."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelab.errors import MissingPackageError
from pipelab.grading.handed_in import restore
from pipelab.grading.markers import AssignmentError, Cell, Notebook, is_check, points_of, task_of, with_seed

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CANARY = """\
import pipelab
from pipelab import grading

ours = [(name, vars(room).get(name)) for room in (pipelab, grading) for name in room.__all__]
replaced = [name for name, value in ours if getattr(value, "__module__", "pipelab").split(".")[0] != "pipelab"]
assert not replaced, f"{', '.join(replaced)} of pipelab had been replaced"
try:
    grading.expect("1", 1, 2)
except AssertionError:
    raise AssertionError("as it should be") from None
raise AssertionError("the comparison that checks use had been replaced")
"""


@dataclass(frozen=True)
class Mark:
    """One check: its points, and where they were not given, what it said."""

    task: str
    points: float
    max_points: float
    message: str


@dataclass(frozen=True)
class Grade:
    """What a notebook is worth. `notes` says what was put right in it before it ran; str() is JSON."""

    notebook: str
    points: float
    max_points: float
    marks: tuple[Mark, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return json.dumps(asdict(self), indent=2, ensure_ascii=False)


def grade(notebook: str | Path, master: str | Path, *, seed: int | None = None, cell_timeout_s: float = 60.0) -> Grade:
    """Run `notebook` with the checks of `master` in a kernel of its own, in the folder of the notebook.

    A check earns its points by running to its end. A cell that takes longer than `cell_timeout_s` seconds is stopped; a
    kernel that dies, or cannot be stopped, ends the run, and what was not reached earns nothing. Last runs a check that
    must fail, and where it does not, a note says that the marks are not to be trusted. `seed` is the one that the
    student's notebook was made with, None for the master's own. The student's code is run as it is, with the rights of
    whoever grades.

    Raises AssignmentError for files that are no notebooks or do not belong together, MissingPackageError without
    nbclient.
    """
    given = _read(master)
    given = given if seed is None else with_seed(given, seed)
    handed_in = restore(_read(notebook), given)
    messages, death, doubt = _execute(handed_in.notebook, Path(notebook).resolve().parent, cell_timeout_s)
    marks = tuple(_mark(cell, messages, death) for cell in handed_in.notebook["cells"] if is_check(cell))
    return Grade(
        notebook=Path(notebook).name,
        points=sum(mark.points for mark in marks),
        max_points=sum(mark.max_points for mark in marks),
        marks=marks,
        notes=(*handed_in.notes, *doubt),
    )


def _read(path: str | Path) -> Notebook:
    nbformat = _jupyter("nbformat")
    try:
        notebook: Notebook = nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise AssignmentError(f"there is no file {path}") from None
    except Exception as error:  # nbformat raises half a dozen kinds
        raise AssignmentError(f"{path} is no notebook: {' '.join(str(error).split())[:200]}") from None
    return notebook


def _execute(notebook: Notebook, folder: Path, cell_timeout_s: float) -> tuple[dict[str, str], str, tuple[str, ...]]:
    """Run every cell: for each check that was run its message, "" where it passed; how the kernel ended; and doubts."""
    nbclient, exceptions, nbformat = map(_jupyter, ("nbclient", "nbclient.exceptions", "nbformat"))
    canary = nbformat.v4.new_code_cell(_CANARY)
    messages: dict[str, str] = {}
    stopped: list[bool] = []
    last = ""

    def executed(cell: Any, execute_reply: Any, **_: Any) -> None:
        nonlocal last
        reply = execute_reply["content"]
        last = "" if reply["status"] == "ok" else _message(reply)
        if is_check(cell):
            messages[task_of(cell)] = last
        stopped.append(last == f"TimeoutError: {late}")
        if stopped[-2:] == [True, True]:  # the second one never began
            raise exceptions.DeadKernelError(late)

    late = f"stopped after {cell_timeout_s:g} s"
    client = nbclient.NotebookClient(
        nbformat.from_dict({**notebook, "cells": [*notebook["cells"], canary]}),
        timeout=cell_timeout_s,
        interrupt_on_timeout=True,
        error_on_timeout={"ename": "TimeoutError", "evalue": late, "traceback": []},
        allow_errors=True,
        kernel_name="python3",
        record_timing=False,
        extra_arguments=["--log-level=ERROR"],
        resources={"metadata": {"path": str(folder)}},
        on_cell_executed=executed,
    )
    try:
        client.execute(stdout=subprocess.DEVNULL)  # a copy of what child processes print
    except exceptions.DeadKernelError:
        how = "could not be stopped" if stopped[-1:] == [True] else "died"
        return messages, f"the kernel {how} before this check, or in it", ()
    sound = last == "as it should be"
    return messages, "", () if sound else (f"these marks are not to be trusted: {last or 'a wrong check passed'}",)


def _message(reply: Any) -> str:
    if "ename" not in reply:
        return str(reply["status"])
    return _COLOUR.sub("", f"{reply['ename']}: {reply['evalue']}").removeprefix("AssertionError: ")


def _mark(cell: Cell, messages: dict[str, str], death: str) -> Mark:
    message, worth = messages.get(task_of(cell), death or "not run"), points_of(cell)
    return Mark(task_of(cell), 0.0 if message else worth, worth, message)


def _jupyter(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError:
        raise MissingPackageError(f"grading runs notebooks and needs {name}: pip install 'pipelab[lab]'") from None
