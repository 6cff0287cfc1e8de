"""`python -m pipelab grade`: what a notebook is worth that a student, or somebody less honest, hands in."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from pipelab.cli import main
from pipelab.grading import AssignmentError, Grade, grade
from pipelab.grading.markers import student_notebook, student_source, with_seed

ROOT = Path(__file__).parents[2]


def cell(kind: str, name: str, source: str, points: int = 0) -> Any:
    """One cell of a master, as nbgrader marks it."""
    marks = {"schema_version": 3, "grade_id": name, "task": False, "grade": kind == "check"}
    marks |= {"solution": kind == "answer", "locked": kind != "answer"}
    if points:
        marks["points"] = points
    return new_code_cell(source, id=name, metadata={"nbgrader": marks})


def master() -> Any:
    """Two exercises, of two points and of three, on numbers that depend on a seed."""
    return new_notebook(
        cells=[
            cell("given", "setup", "SEED = 0\nfactor = 2 + SEED"),
            cell(
                "answer",
                "twice",
                "def twice(x):\n    ### BEGIN SOLUTION\n    return factor * x\n    ### END SOLUTION",
            ),
            cell(
                "check",
                "check_twice",
                "assert twice(1) == factor, f'twice(1) is {twice(1)}'\n### BEGIN HIDDEN TESTS\n"
                "assert twice(5) == 5 * factor, f'twice(5) is {twice(5)}'\n### END HIDDEN TESTS",
                2,
            ),
            cell("answer", "half", "### BEGIN SOLUTION\nhalf = 1 / factor\n### END SOLUTION"),
            cell("check", "check_half", "assert half * factor == 1, f'half is {half}'", 3),
        ]
    )


def answered(**answers: str) -> Any:
    """The student's notebook with these answers."""
    notebook = student_notebook(master())
    for one in notebook["cells"]:
        one["source"] = answers.get(one["id"], one["source"])
    return notebook


RIGHT = {"twice": "def twice(x):\n    return x + x", "half": "half = 0.5"}


@pytest.fixture
def graded(tmp_path: Path) -> Callable[..., Grade]:
    """Grade a notebook against the master, both written to files first."""

    def run(notebook: Any, **options: Any) -> Grade:
        nbformat.write(master(), tmp_path / "master.ipynb")
        nbformat.write(nbformat.from_dict(notebook), tmp_path / "handed_in.ipynb")
        return grade(tmp_path / "handed_in.ipynb", tmp_path / "master.ipynb", **options)

    return run


def messages(result: Grade) -> list[str]:
    return [mark.message for mark in result.marks]


def test_grade_gives_all_points_for_the_right_answers(graded: Callable[..., Grade]) -> None:
    result = graded(answered(**RIGHT))
    assert (result.points, result.max_points, result.notes) == (5, 5, ())
    assert messages(result) == ["", ""]


def test_grade_gives_none_for_an_empty_notebook_and_says_what_is_not_solved(graded: Callable[..., Grade]) -> None:
    result = graded(answered())
    assert (result.points, result.max_points) == (0, 5)
    assert messages(result) == ["NotImplementedError: twice is not solved yet", "NameError: name 'half' is not defined"]


def test_grade_runs_hidden_tests(graded: Callable[..., Grade]) -> None:
    result = graded(answered(twice="def twice(x):\n    return 2", half="half = 0.4"))
    assert result.points == 0
    assert messages(result) == ["twice(5) is 2", "half is 0.4"]


def test_grade_puts_edited_and_deleted_checks_back(graded: Callable[..., Grade]) -> None:
    notebook = answered(setup="factor = 0", check_twice="pass", half="half = 7")
    del notebook["cells"][4]
    result = graded(notebook)
    assert result.points == 0
    assert messages(result) == ["NotImplementedError: twice is not solved yet", "half is 7"]
    assert result.notes == (
        "setup: the cell had been changed; the master's was run",
        "check_twice: the cell had been changed; the master's was run",
        "check_half: the cell was missing",
    )


def test_grade_believes_no_metadata(graded: Callable[..., Grade]) -> None:
    notebook = answered(half="half = 7")
    notebook["cells"][2]["metadata"]["nbgrader"]["points"] = 200
    notebook["cells"][2]["metadata"]["nbgrader"]["solution"] = True
    notebook["cells"][4] = {
        "cell_type": "markdown",
        "id": "x",
        "source": "",
        "metadata": notebook["cells"][4]["metadata"],
    }
    notebook["cells"][1]["metadata"]["nbgrader"]["grade"] = True
    result = graded(notebook)
    assert (result.points, result.max_points, len(result.marks)) == (0, 5, 2)


def test_grade_counts_a_copied_check_once(graded: Callable[..., Grade]) -> None:
    notebook = answered(**RIGHT)
    notebook["cells"].append({**copy.deepcopy(notebook["cells"][2]), "id": "copy"})
    result = graded(notebook)
    assert (result.points, result.max_points) == (5, 5)
    assert result.notes == ("check_twice: a copy, or of another assignment; left out of the grading",)


def test_grade_keeps_a_students_own_cells(graded: Callable[..., Grade]) -> None:
    notebook = answered(twice="def twice(x):\n    return mine(x)", half="half = 0.5")
    notebook["cells"].insert(1, new_code_cell("def mine(x):\n    return 2 * x"))
    assert graded(notebook).points == 5


def test_grade_leaving_early_earns_nothing(graded: Callable[..., Grade]) -> None:
    assert graded(answered(twice="def twice(x):\n    raise SystemExit", half="half = 0.5")).points == 3


