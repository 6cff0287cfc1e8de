"""Wrong answers to assignment 08."""

from assignment import Mutant

REVERSED = 'if kind == "B":\n        lap = v - 1 - lap\n    '
MESSAGES = "2 * sum(here != there for here, there in pairwise(ranks))"

MUTANTS = {
    "turn": [
        Mutant("backwards make the laps forward", "laps in reverse", ((REVERSED, ""),)),
        Mutant("forwards in reverse, too", "laps in reverse", (('if kind == "B":\n    ', "if True:\n    "),)),
        Mutant(
            "breadth-first",
            "another group",
            (("divmod(n, p * v)", "divmod(n, 8 * v)"), ("divmod(place, p)", "divmod(place, 8)")),
        ),
        Mutant("one stage further a lap", "is not on rank", (("lap * p + rank", "rank * v + lap"),)),
        Mutant(
            "members before laps",
            "has not got that far",
            (("lap, member = divmod(place, p)", "member, lap = divmod(place, v)"),),
        ),
        Mutant("groups of v", "another group", (("group * p + member", "group * v + member"),)),
        Mutant(
            "in floating point",
            "count in whole numbers",
            (("group, place = divmod(n, p * v)", "group, place = int(n / (p * v)), n % (p * v)"),),
            hard_coded=True,
        ),
        Mutant(
            "two or three laps only",
            "laps in reverse|stages go from|has not got",
            (("v - 1 - lap", "min(v - 1, 2) - lap"),),
            hard_coded=True,
        ),
    ],
    "price": [
        Mutant("P/V", "pipeline of P/V ranks", (("(p - 1) / (v * m + p - 1)", "(p / v - 1) / (m + p / v - 1)"),)),
        Mutant("half of 7/23", "the makespan shrinks", (("(p - 1) / (v * m + p - 1)", "(p - 1) / (m + p - 1) / v"),)),
        Mutant("the other denominator", "share of the ideal time", (("(v * m + p - 1)", "(v * m)"),)),
        Mutant("V(P - 1)", "wrap-around", (('"forward": p * v - 1', '"forward": v * (p - 1)'),)),
        Mutant("PV", "nothing is sent on", (('"forward": p * v - 1', '"forward": p * v'),)),
        Mutant("v times as many", "more than v", (('"more": (p * v - 1) / (p - 1)', '"more": v'),)),
        Mutant("v times too few", "the bubble is larger", (('"microbatches": v * m', '"microbatches": m'),)),
        Mutant("two stages a rank only", "of price", (("v * m", "2 * m"),), hard_coded=True),
    ],
    "place": [
        Mutant("always a loop", "those are the ranks of 'loop'", (('"zigzag" and lap % 2', '"zigzag" and lap < 0'),)),
        Mutant("a V that stays up", "from lap to lap", (("lap % 2", "lap"),), hard_coded=True),
        Mutant("one direction", "That is one direction", ((MESSAGES, MESSAGES.removeprefix("2 * ")),)),
        Mutant("every boundary", "stay on their rank", ((MESSAGES, "2 * (p * v - 1)"),)),
        Mutant("blocks of p", "names the ranks|gives the ranks", (("stage // v", "stage // p"),)),
        Mutant("no blocks", "those are the ranks of", (('shape == "blocks"', "False"),)),
        Mutant(
            "turning never costs, one rank does",
            "counts",
            ((MESSAGES, f"max(2, {MESSAGES})"),),
            hard_coded=True,
        ),
    ],
    "looped": [
        Mutant("as printed", "cannot run", "looped = looped_as_printed"),
        Mutant(
            "stages still in blocks",
            "it has stage \\d on rank",
            (("range(r, p * v, p)", "range(r * v, r * v + v)"),),
        ),
        Mutant("laps not in reverse", "cannot run", (("in reversed(stages)", "in stages"),)),
        Mutant("micro-batches not in reverse", "the last micro-batch first", (("reversed(range(m))", "range(m)"),)),
        Mutant(
            "the package's breadth-first",
            "the last micro-batch first",
            "def looped(p, m, v):\n    return pl.breadth_first(p, m, v)",
        ),
        Mutant("GPipe", "stages", "def looped(p, m, v):\n    return pl.gpipe(p, m)"),
        Mutant("two laps only", "stages|cannot run", (("range(r, p * v, p)", "range(r, 2 * p, p)"),), hard_coded=True),
    ],
    "groups": [
        Mutant(
            "groups of p and a rest",
            "has fewer than",
            "def groups(p, m):\n    return [p] * (m // p) + [m % p] * (m % p > 0)",
        ),
        Mutant("one group of all", "can be smaller", (("count = m // p", "count = min(1, m // p)"),)),
        Mutant(
            "the rest to the first group",
            "can be smaller",
            (("[size + 1] * left_over + [size] * (count - left_over)", "[size + left_over] + [size] * (count - 1)"),),
            hard_coded=True,
        ),
        Mutant(
            "a multiple of p only",
            "is None, and there are",
            (("if count == 0:", "if m % p:"),),
        ),
        Mutant("no groups below p", "should be None", (("return None", "return [m]"),), hard_coded=True),
        Mutant(
            "the small ones first",
            "than the one after it",
            (
                (
                    "[size + 1] * left_over + [size] * (count - left_over)",
                    "[size] * (count - left_over) + [size + 1] * left_over",
                ),
            ),
        ),
        Mutant("one group too many", "has fewer than", (("count = m // p", "count = -(-m // p)"),)),
    ],
}
