"""Wrong answers to assignment 07."""

from assignment import Mutant

FLYING = "forwards < m and forwards - backwards < p - rank"

MUTANTS = {
    "next_action": [
        Mutant("GPipe", "more than 1F1B keeps", ((FLYING, "forwards < m"),)),
        Mutant("one fewer in flight", "where 1F1B has|had no forward", (("< p - rank", "< p - 1 - rank"),)),
        Mutant("all ranks like rank 0", "more than 1F1B keeps", (("< p - rank", "< p"),)),
        Mutant("ranks the wrong way round", "where 1F1B has|more than 1F1B keeps", (("< p - rank", "<= rank"),)),
        Mutant("never ends", "had no forward", (('"B" if backwards < m else None', '"B"'),)),
        Mutant(
            "forgets the cooldown",
            "it stops after",
            (('"B" if backwards < m else None', '"B" if forwards < m else None'),),
        ),
        Mutant(
            "forwards for ever, with m < p",
            "does not exist",
            ((FLYING, "forwards - backwards < p - rank and (forwards < m or m < p)"),),
            hard_coded=True,
        ),
        Mutant("four ranks only", "where 1F1B has|more than", (("< p - rank", "< 4 - rank"),), hard_coded=True),
    ],
    "activations": [
        Mutant("17 GiB: b counted twice", "counted twice", (("* b * T", "* b * b * T"),)),
        Mutant("all of them", "as GPipe keeps them", (("min(m, p - rank) * one", "m * one"),)),
        Mutant("p on every rank", "only on rank 0", (("min(m, p - rank)", "min(m, p)"),)),
        Mutant("all layers", "all layers", (("(L // p)", "L"),)),
        Mutant("GB for GiB", "Those are GB", (("2**30", "1e9"),)),
        Mutant("ranks the wrong way round", "a single micro-batch", (("min(m, p - rank)", "(rank + 1)"),)),
        Mutant(
            "more in flight than there are", "than there are", (("min(m, p - rank)", "(p - rank)"),), hard_coded=True
        ),
    ],
    "mended": [
        Mutant("as given", "that hangs", "def mended(warmups):\n    return list(warmups)"),
        Mutant(
            "1F1B's own",
            "less than the warmup given|smaller warmups would do",
            "def mended(warmups):\n    return [len(warmups) - 1 - r for r in range(len(warmups))]",
        ),
        Mutant("all like the largest", "smaller warmups would do", (("max(warmups[r:])", "max(warmups)"),)),
        Mutant("from the front", "that hangs", (("max(warmups[r:])", "max(warmups[: r + 1])"),)),
        Mutant("sorted", "less than|smaller", "def mended(warmups):\n    return sorted(warmups, reverse=True)"),
        Mutant("one neighbour only", "that hangs", (("max(warmups[r:])", "max(warmups[r : r + 2])"),), hard_coded=True),
        Mutant(
            "each more than the next",
            "smaller warmups would do",
            (("max(warmups[r:])", "max(w + k for k, w in enumerate(warmups[r:]))"),),
        ),
    ],
    "ahead": [
        Mutant("always 1F1B", "another a has", "def ahead(*_):\n    return 1"),
        Mutant("always Eager 1F1B", "more than the room", "def ahead(*_):\n    return 2"),
        Mutant("free hops", "another a has", (("comm=c", "comm=0"),)),
        Mutant("ignores the room", "more than the room", (("<= room", "<= m"),)),
        Mutant("the last rank's room", "more than the room", (("max(pl.peak", "min(pl.peak"),)),
        Mutant(
            "as far as the room allows", "a smaller a", (("min(steps, key=steps.get, default", "max(steps, default"),)
        ),
        Mutant("1 where nothing fits", "it should be None", (("default=None", "default=1"),), hard_coded=True),
        Mutant("two at most", "another a has", (("range(1, m + 1)", "range(1, 3)"),), hard_coded=True),
    ],
    "average": [
        Mutant(
            "the peak",
            "That is the peak",
            "def average(trace):\n    return pl.peak_activations(trace)",
        ),
        Mutant(
            "each change counts alike",
            "however long it lasts",
            """
            def average(trace):
                return [sum(kept) / len(kept) for kept in pl.memory_curve(trace, 1).total]
            """,
        ),
        Mutant("the area", "divide it", ((" / trace.makespan", ""),)),
        Mutant("kept to the start of B", "too small", (("span.end for", "span.start for"),)),
        Mutant("kept from the end of F", "too small", (("span.start for", "span.end for"),)),
        Mutant("the rank's own span", "the rank's own span", (("/ trace.makespan", "/ (row[-1].end - row[0].start)"),)),
        Mutant(
            "F = 1 and B = 2 only",
            "too (large|small)",
            (("span.start for", "span.end - 1 for"), ("span.end for", "span.start + 2 for")),
            hard_coded=True,
        ),
    ],
}