def test_grade_stops_a_cell_that_takes_too_long_and_goes_on(graded: Callable[..., Grade]) -> None:
    begin = time.perf_counter()
    result = graded(answered(twice="def twice(x):\n    while True: pass", half="half = 0.5"), cell_timeout_s=2)
    assert (result.points, messages(result)) == (3, ["TimeoutError: stopped after 2 s", ""])
    assert time.perf_counter() - begin < 60


def test_grade_survives_a_kernel_that_dies(graded: Callable[..., Grade]) -> None:
    result = graded(answered(twice=RIGHT["twice"], half="import os\nos._exit(0)"))
    assert (result.points, messages(result)) == (2, ["", "the kernel died before this check, or in it"])


def test_grade_ends_a_kernel_that_cannot_be_stopped(graded: Callable[..., Grade]) -> None:
    deaf = "import signal\ndef twice(x):\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n    while True: pass"
    begin = time.perf_counter()
    result = graded(answered(twice=deaf, half="half = 0.5"), cell_timeout_s=1)
    assert result.points == 0
    assert messages(result) == [
        "TimeoutError: stopped after 1 s",
        "the kernel could not be stopped before this check, or in it",
    ]
    assert time.perf_counter() - begin < 60


@pytest.mark.parametrize(
    ("trick", "note"),
    [
        (
            "from pipelab.grading import expect\nexpect.__code__ = (lambda *_, **__: None).__code__",
            "comparison that checks use",
        ),
        ("import pipelab.grading\npipelab.grading.expect = print", "expect of pipelab had been replaced"),
        ("import pipelab\npipelab.simulate = print", "simulate of pipelab had been replaced"),
        (
            "import ast\nclass Mild(ast.NodeTransformer):\n    def visit_Assert(self, node): return ast.Pass()\n"
            "    visit_Raise = visit_Assert\nget_ipython().ast_transformers.append(Mild())",
            "a wrong check passed",
        ),
    ],
)
def test_grade_doubts_marks_where_a_check_that_must_fail_does_not(
    graded: Callable[..., Grade], trick: str, note: str
) -> None:
    result = graded(answered(twice=RIGHT["twice"], half=f"half = 0.5\n{trick}"))
    (said,) = result.notes
    assert re.fullmatch(f"these marks are not to be trusted: .*{note}.*", said)


def test_grade_takes_the_seed_that_the_notebook_was_made_with(graded: Callable[..., Grade]) -> None:
    notebook = with_seed(answered(half="half = 1 / 5"), 3)
    assert graded(notebook, seed=3).points == 3
    result = graded(notebook)
    assert result.points == 0
    assert result.notes == ("setup: the cell had been changed; the master's was run",)


def test_grade_refuses_what_is_no_answer(graded: Callable[..., Grade], tmp_path: Path) -> None:
    with pytest.raises(AssignmentError, match=r"has none of the cells setup, twice, check_twice, \.\.\."):
        graded(new_notebook(cells=[new_code_cell("1 + 1")]))
    (tmp_path / "text.ipynb").write_text("no notebook")
    with pytest.raises(AssignmentError, match=r"text\.ipynb is no notebook"):
        grade(tmp_path / "text.ipynb", tmp_path / "master.ipynb")
    with pytest.raises(AssignmentError, match=r"there is no file .*nowhere\.ipynb"):
        grade(tmp_path / "nowhere.ipynb", tmp_path / "master.ipynb")


@pytest.mark.parametrize(
    ("kind", "source", "sentence"),
    [
        ("answer", "return 1", r"an answer without a region ### BEGIN SOLUTION"),
        ("given", "### BEGIN SOLUTION\n### END SOLUTION", r"no answer, but has a region"),
        ("answer", "### BEGIN SOLUTION\nreturn 1", r"has BEGIN SOLUTION without END SOLUTION"),
        ("answer", "### END SOLUTION", r"'### END SOLUTION' stands where no region can END"),
        ("given", "### BEGIN HIDDEN TESTS\n### END HIDDEN TESTS", r"has hidden tests and is no check"),
    ],
)
def test_markers_must_fit_the_cell(kind: str, source: str, sentence: str) -> None:
    with pytest.raises(AssignmentError, match=sentence):
        student_source(cell(kind, "one", source))


def test_markers_names_are_unique() -> None:
    with pytest.raises(AssignmentError, match=r"two cells have the nbgrader name 'one'"):
        student_notebook({"cells": [cell("given", "one", ""), cell("given", "one", "")]})


def test_seed_must_have_a_line_to_stand_in() -> None:
    with pytest.raises(AssignmentError, match=r"has no line 'SEED = 0'"):
        with_seed(new_notebook(cells=[new_code_cell("seed = 0")]), 1)


@pytest.mark.timeout(180)
def test_grade_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    handed_in = tmp_path / "01_partitioning.ipynb"
    notebook = nbformat.read(ROOT / "exercises" / handed_in.name, as_version=4)
    solution = nbformat.read(ROOT / "solutions" / handed_in.name, as_version=4)
    answers = {one["id"]: one["source"] for one in solution["cells"]}
    for one in notebook["cells"]:
        if one["id"] in ("stages_needed", "best_sizes"):
            one["source"] = answers[one["id"]]
    nbformat.write(notebook, handed_in)
    command = [sys.executable, "-m", "pipelab", "grade", str(handed_in)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert (printed["notebook"], printed["points"], printed["max_points"]) == ("01_partitioning.ipynb", 6, 14)
    marks = {mark["task"]: mark for mark in printed["marks"]}
    assert marks["check_best_sizes"] == {"task": "check_best_sizes", "points": 4, "max_points": 4, "message": ""}
    assert marks["check_suffices"]["message"] == "NotImplementedError: suffices is not solved yet"

    assert main(["grade", str(handed_in), "--master", str(tmp_path / "no.ipynb")]) == 1
    assert "AssignmentError: there is no file" in capsys.readouterr().err
