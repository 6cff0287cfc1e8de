"""The student's notebooks: exercises/ is made from the masters in solutions/ and never edited by hand.

    python -m tools.exercises                        write exercises/ (make exercises)
    python -m tools.exercises --check                change nothing, fail where exercises/ is not what would be written
    python -m tools.exercises --seed 7 --out FOLDER  the same assignments with other numbers, somewhere else

A notebook without a cell that nbgrader knows is no assignment and stays where it is.
The same masters give the same bytes. A solution that stands outside its markers cannot be seen by a program; that an
unsolved notebook earns nothing is a test (tests/exercises/).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import nbformat

from pipelab.grading.markers import MARKERS, AssignmentError, is_master, student_notebook, with_seed
from tools.book import to_text
from tools.hosted import hosted, repository

ROOT = Path(__file__).parents[1]


def made_from(masters: Path, seed: int | None = None) -> dict[Path, str]:
    """Every file that the folder of the exercises should hold, by its path in it. Raises AssignmentError."""
    made = {}
    address = repository(ROOT)
    for path in sorted(masters.rglob("*.ipynb")):
        if ".ipynb_checkpoints" in path.parts:
            continue
        notebook = nbformat.read(path, as_version=4)
        if not is_master(notebook):
            continue
        try:
            notebook = student_notebook(notebook if seed is None else with_seed(notebook, seed))
        except AssignmentError as error:
            raise AssignmentError(f"{path}: {error}") from None
        name = path.relative_to(masters)
        place = f"exercises/{name.as_posix()}" if seed is None else None  # other numbers are not in the repository
        made[name] = to_text(hosted(nbformat.from_dict(notebook), address, place))
    return made


def complaints(made: dict[Path, str], exercises: Path) -> list[str]:
    """What keeps the folder from being what `made` says: missing, stray or different files, and solutions in it."""
    found = {
        path.relative_to(exercises): path.read_text(encoding="utf-8")
        for path in sorted(exercises.rglob("*.ipynb"))
        if ".ipynb_checkpoints" not in path.parts
    }
    wrong = [f"{exercises / path} is missing" for path in made if path not in found]
    wrong += [f"{exercises / path} has no master in solutions/" for path in found if path not in made]
    wrong += [
        f"{exercises / path} differs from its master" for path in made if found.get(path, made[path]) != made[path]
    ]
    for path, text in found.items():
        wrong += [f"{exercises / path} shows {marker!r}" for marker in MARKERS if marker in text]
    return wrong


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns 1 where a master is wrong or exercises/ does not agree, else 0."""
    parser = argparse.ArgumentParser(description="Make the students' notebooks from their masters.")
    parser.add_argument("--check", action="store_true", help="change nothing, fail where a file is not up to date")
    parser.add_argument("--seed", type=int, help="other numbers than those of the masters")
    parser.add_argument("--masters", type=Path, default=ROOT / "solutions")
    parser.add_argument("--out", type=Path, default=ROOT / "exercises")
    given = parser.parse_args(arguments)
    try:
        made = made_from(given.masters, given.seed)
    except AssignmentError as error:
        print(error)
        return 1
    if given.check:
        wrong = complaints(made, given.out)
        print("\n".join([*wrong, "run make exercises"]) if wrong else f"{len(made)} exercises agree with their masters")
        return min(1, len(wrong))
    for path, text in made.items():
        (given.out / path).parent.mkdir(parents=True, exist_ok=True)
        (given.out / path).write_text(text, encoding="utf-8", newline="\n")
        print(given.out / path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
