"""A few cases out of many: for any two parameters, every pair of their values is in one of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs(case: dict[str, Any]) -> set[Pair]:
    """All pairs of values in a case."""
    return set(combinations(case.items(), 2))


def covering(values: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Cases that cover all pairs, greedily: each begins with a pair not seen yet and takes along what it can."""
    missing = {pair for case in everything(values) for pair in pairs(case)}
    order = sorted(missing, key=repr)
    cases = []
    while missing:
        case = dict(next(pair for pair in order if pair in missing))
        for name in values:
            if name not in case:
                case[name] = max(values[name], key=lambda value: len(missing & _with(values, case, name, value)))
        case = {name: case[name] for name in values}
        cases.append(case)
        missing -= pairs(case)
    return cases


def everything(values: dict[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """The full product."""
    return [dict(zip(values, each, strict=True)) for each in product(*values.values())]


def _with(values: dict[str, Sequence[Any]], case: dict[str, Any], name: str, value: Any) -> set[Pair]:
    extended = case | {name: value}
    return pairs({name: extended[name] for name in values if name in extended})
