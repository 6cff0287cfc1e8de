"""Time, bubble, memory and messages of the schedules, with equal stages; letters in theory/letters.py.

"Derived" means worked out and checked against the simulator on random cases inside the range that `holds` gives.
"""

from __future__ import annotations

from typing import Any

import sympy
from sympy import And, Eq, Expr, Max, Min, Mod, Or, Piecewise, ceiling, floor

from pipelab.errors import FormulaError
from pipelab.theory.formula import Formula, exact_number, family
from pipelab.theory.letters import B, F, I, O, W, c, m, p, r, v, w, x

GPIPE = "Huang et al. 2019, arXiv 1811.06965, section 2.3"
MEGATRON = "Narayanan et al. 2021, arXiv 2104.04473, section 2.2"
KORTHIKANTI = "Korthikanti et al. 2022, arXiv 2205.05198"
ZERO_BUBBLE = "Qi et al. 2023, arXiv 2401.10241, section 2.3"
CONTROLLABLE = "Qi et al. 2024, arXiv 2405.15362"
CHIMERA = "Li and Hoefler 2021, arXiv 2107.06925, for F = B; not simulated here"
DUALPIPE = "DeepSeek-AI 2025, README of DualPipe; not simulated here, where a pair runs as F, then B"
DERIVED = "derived"

_ENOUGH = And(m >= 2 * p, Min(F, I) >= W)  # the zero-bubble orders need micro-batches, and a W that fits a gap

_V_SOURCE = f"{CONTROLLABLE}, for p = 4, 8, 16; other p derived"
_by_three = Piecewise((1, Eq(Mod(p, 3), 0)), (0, True))
_EQUAL = And(m >= 2 * p, Eq(F, I), Eq(I, W), Eq(c, 0))  # the V shapes are drawn for these

# what a rank works for one micro-batch
_UNIT: dict[str, Expr] = {
    "naive": F + B,
    "gpipe": F + B,
    "one_f_one_b": F + B,
    "pipedream": F + B,
    "interleaved": F + B,
    "breadth_first": F + B,
    "zb_h1": F + I + W,
    "zb_h2": F + I + W,
    "zb_v": F + I + W,
    "v_half": F + I + W,
    "v_min": F + I + W,
    "dualpipe_v": F + I + W,
}


_one_f_one_b = (
    (m + p - 1) * (F + B) + 2 * c * (m + p - 2 - ceiling((m - 1) / p)),
    f"{MEGATRON}; delay derived",
)

# last end minus first start: work of one rank, fill and drain, and the hops on the longest path
makespan = family(
    "makespan",
    {
        "naive": (m * p * (F + B) + 2 * c * m * (p - 1), DERIVED),
        "gpipe": ((m + p - 1) * (F + B) + 2 * c * (p - 1), f"{GPIPE}; delay derived"),
        "one_f_one_b": _one_f_one_b,
        "pipedream": _one_f_one_b,
        "interleaved": (
            (m + (p - 1) / v) * (F + B) + 2 * c * (p * v - 1),
            f"{MEGATRON}; delay derived",
            And(Or(Eq(v, 1), Eq(Mod(m, p), 0)), Or(Eq(c, 0), And(p >= 2, v >= 2, v * c <= Min(F, B)))),
        ),
        "breadth_first": (
            (m + (p - 1) / v) * (F + B) + 2 * c * (p - 1),
            DERIVED,
            And(m >= p, p * v * c <= (m - p) * Min(F, B)),
        ),
        "zb_h1": (
            m * (F + I + W) + (p - 1) * (F + I - W) + 4 * c * (p - 1),
            f"{ZERO_BUBBLE}; delay derived",
            And(_ENOUGH, 10 * c <= Min(F, I, W)),
        ),
        "zb_h2": (
            m * (F + I + W) + (p - 1) * Max(F + I - 2 * W + 2 * c, F + c),
            DERIVED,
            And(_ENOUGH, c <= Min(F, I, W)),
        ),
        **dict.fromkeys(("zb_v", "dualpipe_v"), (m * (F + I + W) + (p - 1) * F / 2, DERIVED, _EQUAL)),
        "v_half": (m * (F + I + W) + (6 * ceiling(p / 2) - 7) * F / 2, _V_SOURCE, And(_EQUAL, p >= 3)),
        "v_min": (m * (F + I + W) + (4 * p - 5 - 2 * _by_three) * F / 2, _V_SOURCE, And(_EQUAL, p >= 3)),
    },
)

dualpipe_overlapped_idle = Formula(
    "idle time of a rank of dualpipe_v, F, B, W and O of one stage", (p - 1) * (O + B - 3 * W), DUALPIPE
)

longest_rank_span = family(
    "longest_rank_span",
    {
        "zb_h1": (makespan["zb_h1"].expression, ZERO_BUBBLE, makespan["zb_h1"].holds),
        "zb_h2": (
            m * (F + I + W) + (p - 1) * (F + I - 2 * W) + 2 * c * (p - 1),
            f"{ZERO_BUBBLE}; delay derived",
            makespan["zb_h2"].holds,
        ),
        "zb_v": (m * (F + I + W), DERIVED, _EQUAL),
    },
)


def _share(schedule: str, cost: Expr) -> Expr:
    return (cost - m * _UNIT[schedule]) / cost


