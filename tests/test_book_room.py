"""The question of a chapter: it takes whatever the reader types, and keeps the answer back until the second cell."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipelab.book import off, plain_gradients, predict

QUESTION = "When does the last backward end?"
BECAUSE = "Eleven slots of three units."
SLIPS = {24: "That counts one rank's work.", 96: "That is the naive pipeline."}


class Hostile:
    """An object that fails whatever one asks of it."""

    def __float__(self) -> float:
        raise RuntimeError("no float")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def revealed(answer: object, right: object = 33) -> str:
    return repr(predict(QUESTION, answer, unit="units").reveal(right, BECAUSE, SLIPS))


def test_book_room_asks_and_keeps_the_answer_back() -> None:
    shown = repr(predict(QUESTION, unit="units"))
    assert shown.startswith(f"Predict. {QUESTION} No number yet.")
    assert not any(character.isdigit() for character in shown)


def test_book_room_shows_the_answer_in_the_second_cell_without_a_number() -> None:
    assert revealed(None) == f"33 units. You typed no number this time. {BECAUSE}"


@pytest.mark.parametrize("typed", [33, 33.0, "33", " 33 units ", "66/2", Fraction(99, 3), 33.1])
def test_book_room_says_right_for_the_number_in_any_spelling(typed: object) -> None:
    assert revealed(typed) == f"33 units: you have it. {BECAUSE}"


def test_book_room_names_the_slip_behind_a_wrong_number() -> None:
    assert revealed(24) == f"33 units. You said 24. That counts one rank's work. {BECAUSE}"


@pytest.mark.parametrize(("typed", "difference"), [(40, "7 units too much"), (30.5, "2.5 units too little")])
def test_book_room_says_how_far_off_any_other_number_is(typed: float, difference: str) -> None:
    assert revealed(typed) == f"33 units. You said {typed}. That is {difference}. {BECAUSE}"


def test_book_room_reads_a_share_with_its_sign() -> None:
    guess = predict("What share of the makespan is idle?", "27.3 %", unit="%")
    assert "You say 27.3 %." in repr(guess)
    assert "You say 27.27 %." in repr(predict("The same?", "3/11", unit="%"))
    assert repr(guess.reveal(300 / 11, "Three of eleven.")) == "27.27 %: you have it. Three of eleven."


@pytest.mark.parametrize("typed", ["about thirty", "1/0", "", True, float("nan"), float("inf"), 3j, [33], Hostile()])
def test_book_room_takes_what_is_no_number_without_raising(typed: object) -> None:
    assert "is no number; type one such as" in repr(predict(QUESTION, typed))
    assert revealed(typed).startswith("33 units. You typed no number")


@given(st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.binary(), st.lists(st.integers())))
def test_book_room_never_raises_and_says_the_same_twice(typed: object) -> None:
    assert repr(predict(QUESTION, typed)) == repr(predict(QUESTION, typed))
    assert revealed(typed) == revealed(typed)
    assert revealed(33, right=typed)


def test_book_room_says_so_where_the_cells_above_did_not_run() -> None:
    assert "None` is no number. Run the cells above first." in predict(QUESTION, 3).reveal(None, BECAUSE).text


def test_book_room_shows_one_markdown_paragraph() -> None:
    markdown = predict(QUESTION)._repr_markdown_()
    assert markdown.startswith("> **Predict.** ")
    assert "\n" not in markdown


def test_book_room_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'matplotlib', 'numpy', 'sympy', 'ipywidgets', 'IPython'}"
    code = f"import sys, pipelab.book; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_book_off_is_the_length_of_the_difference_over_that_of_the_right_one():
    right = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    assert off(right, right) == 0
    assert off([torch.zeros(2), torch.zeros(1, 1)], right) == 1
    assert off([torch.tensor([3.0, 3.0]), torch.tensor([[8.0]])], right) == 1  # (3, 4) beside (3, 4): 5 of 5
    assert off({"w": 4 * right[0], "b": 4 * right[1]}.values(), right) == 3


def test_book_off_wants_as_many_of_both():
    with pytest.raises(ValueError, match="zip"):
        off([torch.ones(2)], [torch.ones(2), torch.ones(2)])


def test_book_plain_gradients_are_those_of_the_mean_over_all_samples():
    layer = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(layer.weight, 2.0)
    layer.weight.grad = torch.ones(1, 1)  # left over from something else
    x, y = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.zeros(4, 1)
    for parts in (1, 2, 4):  # d/dw mean((w x)²) = 2 w mean(x²) = 4 · 7.5
        found = plain_gradients(layer, x, y, torch.nn.functional.mse_loss, parts)
        assert {name: gradient.item() for name, gradient in found.items()} == {"weight": 30.0}
        assert layer.weight.grad is None
