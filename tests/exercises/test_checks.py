"""Checks that cannot lie: an unsolved exercise earns nothing, a solved one everything, and a wrong one hears why."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module

import pytest
from assignment import HEADING, KINDS, MASTERS, ROOT, TERMS, Assignment, Mutant, verdict

from pipelab.grading.markers import is_answer, is_check, points_of, task_of

SEEDS = range(1, 13)
TEACHING = (ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module", params=MASTERS, ids=lambda path: path.stem)
def assignment(request: pytest.FixtureRequest) -> Iterator[Assignment]:
    """Each assignment in turn, with its given cells run."""
    one = Assignment(request.param)
    yield one
    one.close()


def mutants_of(assignment: Assignment) -> dict[str, list[Mutant]]:
    """The wrong answers to every exercise: data of the file mutants_<assignment>.py."""
    found: dict[str, list[Mutant]] = import_module(f"mutants_{assignment.name}").MUTANTS
    return found


def functions(source: str) -> list[ast.FunctionDef]:
    """What an answer defines at its top level."""
    return [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]


def test_exercises_there_are_masters() -> None:
    assert MASTERS


def test_exercises_teaching_plan_names_every_assignment(assignment: Assignment) -> None:
    (row,) = re.findall(rf"`{assignment.name}`: (\d) exercises, (\d+) points, (\d+) minutes", TEACHING)
    terms = [TERMS.search(exercise.words) for exercise in assignment.exercises.values()]
    points, minutes = (sum(int(found[what]) for found in terms if found) for what in ("points", "minutes"))
    assert tuple(map(int, row)) == (len(assignment.exercises), points, minutes)


def test_exercises_teaching_plan_names_no_other() -> None:
    assert set(re.findall(r"`(\d\d_\w+)`:", TEACHING)) == {path.stem for path in MASTERS}


def test_exercises_say_what_they_ask_and_what_it_is_worth(assignment: Assignment) -> None:
    assert 4 <= len(assignment.exercises) <= 6
    kinds = set()
    for number, exercise in enumerate(assignment.exercises.values(), start=1):
        heading, terms = HEADING.match(exercise.words), TERMS.search(exercise.words)
        assert heading, exercise.task
        assert terms, exercise.task
        assert int(heading["number"]) == number
        assert len(heading["dots"]) == 3
        assert int(terms["points"]) == exercise.points
        assert terms["kind"] in KINDS
        kinds.add(terms["kind"])
        for part in ("**Given**", "**Hand in**", "<details><summary>Hint</summary>", "</details>"):
            assert exercise.words.count(part) == 1, f"{exercise.task}: {part}"
    assert len(kinds) >= 3, kinds


def test_exercises_go_from_easy_to_hard(assignment: Assignment) -> None:
    dots = [HEADING.match(exercise.words)["dots"].count("●") for exercise in assignment.exercises.values()]  # type: ignore[index]
    assert dots == sorted(dots)


def test_exercises_solutions_say_why(assignment: Assignment) -> None:
    for task, exercise in assignment.exercises.items():
        assert re.search(r"### BEGIN SOLUTION\n *# Why: .{40}", exercise.solution), task
        assert "Why:" not in exercise.unsolved, task


def test_exercises_checks_are_named_by_the_line_that_shows_when_they_are_folded(assignment: Assignment) -> None:
    titles = [exercise.visible_check.splitlines()[0] for exercise in assignment.exercises.values()]
    assert titles == [f"# @title Check of exercise {number}" for number in range(1, len(titles) + 1)]


def test_exercises_checks_say_that_they_passed(assignment: Assignment) -> None:
    """A cell whose text is folded away does not show whether it has run."""
    for cell in assignment.master["cells"]:
        if is_check(cell):
            assert [output["text"] for output in cell["outputs"]] == ["Passed, as far as you can see.\n"], cell["id"]


def test_exercises_checks_show_a_message_without_a_traceback(assignment: Assignment) -> None:
    for task, exercise in assignment.exercises.items():
        named = [node for node in functions(exercise.visible_check) if node.name.startswith("check_")]
        assert named, task
        assert all(list(map(ast.unparse, node.decorator_list)) == ["check"] for node in named), task
        assert not any(isinstance(node, ast.Assert) for node in ast.parse(exercise.visible_check).body), task


def test_exercises_end_with_a_picture_of_what_the_answers_do(assignment: Assignment) -> None:
    see = next(cell for cell in assignment.master["cells"] if cell["id"] == "see-it")
    answers = {node.name for exercise in assignment.exercises.values() for node in functions(exercise.solution)}
    used = {node.id for node in ast.walk(ast.parse(see["source"])) if isinstance(node, ast.Name)}
    assert used & answers, "it shows nothing of the student's own"
    assert any("image/png" in output.get("data", {}) for output in see["outputs"])


def test_exercises_opening_adds_up(assignment: Assignment) -> None:
    opening = assignment.master["cells"][0]["source"]
    minutes = [int(TERMS.search(exercise.words)["minutes"]) for exercise in assignment.exercises.values()]  # type: ignore[index]
    points = sum(points_of(cell) for cell in assignment.master["cells"])
    assert f"about {sum(minutes)} minutes; there are {points:g} points" in opening


def test_exercises_unsolved_earns_nothing(assignment: Assignment) -> None:
    for task, exercise in assignment.exercises.items():
        assert f'raise NotImplementedError("{task} is not solved yet")' in exercise.unsolved
        assert "pass" not in exercise.unsolved.split()
        for check in (exercise.check, exercise.visible_check):
            said = verdict(exercise.unsolved, check, assignment.given)
            assert said, f"{task}: the check passes an exercise that nobody has solved"


@pytest.mark.parametrize("result", ["print('the answer')", "return 0", "return 'text'", "return (1,)"])
def test_exercises_check_says_in_words_what_form_an_answer_has(assignment: Assignment, result: str) -> None:
    """A student who prints, or returns a number for a list, reads a sentence and no TypeError out of the check."""
    for task, exercise in assignment.exercises.items():
        stubs = [f"def {node.name}({ast.unparse(node.args)}):\n    {result}" for node in functions(exercise.solution)]
        if stubs:  # other answers are a name, or a class
            said = verdict("\n".join(stubs), exercise.check, assignment.given)
            assert said.startswith(("AssertionError: ", "ScheduleError: ")), f"{task}, {result}: {said}"


def test_exercises_every_check_belongs_to_one_answer(assignment: Assignment) -> None:
    answers = [cell for cell in assignment.master["cells"] if is_answer(cell)]
    checks = [cell for cell in assignment.master["cells"] if is_check(cell)]
    assert [f"check_{task}" for task in assignment.exercises] == [task_of(cell) for cell in checks]
    assert len(answers) == len(checks)
    assert all("### BEGIN HIDDEN TESTS" in cell["source"] for cell in checks)


def test_exercises_solution_passes(assignment: Assignment) -> None:
    for exercise in assignment.exercises.values():
        for check in (exercise.check, exercise.visible_check):
            assert verdict(exercise.solution, check, assignment.given) == "", exercise.task


def test_exercises_solution_passes_with_other_seeds(assignment: Assignment) -> None:
    for seed in SEEDS:
        other = Assignment(next(path for path in MASTERS if path.stem == assignment.name), seed)
        given = {**assignment.given, "SEED": seed}
        for task, exercise in other.exercises.items():
            if "SEED" in exercise.visible_check:
                assert verdict(exercise.solution, exercise.visible_check, given) == "", f"{task}, seed {seed}"


def test_exercises_mutants_are_caught_and_told_why(assignment: Assignment) -> None:
    escaped = []
    assert set(mutants_of(assignment)) == set(assignment.exercises)
    for task, exercise in assignment.exercises.items():
        mutants = mutants_of(assignment)[task]
        assert len(mutants) >= 3
        assert any(mutant.hard_coded for mutant in mutants), f"{task}: no mutant is right on the visible case"
        for mutant in mutants:
            answer = mutant.text(exercise.solution)
            assert answer != exercise.solution
            seen = verdict(answer, exercise.visible_check, assignment.given)
            said = seen or verdict(answer, exercise.check, assignment.given)
            caught = "visible" if seen else "hidden" if said else "NOT CAUGHT"
            print(f"{assignment.name}  {task:20} {mutant.name:40} {caught:10} {' '.join(said.split())[:120]}")
            as_meant = (
                said and (caught == "hidden" or not mutant.hard_coded) and re.search(mutant.says, said, re.DOTALL)
            )
            if not as_meant:
                escaped.append(f"{task}, {mutant.name}: {caught}: {said[:300]!r} should say {mutant.says!r}")
    assert not escaped, "\n".join(escaped)


def test_exercises_check_uses_no_name_that_an_answer_has_bound(assignment: Assignment) -> None:
    for task, exercise in assignment.exercises.items():
        wrong = next(mutant for mutant in mutants_of(assignment)[task] if mutant.hard_coded).text(exercise.solution)
        said = verdict(f"{wrong}\nexpect = lambda *_, **__: None\n", exercise.check, assignment.given)
        assert said, f"{task}: an answer that replaces `expect` passes"