# idle rank time over makespan times ranks, as Trace.bubble_fraction
bubble_fraction = family(
    "bubble_fraction",
    {
        **{name: (_share(name, it.expression), it.source, it.holds) for name, it in makespan.items()},
        "chimera": ((p - 2) / (2 * m + p - 2), CHIMERA, And(Eq(F, B), Eq(Mod(p, 2), 0))),
    },
)

# what the zero-bubble papers print: (cost - m C) / cost, where the cost of ZB-H2 is the longest span of one rank
bubble_rate = family(
    "bubble_rate",
    {
        "one_f_one_b": (bubble_fraction["one_f_one_b"].expression, ZERO_BUBBLE, makespan["one_f_one_b"].holds),
        **{name: (_share(name, span.expression), ZERO_BUBBLE, span.holds) for name, span in longest_rank_span.items()},
    },
)

# Megatron's "bubble time over ideal time": another denominator, so another number for the same idle time
bubble_over_ideal = family(
    "bubble_over_ideal",
    {
        "gpipe": ((p - 1) / m, MEGATRON),
        "one_f_one_b": ((p - 1) / m, MEGATRON),
        "interleaved": ((p - 1) / (m * v), MEGATRON, Eq(Mod(m, p), 0)),
    },
)

uneven_bubble_fraction = Formula(
    "bubble_fraction of gpipe with unequal stages, one of them the slowest in both directions",
    1 - m / (p + (m - 1) * x),
    DERIVED,
    And(x >= 1, x <= p),
)

# in micro-batches of a whole rank, on rank r or on the rank that keeps most; w of one (1 unless given) is kept until W
peak_activations = family(
    "peak_activations",
    {
        "naive": (sympy.Integer(1), DERIVED),
        "gpipe": (m, GPIPE),
        "one_f_one_b": (Min(m, p - r), MEGATRON, r < p),
        "pipedream": (Min(m, p - r), MEGATRON, r < p),
        "interleaved": (
            Min(m * v, (v - 1) * p + 2 * (p - 1 - r) + 1) / v,
            f"{KORTHIKANTI}, for rank 0; other ranks derived",
            And(Eq(Mod(m, p), 0), v >= 2, r < p),
        ),
        "breadth_first": (m, DERIVED),
        "zb_h1": ((p - r) + r * w, ZERO_BUBBLE, And(m >= p, r < p, w <= 1)),
        "zb_h2": ((2 * p - 2 * r - 1) + 2 * r * w, ZERO_BUBBLE, And(m >= 2 * p - 1, r < p, w <= 1)),
        "zb_v": (p, CONTROLLABLE, And(m >= 2 * p, Eq(w, 1))),
        "v_half": (floor(p / 2) + 1, _V_SOURCE, And(m >= 2 * p, Eq(w, 1))),
        "v_min": (floor((p + 4) / 3), _V_SOURCE, And(m >= 2 * p, Eq(w, 1))),
        "dualpipe_v": (p + sympy.Rational(1, 2), DUALPIPE.split(";")[0], And(m >= 2 * p, Eq(w, 1))),
    },
)

_one_stage_a_rank = (2 * m * (p - 1), DERIVED)
_loop = (2 * m * (p * v - 1), DERIVED, p >= 2)
_v_shaped = (2 * m * 2 * (p - 1), DERIVED)  # down and up again; the turn stays on the last rank

# between ranks, of one step, both directions: v stages a rank in a loop send (pv - 1)/(p - 1) times as many
messages = family(
    "messages",
    {
        **dict.fromkeys(("naive", "gpipe", "one_f_one_b", "pipedream", "zb_h1", "zb_h2"), _one_stage_a_rank),
        **dict.fromkeys(("interleaved", "breadth_first"), _loop),
        **dict.fromkeys(("zb_v", "v_half", "v_min", "dualpipe_v"), _v_shaped),
    },
)


def microbatches_for(eps: Any, schedule: str = "gpipe", **values: Any) -> int:
    """The fewest micro-batches whose bubble takes at most `eps` of the makespan; needs p, and v where it has one.

    A bubble that does not grow with m, A = makespan - m C, needs m >= A (1 - eps) / (eps C): (p - 1)(1 - eps) / eps for
    GPipe and 1F1B. Exact, and `eps` = 0.1 means 1/10. Raises FormulaError where no m is enough, or a letter is missing.
    """
    share = exact_number("eps", eps)
    if not 0 < share < 1:
        raise FormulaError(f"eps is a share of the makespan, between 0 and 1, got {eps!r}")
    whole = makespan[schedule]
    given = {symbol: value for symbol, value in whole.read({**values, "m": m}).items() if symbol is not m}
    bubble = sympy.cancel((whole.expression / _UNIT[schedule]).subs(given)) - m  # in units of C
    missing = (bubble.free_symbols | ({p} - set(given))) - {m}
    if missing:
        names = ", ".join(sorted(map(str, missing)))
        raise FormulaError(f"microbatches_for({eps}, {schedule!r}) also needs a value for {names}")
    bubble = sympy.cancel(bubble)
    if bubble.has(m):
        raise FormulaError(f"the bubble of {schedule} itself grows with m here; search with pl.simulate")
    fewest = max(1, int(ceiling(bubble * (1 - share) / share)))
    for number in range(fewest, fewest + 4 * int(given[p])):  # the ranges ask for m >= 2p or m % p == 0, hardly more
        if whole.holds.subs({**given, m: number}) == True:  # noqa: E712  a sympy condition
            return number
    raise FormulaError(f"{whole.name} holds where {whole.holds}, so there is no answer at {values}")
