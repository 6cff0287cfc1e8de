"""Wrong answers to assignment 09."""

from assignment import Mutant

MUTANTS = {
    "steps": [
        Mutant("ZB-H1 as long as 1F1B", "waits for W as well", (("(F + I - W)", "(F + I + W)"),)),
        Mutant("W fills no gap", "fills no gap", (("(F + I - W)", "(F + I)"),)),
        Mutant(
            "the split gains nothing",
            "waits for W as well",
            (('"split": work + (p - 1) * (F + I)', '"split": work + (p - 1) * (F + I + W)'),),
        ),
        Mutant(
            "the split is ZB-H1",
            "That is ZB-H1",
            (('"split": work + (p - 1) * (F + I)', '"split": work + (p - 1) * (F + I - W)'),),
        ),
        Mutant("p for p - 1", "p - 1 ranks to pass", (("(p - 1) * (F + I - W)", "p * (F + I - W)"),)),
        Mutant("nothing to fill", "has to fill", (("work + (p - 1) * F,", "work,"),)),
        Mutant(
            "ZB-H1 is the bound",
            "That is ZB-H1",
            (('"least": work + (p - 1) * F', '"least": work + (p - 1) * (F + I - W)'),),
        ),
        Mutant(
            "I is 6/5 and W 4/5 of F",
            "'zb_h1' of",
            (('"zb_h1": work + (p - 1) * (F + I - W)', '"zb_h1": work + (p - 1) * F * 7 / 5'),),
            hard_coded=True,
        ),
    ],
    "take_apart": [
        Mutant("at once", "waits for 0 more I's", (("len(waiting) > delay", "waiting"),)),
        Mutant("one too late", "should wait for", (("len(waiting) > delay", "len(waiting) > delay + 1"),)),
        Mutant("the last one first", "more I's", (("waiting.pop(0)", "waiting.pop()"),)),
        Mutant("the rest forgotten", "got lost", (("return order + waiting", "return order"),)),
        Mutant("the rest in reverse", "where .* should stand", (("order + waiting", "order + waiting[::-1]"),)),
        Mutant(
            "W before I",
            "comes before",
            (
                (
                    "order, waiting = [], []",
                    "order, waiting = [], []\n"
                    "    halves = {pl.Kind.F: (pl.Kind.F,), pl.Kind.B: (pl.Kind.W, pl.Kind.I)}\n"
                    "    row = [a._replace(kind=kind) for a in row for kind in halves[a.kind]]",
                ),
            ),
        ),
        Mutant(
            "ZB-H1 whatever the row",
            "moved an F or an I|got lost|more actions",
            """
            def take_apart(row, delay):
                stage, m = row[0].stage, sum(a.kind is pl.Kind.F for a in row)
                warmup = next(n for n, a in enumerate(row) if a.kind is pl.Kind.B) - 1
                order = [pl.Action(stage, pl.Kind.F, k) for k in range(min(m, warmup))]
                for k in range(m + delay):
                    order += [pl.Action(stage, pl.Kind.F, k + warmup)] if k + warmup < m else []
                    order += [pl.Action(stage, pl.Kind.I, k)] if k < m else []
                    order += [pl.Action(stage, pl.Kind.W, k - delay)] if k >= delay else []
                return order
            """,
            hard_coded=True,
        ),
        Mutant(
            "four ranks only",
            "that is not ZB-H1",
            (("len(waiting) > delay", "len(waiting) > min(delay, 3)"),),
            hard_coded=True,
        ),
    ],
    "halves": [
        Mutant("without the tanh", "the gradient at x is not", ((" * (1 - z * z)", ""),)),
        Mutant("1 - z for 1 - z²", "the gradient at x is not", (("(1 - z * z)", "(1 - z)"),)),
        Mutant(
            "A and C exchanged",
            "at A is not|has the shape",
            (("x.T @ before_tanh, z.T @ g", "z.T @ g, x.T @ before_tanh"),),
        ),
        Mutant(
            "W walks through I again",
            "it repeats I's",
            (
                ("(x, before_tanh, z, g)\n", "(x, z, g, C)\n"),
                (
                    "x, before_tanh, z, g = (tensor.flatten(0, 1) for tensor in left)",
                    "C = left[3]\n    x, z, g = (tensor.flatten(0, 1) for tensor in left[:3])\n"
                    "    before_tanh = (g @ C.T) * (1 - z * z)",
                ),
            ),
        ),
        Mutant(
            "everything in I",
            "leave W's to W",
            (
                (
                    "(x, before_tanh, z, g)\n",
                    "(x.flatten(0, 1).T @ before_tanh.flatten(0, 1), z.flatten(0, 1).T @ g.flatten(0, 1))\n",
                ),
                ("    x, before_tanh, z, g = (tensor.flatten(0, 1) for tensor in left)\n", ""),
                ("return x.T @ before_tanh, z.T @ g", "return left"),
            ),
        ),
        Mutant(
            "the first sample only",
            "is not autograd's",
            (("(tensor.flatten(0, 1) for tensor in left)", "(tensor[0] for tensor in left)"),),
            hard_coded=True,
        ),
        Mutant(
            "a mean over samples",
            "is not autograd's",
            (("return x.T @ before_tanh, z.T @ g", "n = len(left[0])\n    return x.T @ before_tanh / n, z.T @ g / n"),),
            hard_coded=True,
        ),
    ],
    "accumulate": [
        Mutant("as printed", "never ran|only micro-batch", "accumulate = accumulate_as_printed"),
        Mutant(
            "the rest never runs",
            "micro-batches' W's never ran",
            (("    for x, g in queue:\n        gradient += g.T @ x\n", ""),),
        ),
        Mutant("overwrites", "only micro-batch", (("gradient += g.T @ x", "gradient = g.T @ x"),)),
        Mutant("one entry too many", "the queue held", (("len(queue) > delay:", "len(queue) > delay + 1:"),)),
        Mutant("at once", "do not wait", (("len(queue) > delay:", "queue:"),)),
        Mutant("the mean", "that is the mean", (("return gradient, most", "return gradient / len(batches), most"),)),
        Mutant(
            "counts by the delay",
            "the queue held",
            (("return gradient, most", "return gradient, delay + 1"),),
            hard_coded=True,
        ),
        Mutant(
            "five samples in a micro-batch",
            "is not the sum",
            (("gradient += g.T @ x", "gradient += 5 * (g.T @ x) / len(x)"),),
            hard_coded=True,
        ),
    ],
    "within": [
        Mutant("1F1B", "and 1F1B takes", "def within(p, m, *_):\n    return pl.one_f_one_b(p, m)"),
        Mutant("ZB-H1", "longer than what", "def within(p, m, *_):\n    return pl.zb_h1(p, m)"),
        Mutant("ZB-H2", "keeps 7 micro-batches", "def within(p, m, *_):\n    return pl.zb_h2(p, m)"),
        Mutant(
            "the search",
            "not allowed here",
            "def within(p, m, F, I, W, room):\n    return pl.search(p, m, pl.Costs(F, I, W), memory_limit=room)",
        ),
        Mutant("one too many", "keeps 5 micro-batches", (("room - 1 - w", "room - w"),)),
        Mutant("no W is held back", "longer than what|1F1B takes", (("[room - 1 - w for w in warmup]", "[0] * p"),)),
        Mutant(
            "five at most",
            "longer than what",
            (("    fastest = None\n", "    fastest, room = None, min(room, 5)\n"),),
            hard_coded=True,
        ),
        Mutant(
            "four ranks only",
            "has 4 ranks",
            (("    fastest = None\n", "    fastest, p, room = None, 4, max(room, 4)\n"),),
            hard_coded=True,
        ),
    ],
}
