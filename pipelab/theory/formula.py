"""A closed form as data: an expression, its source, and the range where it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Rational, Real
from typing import Any

import sympy
from sympy import Expr, Max, Min, Piecewise, Symbol, ceiling, floor, true
from sympy.logic.boolalg import Boolean

from pipelab.errors import FormulaError
from pipelab.theory import letters
from pipelab.theory.letters import BY_NAME, MEANING

UNLESS_GIVEN = {letters.c: sympy.Integer(0), letters.w: sympy.Integer(1)}


@dataclass(frozen=True)
class Formula:
    """One closed form: the expression, where it comes from, and the condition under which it holds (true: always).

    Call it with values, as in `theory.step_time(p=5, m=16, T=64, o=1)`: a number once every letter has a value, before
    that an expression. Raises FormulaError for a letter that it does not have, and for values outside `holds`; the
    `expression` itself may be evaluated anywhere, to see it fail.
    """

    name: str
    expression: Expr
    source: str
    holds: Boolean = true

    @property
    def letters(self) -> tuple[str, ...]:
        """The letters that may be given: those of the formula, and I and W in place of their sum B."""
        used = self.expression.free_symbols | self.holds.free_symbols
        if letters.B in used:
            used = used | {letters.I, letters.W}
        return tuple(symbol.name for symbol in MEANING if symbol in used)

    def __call__(self, **values: Any) -> Any:
        """The value at `values`: an int or a float, or an expression where letters are left."""
        given = self.read(values)
        if self.holds.subs(given) == False:  # noqa: E712  a sympy condition may also be undecided
            at = ", ".join(f"{symbol} = {given[symbol]}" for symbol in given if symbol in self.holds.free_symbols)
            raise FormulaError(
                f"{self.name} holds where {self.holds}, asked at {at}; its .expression can be evaluated anywhere"
            )
        return _number(self.expression.subs(given))

    def read(self, values: Mapping[str, Any]) -> dict[Symbol, Expr]:
        """`values` by symbol and exact, with the delay 0 and the weight part 1 where they are not given."""
        unknown = [name for name in values if name not in self.letters]
        if unknown:
            has = ", ".join(f"{name} ({MEANING[BY_NAME[name]]})" for name in self.letters)
            raise FormulaError(f"{self.name} has no letter {', '.join(map(repr, unknown))}; it has {has}")
        given = {BY_NAME[name]: _exact(name, value) for name, value in values.items()}
        if letters.B not in given and letters.I in given and letters.W in given:
            given[letters.B] = given[letters.I] + given[letters.W]
        return {**{symbol: value for symbol, value in UNLESS_GIVEN.items() if symbol not in given}, **given}

    def compiled(self) -> Callable[..., float | None]:
        """The formula as a plain function of its letters, for thousands of values: a float, or None outside `holds`.

        It asks for every letter by name and checks none; a letter that the formula lacks is ignored.
        """
        return _compiled(self)

    def __str__(self) -> str:
        where = "" if self.holds == true else f", where {self.holds}"
        return f"{self.name} = {self.expression}{where} [{self.source}]"


@dataclass(frozen=True)
class Family(Mapping[str, Formula]):
    """One quantity of several schedules: call it with a schedule's name and values, or index it for the Formula."""

    name: str
    formulas: Mapping[str, Formula]

    def __call__(self, schedule: str, **values: Any) -> Any:
        """The quantity of `schedule`: int or float, or an expression where letters are left. Raises FormulaError."""
        return self[schedule](**values)

    def __getitem__(self, schedule: str) -> Formula:
        if schedule not in self.formulas:
            raise FormulaError(f"no closed form of {self.name} for {schedule!r}; there is one for {', '.join(self)}")
        return self.formulas[schedule]

    def __contains__(self, schedule: object) -> bool:
        return schedule in self.formulas

    def __iter__(self) -> Iterator[str]:
        return iter(self.formulas)

    def __len__(self) -> int:
        return len(self.formulas)

    def __str__(self) -> str:
        return "\n".join(map(str, self.values()))


def family(name: str, formulas: Mapping[str, tuple[Any, ...]]) -> Family:
    """The Family of `formulas`: a name, then the expression, its source, and the condition if it has one."""
    return Family(name, {of: Formula(f"{name} of {of}", *formula) for of, formula in formulas.items()})


@cache
def _compiled(formula: Formula) -> Callable[..., float | None]:
    names = sorted(symbol.name for symbol in formula.expression.free_symbols | formula.holds.free_symbols)
    both = sympy.lambdify(names, [formula.expression, formula.holds], "math")

    def evaluate(**values: float) -> float | None:
        value, holds = both(*(values[name] for name in names))
        return float(value) if holds else None

    return evaluate


def _exact(name: str, value: Any) -> Expr:
    """`value` for the letter `name`, as an exact number or an expression of other letters."""
    symbol = BY_NAME[name]
    meant = f"{name} ({MEANING[symbol]})"
    exact = value if isinstance(value, Expr) else exact_number(meant, value)
    must = [word for word in ("integer", "positive", "nonnegative") if getattr(symbol, f"is_{word}")][:2]
    if exact.is_number and not all(getattr(exact, f"is_{word}") for word in must):
        raise FormulaError(f"{meant} must be {' and '.join(must)}, got {value!r}")
    return exact


def exact_number(name: str, value: Any) -> Expr:
    """`value` as a sympy Rational; a float is the decimal that was written, not its nearest binary."""
    exact = isinstance(value, Rational) and not isinstance(value, bool)
    if not exact and (isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value)):
        raise FormulaError(f"{name} must be a finite number, got {value!r}")
    if exact:
        return sympy.Rational(value.numerator, value.denominator)
    return sympy.Rational(repr(float(value)))


def _number(value: Expr) -> Any:
    """int or float where no letter is left; a float is the one nearest to the exact value."""
    if value.free_symbols:
        other = (
            sympy.simplify(value)
            if value.has(Min, Max, Piecewise, ceiling, floor)
            else sympy.factor(sympy.cancel(value))
        )
        value = min(other, value, key=sympy.count_ops)
    if value.is_Integer:
        return int(value)
    if value.is_Rational:
        return int(value.p) / int(value.q)
    return float(value) if value.is_number else value
