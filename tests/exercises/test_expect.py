"""pipelab.grading.expect: what a check says about the form of an answer, and about one that is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pipelab as pl
from pipelab.grading import check, expect, expect_entries, expect_list, expect_tensor

RIGHT = torch.tensor([1.0, 2.0])


def test_expect_is_silent_about_what_is_right() -> None:
    expect("it", 1 + 1e-12, 1)
    expect_tensor("it", RIGHT + 1e-7, RIGHT, {"": RIGHT})
    expect_entries("it", {"a": 1, "b": 2}, "a")
    assert expect_list("it", (1, 2), 2) == expect_list("it", iter([1, 2])) == [1, 2]


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (None, "it is None. Does the function return its result, or only print it?"),
        ("two", "it should be a number, got 'two'"),
        (3, "it is not 3. Too many."),
        (4, "it is not 4: that is too large"),
        (float("nan"), "it is not a number"),
    ],
)
def test_expect_says_what_is_wrong_with_a_number(found: Any, sentence: str) -> None:
    with pytest.raises(AssertionError) as caught:
        expect("it", found, 2, {3: "Too many."})
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (None, "it is None. Does the function return its result, or only print it?"),
        ([1, 2], r"it should be a tensor, got [1, 2]"),
        (torch.ones(3), "it has the shape (3,), and it should have (2,)"),
        (2 * RIGHT, "it is not right. Twice too large."),
        (RIGHT / 0 - RIGHT / 0, "it holds nan, which comes of 0/0 or of infinity"),
        (RIGHT + 1e-3, "it is not right"),
    ],
)
def test_expect_tensor_says_what_is_wrong_with_it(found: Any, sentence: str) -> None:
    with pytest.raises(AssertionError) as caught:
        expect_tensor("it", found, RIGHT, {"Twice too large.": 2 * RIGHT})
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (None, "it is None. Does the function return its result, or only print it?"),
        (5, "it should be a list or a tuple, got 5"),
        ("ab", "it should be a list or a tuple, got 'ab'"),
        ([1], "it should have 2 entries, and has 1: [1]"),
    ],
)
def test_expect_list_says_what_form_is_asked_for(found: Any, sentence: str) -> None:
    with pytest.raises(AssertionError) as caught:
        expect_list("it", found, 2)
    assert str(caught.value) == sentence


def test_expect_entries_names_those_that_are_missing() -> None:
    with pytest.raises(AssertionError, match=r"it lacks the entries \['b', 'c'\]"):
        expect_entries("it", {"a": 1}, "c", "a", "b")
    with pytest.raises(AssertionError, match=r"it should be a dictionary, got \[\]"):
        expect_entries("it", [], "a")


def shown(answer: str) -> str:
    """What a notebook shows of the error when `answer` is checked, without the frames that IPython would draw."""
    names: dict[str, Any] = {"check": check, "expect": expect}
    exec(compile(answer, "answer", "exec"), names)
    exec(
        compile(
            "@check\ndef check_it():\n    assert sum([answer()]) < 9, 'it is too large'\n    expect('it', answer(), 2)",
            "check",
            "exec",
        ),
        names,
    )
    with pytest.raises((AssertionError, NotImplementedError, NameError, TypeError, pl.PipelabError)) as caught:
        names["check_it"]()
    drawn = getattr(caught.value, "_render_traceback_", lambda: ["a traceback"])()
    return "\n".join(drawn)


def test_check_shows_what_it_says_and_not_how_it_came_to_it() -> None:
    assert shown("def answer():\n    return 3") == "Not yet: it is not 3: that is too large"
    assert shown("def answer():\n    return 9") == "Not yet: it is too large"


def test_check_shows_what_pipelab_says_of_an_answer_that_cannot_run() -> None:
    with pytest.raises(pl.ScheduleError) as caught:
        check(lambda: pl.validate(pl.Schedule.from_text("0B0 0F0")))()
    (drawn,) = caught.value._render_traceback_()  # type: ignore[attr-defined]
    assert drawn == f"Not yet: {caught.value}"


def test_check_shows_that_nothing_is_solved_yet() -> None:
    assert (
        shown("def answer():\n    raise NotImplementedError('it is not solved yet')") == "Not yet: it is not solved yet"
    )


def test_check_says_what_has_happened_to_the_notebook() -> None:
    assert shown("pass") == "Not yet: there is no `answer` yet: run the cell of your answer first"
    assert shown("def answer():\n    return 1\nsum = 7").startswith("Not yet: `sum` is 7 in this notebook")
    assert shown("def answer():\n    return undefined") == "a traceback"
    assert shown("def answer():\n    return 1 + 'one'\nsum = 7") == "a traceback"


def test_check_shows_where_the_students_own_assertion_failed() -> None:
    assert shown("def answer():\n    assert False") == "a traceback"
    assert shown("import pipelab as pl\ndef answer():\n    return pl.gpipe(0, 1)") == "a traceback"
