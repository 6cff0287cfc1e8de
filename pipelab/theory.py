"""Closed forms: what a schedule costs, as sympy expressions, each with its source and the range where it holds.

    theory.bubble_fraction("gpipe")               (p - 1)/(m + p - 1), a sympy expression
    theory.bubble_fraction("gpipe", p=4, m=8)     3/11 = 0.2727..., a number
    theory.makespan("gpipe", p=4, m=8, F=1, B=2, c=0.5)
    theory.makespan["one_f_one_b"]                the Formula itself: expression, source, holds

A value may be a number, or an expression in other letters. The delay c is 0 and the weight part w is 1 unless they
are given (`c=theory.c` keeps the letter). Numbers are exact (0.1 is 1/10), nothing is rounded before the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Rational as WholeOrFraction
from numbers import Real
from typing import Any

import sympy
from sympy import And, Eq, Expr, Max, Min, Or, Symbol, ceiling, true
from sympy.logic.boolalg import Boolean

from pipelab.errors import FormulaError

# --- letters --------------------------------------------------------------------------------------------------------

_MEANING: dict[Symbol, str] = {}


def _count(name: str, meaning: str) -> Symbol:
    symbol = Symbol(name, integer=True, positive=True)
    _MEANING[symbol] = meaning
    return symbol


def _amount(name: str, meaning: str) -> Symbol:
    symbol = Symbol(name, nonnegative=True)
    _MEANING[symbol] = meaning
    return symbol


p = _count("p", "ranks")
m = _count("m", "micro-batches")
v = _count("v", "stages per rank")
r = Symbol("r", integer=True, nonnegative=True)
_MEANING[r] = "a rank, from 0"

F = _amount("F", "time of a forward on a whole rank")
B = _amount("B", "time of a full backward on a whole rank, I + W")
I = _amount("I", "time of the input-gradient half of B")  # noqa: E741
W = _amount("W", "time of the weight-gradient half of B")
c = _amount("c", "one-way delay of a hop between ranks")
w = _amount("w", "what is held from I to W, as a part of what is held from F to I")

T = _amount("T", "time of a whole mini-batch on one rank, forward and backward")
o = _amount("o", "fixed overhead of a rank for every micro-batch")
b = _count("b", "samples in a micro-batch")
d = _count("d", "data-parallel replicas")
k = _count("k", "accumulated steps per update")
s = _count("s", "tokens in a sequence")
h = _count("h", "hidden size")
e = _count("e", "bytes of an element")

_TIMES = {F, B, I, W, c}
_UNLESS_GIVEN = {c: sympy.Integer(0), w: sympy.Integer(1)}
_LETTERS = {symbol.name: symbol for symbol in _MEANING}


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
        """The letters that may be given. Times cancel in some formulas, so all of them may stand beside one."""
        used = self.expression.free_symbols | self.holds.free_symbols
        return tuple(x.name for x in _MEANING if x in used or (x in _TIMES and used & _TIMES))

    def __call__(self, **values: Any) -> Any:
        """The value at `values`: int, float, or an expression where letters are left."""
        given = self._read(values)
        if self.holds.subs(given) == False:  # noqa: E712  a sympy condition may also be undecided
            at = ", ".join(f"{symbol} = {given[symbol]}" for symbol in given if symbol in self.holds.free_symbols)
            raise FormulaError(
                f"{self.name} holds where {self.holds}, asked at {at}; its .expression can be evaluated anywhere"
            )
        return _number(self.expression.subs(given))

    def _read(self, values: Mapping[str, Any]) -> dict[Symbol, Expr]:
        unknown = [name for name in values if name not in self.letters]
        if unknown:
            letters = ", ".join(f"{name} ({_MEANING[_LETTERS[name]]})" for name in self.letters)
            raise FormulaError(f"{self.name} has no letter {', '.join(map(repr, unknown))}; it has {letters}")
        given = {_LETTERS[name]: _exact(name, value) for name, value in values.items()}
        if B not in given and I in given and W in given:
            given[B] = given[I] + given[W]
        return {**{symbol: value for symbol, value in _UNLESS_GIVEN.items() if symbol not in given}, **given}


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

    def __iter__(self) -> Iterator[str]:
        return iter(self.formulas)

    def __len__(self) -> int:
        return len(self.formulas)


def _exact(name: str, value: Any) -> Expr:
    """`value` for the letter `name`, as an exact number or an expression of other letters."""
    symbol = _LETTERS[name]
    meant = f"{name} ({_MEANING[symbol]})"
    exact = value if isinstance(value, Expr) else _exact_number(meant, value)
    must = [word for word in ("integer", "positive", "nonnegative") if getattr(symbol, f"is_{word}")][:2]
    if exact.is_number and not all(getattr(exact, f"is_{word}") for word in must):
        raise FormulaError(f"{meant} must be {' and '.join(must)}, got {value!r}")
    return exact


def _exact_number(name: str, value: Any) -> Expr:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise FormulaError(f"{name} must be a finite number, got {value!r}")
    if isinstance(value, WholeOrFraction):
        return sympy.Rational(value.numerator, value.denominator)
    return sympy.Rational(repr(float(value)))  # the decimal that was written, not its nearest binary


def _number(value: Expr) -> Any:
    """int or float where no letter is left; a float is the one nearest to the exact value."""
    if value.free_symbols:
        value = sympy.factor(sympy.cancel(value)) if not value.has(Min, Max, ceiling) else sympy.simplify(value)
    if value.is_Integer:
        return int(value)
    if value.is_Rational:
        return int(value.p) / int(value.q)
    return float(value) if value.is_number else value


# --- schedules ------------------------------------------------------------------------------------------------------

_GPIPE = "Huang et al. 2019 (arXiv 1811.06965), section 2.3"
_MEGATRON = "Narayanan et al. 2021 (arXiv 2104.04473), section 2.2"
_DELAY = "; the delay term is derived, and checked against the simulator"

makespan = Family(
    "makespan",
    {
        "naive": Formula("makespan of naive", m * p * (F + B) + 2 * c * m * (p - 1), "one micro-batch at a time"),
        "gpipe": Formula("makespan of gpipe", (m + p - 1) * (F + B) + 2 * c * (p - 1), _GPIPE + _DELAY),
        "one_f_one_b": Formula(
            "makespan of one_f_one_b",
            (m + p - 1) * (F + B) + 2 * c * (m + p - 2 - ceiling((m - 1) / p)),
            _MEGATRON + _DELAY,
            Or(Eq(c, 0), And(m >= p, c <= Min(F, B))),
        ),
    },
)

peak_activations = Family(
    "peak_activations",
    {
        "naive": Formula("peak of naive", sympy.Integer(1), "one micro-batch at a time"),
        "gpipe": Formula("peak of gpipe", m, "all forwards come first: derived"),
        "one_f_one_b": Formula("peak of one_f_one_b on rank r", Min(m, p - r), _MEGATRON, r < p),
    },
)

messages = Family(
    "messages",
    {
        name: Formula(f"messages of {name}", 2 * m * (p - 1), "forward and backward cross p - 1 boundaries: derived")
        for name in ("naive", "gpipe", "one_f_one_b")
    },
)


def _work(schedule: str) -> Expr:
    return m * (F + B)


def _share_of_makespan(schedule: str) -> Formula:
    whole = makespan[schedule]
    return Formula(f"bubble of {schedule}", 1 - _work(schedule) / whole.expression, whole.source, whole.holds)


bubble_fraction = Family("bubble_fraction", {schedule: _share_of_makespan(schedule) for schedule in makespan})

bubble_over_ideal = Family(
    "bubble_over_ideal",
    {
        schedule: Formula(f"bubble of {schedule} over ideal time", (p - 1) / m, _MEGATRON)
        for schedule in ("gpipe", "one_f_one_b")
    },
)


def microbatches_for(eps: Any, schedule: str = "gpipe", **values: Any) -> int:
    """The fewest micro-batches whose bubble takes at most `eps` of the makespan; needs p, and v where it has one.

    A bubble that does not grow with m, A = makespan - m C, needs m >= A (1 - eps) / (eps C): (p - 1)(1 - eps) / eps for
    GPipe and 1F1B. Exact, and `eps` = 0.1 means 1/10. Raises FormulaError where no m is enough, or a letter is missing.
    """
    share = _exact_number("eps", eps)
    if not 0 < share < 1:
        raise FormulaError(f"eps is a share of the makespan, between 0 and 1, got {eps!r}")
    whole = makespan[schedule]
    given = {symbol: value for symbol, value in whole._read({**values, "m": m}).items() if symbol is not m}
    bubble = sympy.cancel(m * (whole.expression / _work(schedule)).subs(given) - m)  # in units of C
    missing = (bubble.free_symbols | whole.holds.subs(given).free_symbols) - {m}
    if missing or p not in given:
        letters = ", ".join(sorted(map(str, missing | ({p} - set(given)))))
        raise FormulaError(f"microbatches_for({eps}, {schedule!r}) also needs a value for {letters}")
    if bubble.has(m):
        raise FormulaError(f"the bubble of {schedule} grows with m: more micro-batches do not bring it down to {eps}")
    fewest = max(1, int(ceiling(bubble * (1 - share) / share)))
    for number in range(fewest, fewest + 2 * int(given[p]) + 1):  # m >= 2p and m % p == 0 are the limits that there are
        if whole.holds.subs({**given, m: number}) == True:  # noqa: E712
            return number
    raise FormulaError(f"{whole.name} holds where {whole.holds}, so there is no answer at {values}")
