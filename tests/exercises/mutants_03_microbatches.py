"""Wrong answers to assignment 03."""

from assignment import Mutant

MUTANTS = {
    "clock_cycles": [
        Mutant("m + p cycles", "has 8 cycles", (("range(m + p - 1)", "range(m + p)"),)),
        Mutant(
            "stage and micro-batch exchanged",
            "runs before|goes up to|smallest stage",
            (("(stage, cycle - stage)", "(cycle - stage, stage)"),),
        ),
        Mutant(
            "one rank at a time",
            "has 16 cycles",
            (("    return [", "    return [[(s, k)] for k in range(m) for s in range(p)] or ["),),
        ),
        Mutant(
            "all ranks at once",
            "has 4 cycles",
            (("    return [", "    return [[(s, k) for s in range(p)] for k in range(m)] or ["),),
        ),
        Mutant(
            "last micro-batch first",
            "runs in cycle|runs before",
            (("(stage, cycle - stage)", "(stage, m - 1 - cycle + stage)"),),
        ),
        Mutant(
            "largest stage first",
            "smallest stage comes first",
            (("for stage in range(p)", "for stage in reversed(range(p))"),),
        ),
        Mutant("p = 4 only", "has the pair", (("range(p)", "range(4)"),), hard_coded=True),
        Mutant(
            "right for p = m only",
            "runs before|goes up to",
            (
                ("[(stage, cycle - stage)", "sorted((cycle - stage, stage)"),
                ("cycle - stage < m]", "cycle - stage < m)"),
            ),
            hard_coded=True,
        ),
    ],
    "report": [
        Mutant("forward only", "That is the forward alone", (("(F + B)", "F"),)),
        Mutant("filling takes p slots", "p - 1 slots", (("(m + p - 1) * (F + B)", "(m + p) * (F + B)"),)),
        Mutant("no draining", "gradients climb", (("(m + p - 1) * (F + B)", "m * (F + B) + (p - 1) * F"),)),
        Mutant("the other denominator", "share of the ideal time", (("(p - 1) / (m + p - 1)", "(p - 1) / m"),)),
        Mutant("always p times", "nobody ever waited", (('naive / gpipe, "bubble"', 'p, "bubble"'),)),
        Mutant("utilisation for bubble", "in which ranks work", (("(p - 1) / (m + p - 1)}", "m / (m + p - 1)}"),)),
        Mutant("F = B only", "too (large|small)", (("(F + B)", "2 * F"),), hard_coded=True),
        Mutant(
            "the numbers of the notes",
            "'naive' in report",
            "def report(*_):\n    return {'naive': 96, 'gpipe': 30, 'speedup': 3.2, 'bubble': 0.2}",
            hard_coded=True,
        ),
    ],
    "accumulate": [
        Mutant("as printed", "that of the last micro-batch alone", "accumulate = accumulate_as_printed"),
        Mutant(
            "only the scale mended",
            "last micro-batch alone, divided by m",
            (
                (
                    "    model.zero_grad()\n    for k in range(m):\n",
                    "    for k in range(m):\n        model.zero_grad()\n",
                ),
            ),
        ),
        Mutant("only zero_grad mended", "sum of the means", ((" / m).backward()", ").backward()"),)),
        Mutant("divided by the samples", "a mean already", ((" / m).backward()", " / len(inputs)).backward()"),)),
        Mutant("never emptied", "is still in it", (("    model.zero_grad()\n", ""),)),
        Mutant(
            "takes a step",
            "the weights moved",
            (
                (
                    "    model.zero_grad()\n",
                    "    model.zero_grad()\n    [w.data.add_(1) for w in model.parameters()]\n",
                ),
            ),
        ),
        Mutant(
            "drops the rest in silence", "raise a ValueError", (("if len(inputs) % m:", "if False:"),), hard_coded=True
        ),
        Mutant(
            "chunks that are not m",
            "raise a ValueError",
            (("if len(inputs) % m:", "if len(inputs) < m:"),),
            hard_coded=True,
        ),
    ],
    "best_m": [
        Mutant(
            "the smallest bubble",
            "most overhead",
            (("min(sorted(allowed), key=lambda m: (m + p - 1) * (T / m + o))", "max(allowed)"),),
        ),
        Mutant(
            "the least overhead",
            "largest bubble",
            (("min(sorted(allowed), key=lambda m: (m + p - 1) * (T / m + o))", "min(allowed)"),),
        ),
        Mutant(
            "the root, whether allowed or not",
            "not in the list",
            (("min(sorted(allowed), key=lambda m: (m + p - 1) * (T / m + o))", "((p - 1) * T / o) ** 0.5 + 0.25"),),
        ),
        Mutant(
            "nearest to the root",
            "another m has",
            (("(m + p - 1) * (T / m + o)", "abs(m - ((p - 1) * T / o) ** 0.5)"),),
            hard_coded=True,
        ),
        Mutant(
            "the larger of two equals",
            "another m has",
            (("sorted(allowed)", "sorted(allowed, reverse=True)"),),
            hard_coded=True,
        ),
        Mutant("p for p - 1", "another m has", (("(m + p - 1)", "(m + p)"),), hard_coded=True),
    ],
    "fit": [
        Mutant("no bubble in it", "T in fit", (("t0 / (m0 + p - 1), t1 / (m1 + p - 1)", "t0, t1"),)),
        Mutant(
            "m + p slots",
            "too (large|small)",
            (("t0 / (m0 + p - 1), t1 / (m1 + p - 1)", "t0 / (m0 + p), t1 / (m1 + p)"),),
        ),
        Mutant("T and o exchanged", "T and o are exchanged", (("return T, o,", "return o, T,"),)),
        Mutant("p under the root", "p - 1 stands under the root", (("((p - 1) * T / o)", "(p * T / o)"),)),
        Mutant("no ranks under the root", "number of ranks stands", (("((p - 1) * T / o)", "(T / o)"),)),
        Mutant("no root", "That is its square", ((" ** 0.5", ""),)),
        Mutant("rounded", "too (large|small)", (("((p - 1) * T / o) ** 0.5", "round(((p - 1) * T / o) ** 0.5)"),)),
        Mutant("four ranks only", "in fit", (("p - 1", "3"),), hard_coded=True),
    ],
}
