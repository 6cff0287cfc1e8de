"""The comparison that check cells use: right or not, and what a wrong number gives away."""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose, isnan
from typing import Any


def expect(what: str, found: Any, right: Any, slips: Mapping[Any, str] | None = None, *, within: float = 1e-9) -> None:
    """Raise AssertionError unless `found` is `right`, to `within` times its size.

    `what` names the number in the message. `slips` says what a wrong number gives away: they are known wrong ways to
    it. The message holds what was found and never what is right.
    """
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
