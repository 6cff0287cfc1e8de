"""An assignment in this process: its exercises, and what a check says to an answer, without a kernel."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from textwrap import dedent
from typing import Any

import nbformat

from pipelab.grading.markers import (
    Notebook,
    is_answer,
    is_check,
    is_locked,
    is_master,
    points_of,
    student_notebook,
    task_of,
    with_seed,
)

ROOT = Path(__file__).parents[2]
MASTERS = [path for path in sorted((ROOT / "solutions").glob("*.ipynb")) if is_master(nbformat.read(path, 4))]


@dataclass(frozen=True)
class Mutant:
    """A plausible wrong answer: its name, its text, and what the check must say to it.

    `answer` is the whole text of the answer cell, or pairs (old, new) that are changed in the solution. One that is
    right on the visible case and wrong elsewhere, `hard_coded`, must be caught by the hidden tests and by them alone.
    """

    name: str
    says: str
    answer: str | tuple[tuple[str, str], ...]
    hard_coded: bool = False

    def text(self, solution: str) -> str:
        """The answer cell with the wrong answer in it."""
        if isinstance(self.answer, str):
            return dedent(self.answer).strip()
        for old, new in self.answer:
            assert solution.count(old) >= 1, f"mutant {self.name!r}: the solution has no {old!r}"
            solution = solution.replace(old, new)
        return solution


@dataclass(frozen=True)
class Exercise:
    """One task of an assignment: the words before it, the answer cell, and its check with and without hidden tests."""

    task: str
    words: str
    solution: str
    unsolved: str
    check: str
    visible_check: str
    points: float


class Assignment:
    """The master of one assignment, read from `path`, with another seed where one is given."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        self.name = path.stem
        self.master: Notebook = nbformat.read(path, as_version=4)
        if seed:
            self.master = with_seed(self.master, seed)
        self.student = student_notebook(self.master)

    @cached_property
    def exercises(self) -> dict[str, Exercise]:
        """By the name of the task, in the order of the notebook."""
        masters = {task_of(cell): cell for cell in self.master["cells"] if task_of(cell)}
        students = {task_of(cell): cell for cell in self.student["cells"] if task_of(cell)}
        words = {cell["id"]: cell["source"] for cell in self.master["cells"] if cell["cell_type"] == "markdown"}
        return {
            task: Exercise(
                task=task,
                words=words[f"task-{task}"],
                solution=cell["source"],
                unsolved=students[task]["source"],
                check=masters[f"check_{task}"]["source"],
                visible_check=students[f"check_{task}"]["source"],
                points=points_of(masters[f"check_{task}"]),
            )
            for task, cell in masters.items()
            if is_answer(cell)
        }

    @cached_property
    def given(self) -> dict[str, Any]:
        """What the cells define that are given to the student, run once."""
        names: dict[str, Any] = {"__name__": "assignment"}  # no module of that name: functions travel to ranks by value
        for cell in self.master["cells"]:
            if cell["cell_type"] == "code" and is_locked(cell) and not is_check(cell):
                exec(compile(cell["source"], cell["id"], "exec"), names)
        return names

    def close(self) -> None:
        """End the processes that the given cells have started."""
        if "ranks" in self.__dict__.get("given", {}):
            self.given["ranks"].close()


def verdict(answer: str, check: str, given: Mapping[str, Any]) -> str:
    """What `check` says after `answer`: "" where it passes, else the error as Jupyter would head it."""
    names = copy.copy(dict(given))
    for what, text in (("answer", answer), ("check", check)):
        try:
            exec(compile(text, what, "exec"), names)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if what == "check":
                return message
            if not isinstance(error, NotImplementedError):
                raise
    return ""


HEADING = re.compile(r"## (?P<number>\d)\. (?P<title>.+) (?P<dots>●{1,3}○{0,2})\n")
TERMS = re.compile(r"\*(?P<kind>[A-Z][a-z ]+) · (?P<minutes>\d+) minutes · (?P<points>\d+) points\*")
KINDS = {"Compute", "Predict", "Implement", "Find the error", "Measure", "Design"}
