"""What check cells say about an answer: has it the form that was asked for, is it right, and if not, why not?

check           a function of a check cell, whose message Jupyter shows alone
expect          a number
expect_tensor   a tensor
expect_list     several things, in order
expect_entries  a dictionary

All but the first raise AssertionError with a message for the student, which holds what was found and never what is
right.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from math import isclose, isnan
from pathlib import Path
from traceback import walk_tb
from typing import Any, ParamSpec

from pipelab.errors import PipelabError

P = ParamSpec("P")
_PACKAGE = str(Path(__file__).parents[1])
_NOTHING = "is None. Does the function return its result, or only print it?"


def check(function: Callable[P, None]) -> Callable[P, None]:
    """A decorator of what a check cell calls: Jupyter shows what it says, without the traceback.

    That would show the check, with every other wrong answer that it knows. An error that came out of the student's code
    keeps its traceback, unless it is that of an exercise which is not solved yet. Two things that happen in notebooks
    are said in words: the answer's cell has not been run, and a name such as `sum` has become a number. Jupyter asks an
    exception for `_render_traceback_` before it draws one.
    """

    @wraps(function)
    def shown(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            try:
                function(*args, **kwargs)
            except (NameError, TypeError) as error:
                if reason := _mishap(error, function):
                    raise AssertionError(reason) from None
                raise
        except (AssertionError, NotImplementedError, PipelabError) as error:
            files = {frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)}
            students = [file for file in files - {function.__code__.co_filename} if not file.startswith(_PACKAGE)]
            if isinstance(error, NotImplementedError) or not students:
                message = f"Not yet: {error}"
                error._render_traceback_ = lambda: [message]  # type: ignore[union-attr]
            raise

    return shown


def _mishap(error: NameError | TypeError, function: Callable[P, None]) -> str:
    """What happened to the notebook, where the check stumbled over a name: a sentence, or ""."""
    *_, (innermost, _) = walk_tb(error.__traceback__)
    if innermost.f_code.co_filename != function.__code__.co_filename:
        return ""
    if isinstance(error, NameError):
        return f"there is no `{error.name}` yet: run the cell of your answer first"
    for name, value in function.__globals__.items():
        if callable(getattr(builtins, name, None)) and not callable(value):
            return f"`{name}` is {value!r:.40} in this notebook: choose another name for that, and restart the kernel"
    return ""


def expect(what: str, found: Any, right: Any, slips: Mapping[Any, str] | None = None, *, within: float = 1e-9) -> None:
    """Raise AssertionError unless `found` is `right`, to `within` times its size.

    `what` names the number in the message. `slips` says what a wrong number gives away: they are known wrong ways to
    it. The message holds what was found and never what is right.
    """
    if found is None:
        raise AssertionError(f"{what} {_NOTHING}")
    try:
        number = float(found)
    except (TypeError, ValueError):
        raise AssertionError(f"{what} should be a number, got {found!r:.60}") from None
    if isclose(number, float(right), rel_tol=within, abs_tol=within):
        return
    for wrong, reading in (slips or {}).items():
        if isclose(number, float(wrong), rel_tol=within, abs_tol=within):
            raise AssertionError(f"{what} is not {number:.6g}. {reading}")
    if isnan(number):
        raise AssertionError(f"{what} is not a number")
    raise AssertionError(f"{what} is not {number:.6g}: that is too {'large' if number > right else 'small'}")


def expect_tensor(what: str, found: Any, right: Any, slips: Mapping[str, Any] | None = None) -> None:
    """Raise AssertionError unless the tensor `found` is `right`, to 1e-5 of its size or 1e-6.

    `slips` has known wrong tensors by the sentence that says what each gives away; tensors have no equal keys.
    """
    if found is None or not isinstance(found, type(right)):
        raise AssertionError(f"{what} {_NOTHING}" if found is None else f"{what} should be a tensor, got {found!r:.60}")
    if found.shape != right.shape:
        raise AssertionError(f"{what} has the shape {tuple(found.shape)}, and it should have {tuple(right.shape)}")
    found = found.detach().to(right.dtype)
    if found.allclose(right, rtol=1e-5, atol=1e-6):
        return
    for reading, wrong in (slips or {}).items():
        if found.allclose(wrong.to(right.dtype), rtol=1e-4, atol=1e-7):
            raise AssertionError(f"{what} is not right. {reading}")
    if found.isnan().any():
        raise AssertionError(f"{what} holds nan, which comes of 0/0 or of infinity")
    raise AssertionError(f"{what} is not right")


def expect_list(what: str, found: Any, count: int | None = None) -> list[Any]:
    """`found` as a list; raises AssertionError where it is none, or has not `count` entries."""
    if found is None:
        raise AssertionError(f"{what} {_NOTHING}")
    if not isinstance(found, Iterable) or isinstance(found, (str, Mapping)):
        raise AssertionError(f"{what} should be a list or a tuple, got {found!r:.60}")
    entries = list(found)
    if count is not None and len(entries) != count:
        raise AssertionError(f"{what} should have {count} entries, and has {len(entries)}: {found!r:.60}")
    return entries


def expect_entries(what: str, found: Any, *names: str) -> None:
    """Raise AssertionError unless `found` is a dictionary that has the entries `names`."""
    if found is None:
        raise AssertionError(f"{what} {_NOTHING}")
    if not isinstance(found, Mapping):
        raise AssertionError(f"{what} should be a dictionary, got {found!r:.60}")
    if missing := sorted(set(names) - set(found)):
        raise AssertionError(f"{what} lacks the entries {missing}")
