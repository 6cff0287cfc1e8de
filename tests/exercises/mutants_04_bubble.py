"""Wrong answers to assignment 04."""

from assignment import Mutant

WAY = 'case["F"] + case["B"] + 2 * case["c"]'

MUTANTS = {
    "bubbles": [
        Mutant("free hops", "hops are free", ((WAY, 'case["F"] + case["B"]'),)),
        Mutant("(p - 1)/m", "another denominator", (("idle / (work + idle)", '(case["p"] - 1) / case["m"]'),)),
        Mutant("over the ideal time", "share of the ideal time", (("(work + idle)", "work"),)),
        Mutant("hops forward only", "take hops as well", (("2 * case", "case"),)),
        Mutant(
            "a hop in every slot",
            "a hop in every slot",
            (('idle = (case["p"] - 1) * way', 'idle = (case["p"] - 1) * way + 2 * case["c"] * (case["m"] - 1)'),),
        ),
        Mutant("in per cent", "not a percentage", (("idle / (work", "100 * idle / (work"),)),
        Mutant("case a alone", "no bubble for case b", "bubbles = {'a': 1 / 3}", hard_coded=True),
        Mutant("the same for all", "case b", "bubbles = dict.fromkeys('abc', 1 / 3)", hard_coded=True),
    ],
    "in_letters": [
        Mutant("free hops", "hops are free", ((" + 2 * c * (p - 1)", ""),)),
        Mutant("hops forward only", "Gradients take hops", (("2 * c * (p - 1)", "c * (p - 1)"),)),
        Mutant(
            "a hop in every slot",
            "not one in every slot",
            (("(m + p - 1) * (F + B) + 2 * c * (p - 1)", "(m + p - 1) * (F + B + 2 * c)"),),
        ),
        Mutant(
            "efficiency for speed-up",
            "p ranks work",
            (("speedup = p * m", "speedup = m"), ("p / 2", "sympy.Rational(1, 2)")),
        ),
        Mutant(
            "half at m = p", "the rule m = p", (("(half,) = sympy.solve(sympy.Eq(speedup, p / 2), m)", "half = p"),)
        ),
        Mutant(
            "half without hops",
            "`half` at .* hops are free",
            (("(half,) = sympy.solve(sympy.Eq(speedup, p / 2), m)", "half = p - 1"),),
        ),
        Mutant(
            "a letter of its own",
            "has letters beside",
            (("speedup = p * m", "speedup = sympy.Symbol('K') * m"), ("sympy.Eq(speedup, p / 2)", "sympy.Eq(m, p)")),
        ),
        Mutant(
            "numbers for letters",
            "`(speedup|half)` at",
            (
                (
                    "speedup = p * m * (F + B) / makespan",
                    "speedup = (p * m * (F + B) / makespan).subs({F: 1, B: 2, c: 0.75})",
                ),
            ),
            hard_coded=True,
        ),
        Mutant(
            "p = 4 only",
            "`(speedup|half)` at p = 2",
            (("(half,)", "speedup = speedup.subs(p, 4)\n(half,)"), ("p / 2", "2")),
            hard_coded=True,
        ),
    ],
    "fewest": [
        Mutant(
            "rounded down",
            "above the target",
            (("-(-needed.numerator // needed.denominator)", "needed.numerator // needed.denominator"),),
        ),
        Mutant("(p - 1)/m", "still within the target", ((" * (1 - e) / e", " / e"),)),
        Mutant("one more to be safe", "still within the target", (("max(1, -", "max(1, 1 - "),)),
        Mutant("five times p", "still within the target", "def fewest(p, target):\n    return 5 * p"),
        Mutant(
            "floating point",
            "still within the target",
            """
            from math import ceil


            def fewest(p, target):
                return max(1, ceil((p - 1) * (1 - target) / target))
        """,
            hard_coded=True,
        ),
        Mutant("no micro-batch on one rank", "at least one micro-batch", (("max(1, ", "max(0, "),), hard_coded=True),
        Mutant(
            "strictly below",
            "still within the target",
            (("-(-needed.numerator // needed.denominator)", "needed.numerator // needed.denominator + 1"),),
            hard_coded=True,
        ),
    ],
    "complaints": [
        Mutant(
            "knows no missing actions",
            "overlooked",
            (('                    found.add(f"{action} is missing")', "                    continue"),),
        ),
        Mutant("one slot for both is fine", "overlooked", ((">= slot[action]", "> slot[action]"),)),
        Mutant(
            "a backward needs the rank before", "without reason|overlooked", (("{rank + 1}B{k}", "{rank - 1}B{k}"),)
        ),
        Mutant(
            "a backward needs no forward",
            "overlooked",
            (('[f"{rank}F{k}", f"{rank + 1}B{k}"]', '[f"{rank + 1}B{k}"]'),),
            hard_coded=True,
        ),
        Mutant("only its own rank", "overlooked", (('[f"{rank}F{k}", f"{rank + 1}B{k}"]', '[f"{rank}F{k}"]'),)),
        Mutant(
            "backwards wait for all forwards",
            "without reason",
            (('f"{rank + 1}B{k}"]', 'f"{rank + 1}B{k}", *[f"{rank}F{j}" for j in range(m)]]'),),
        ),
        Mutant(
            "complains where a need is missing",
            "without reason",
            (
                (
                    "slot.get(other, -1) >=",
                    "slot.get(other, 99 if other[0] in '012' else -1) >=",
                ),
            ),
        ),
        Mutant(
            "the example's complaints",
            "overlooked|without reason",
            """
            def complaints(chart, m):
                example = {"0B0 is too early", "0B1 is too early", "0B2 is too early", "2B2 is missing"}
                return example if chart == printed else set()
            """,
            hard_coded=True,
        ),
    ],
    "plan": [
        Mutant(
            "as many layers in each",
            "above the target|fewer micro-batches|no plan|is None",
            (
                (
                    "pl.partition_layers(costs, p)",
                    "pl.Partition.from_sizes(costs, [len(costs) // p + (s < len(costs) % p) for s in range(p)])",
                ),
            ),
        ),
        Mutant(
            "the formula of equal stages",
            "above the target",
            (
                (
                    "step = sum(split.costs) + (count - 1) * split.heaviest",
                    "step = (count + p - 1) * sum(split.costs) / p",
                ),
            ),
        ),
        Mutant("all that the memory allows", "fewer micro-batches", (("range(1, limit + 1)", "range(limit, 0, -1)"),)),
        Mutant(
            "stops before the limit", "there is a plan", (("range(1, limit + 1)", "range(1, limit)"),), hard_coded=True
        ),
        Mutant(
            "ignores the limit",
            "more than the limit|should be None",
            (("range(1, limit + 1)", "range(1, 999)"),),
            hard_coded=True,
        ),
        Mutant(
            "always promises",
            "should be None",
            (("    return None", "    return list(split.sizes), limit"),),
            hard_coded=True,
        ),
    ],
}
