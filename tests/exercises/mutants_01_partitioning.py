"""Wrong answers to assignment 01."""

from assignment import Mutant

MUTANTS = {
    "stages_needed": [
        Mutant("weights alone", "weights alone", (("-16", "-2"),)),
        Mutant("weights and gradients", "optimizer keeps something", (("-16", "-4"),)),
        Mutant("no exact copy of the weights", "exact copy of the weight", (("-16", "-12"),)),
        Mutant("one device more than are full", "too large", (("-(-16 * ", "1 + (16 * "),)),
        Mutant("rounded down", r"\(7000000000, 80\).*too small", (("-(-16 * ", "max(1, 16 * "),), hard_coded=True),
        Mutant("GiB for GB", "too small", (("memory_gb * 10**9", "memory_gb * 2**30"),), hard_coded=True),
        Mutant("the example's answer", "too large", "def stages_needed(*_):\n    return 7", hard_coded=True),
    ],
    "speed_up": [
        Mutant("only the heaviest stages", "forgets that a pipeline fills", (("sum(stages) + (m - 1) * ", ""),)),
        Mutant("m for m - 1", "pays the sum already", (("(m - 1)", "m"),)),
        Mutant("upside down", "wrong way round", (("step(other) / step(sizes)", "step(sizes) / step(other)"),)),
        Mutant(
            "a layer that can be cut",
            "a layer cannot be cut",
            (("/ step(sizes)", "/ (2 * (sum(costs) - (m - 1) * (-sum(costs) // len(sizes))))"),),
        ),
        Mutant("m = 8 only", "speed_up", (("(m - 1)", "7"),), hard_coded=True),
        Mutant(
            "p = 4 only",
            "speed_up",
            (("range(len(sizes))", "range(4)"), ("strict=True", "strict=False")),
            hard_coded=True,
        ),
    ],
    "best_sizes": [
        Mutant("memory forgotten", "more than the room", ((" and sum(memory[start:stop]) <= room", ""),)),
        Mutant("a full rank does not fit", "there is a split that fits", (("<= room", "< room"),)),
        Mutant(
            "first the best cut, then a look at the memory",
            "there is a split that fits",
            (
                (" and sum(memory[start:stop]) <= room", ""),
                (
                    "    return best.get(len(costs), (0, None))[1]",
                    "    ends = [sum(best[len(costs)][1][:s]) for s in range(p + 1)]\n"
                    "    fits = all(sum(memory[a:b]) <= room for a, b in zip(ends, ends[1:]))\n"
                    "    return best[len(costs)][1] if fits else None",
                ),
            ),
        ),
        Mutant(
            "as many layers in each",
            "heaviest stage is",
            """
            def best_sizes(costs, memory, p, room):
                return [len(costs) // p + (stage < len(costs) % p) for stage in range(p)]
            """,
        ),
        Mutant(
            "may leave a stage empty",
            "every stage needs a",
            (("start < stop and", "start <= stop and"), ("range(stage, len(costs) + 1)", "range(len(costs) + 1)")),
            hard_coded=True,
        ),
        Mutant(
            "forgets the last layer",
            "layers, and there are",
            (("best.get(len(costs), (0, None))", "best.get(len(costs) - 1, (0, None))"),),
        ),
        Mutant("one stage too few", "should have 4 entries", (("range(1, p + 1)", "range(1, p)"),)),
        Mutant(
            "lightest instead of heaviest", "heaviest stage is", (("(max(best[start][0],", "(min(best[start][0],"),)
        ),
        Mutant(
            "the library's",
            "write the search yourself",
            "def best_sizes(costs, memory, p, room):\n    return list(pl.partition_layers(costs, p).sizes)",
        ),
        Mutant(
            "the examples' answers",
            "layers, and there are 7",
            """
            def best_sizes(costs, memory, p, room):
                if len(costs) == 3:
                    return None
                return [1, 4, 4, 1] if room > 3 else [2, 3, 3, 2]
            """,
            hard_coded=True,
        ),
    ],
    "sent_bytes": [
        Mutant("forward only", "to the right and a gradient", (("[0, *crossing]", "[0] * len(sizes)"),)),
        Mutant("backward only", "sends something", (("[*crossing, 0]", "[0] * len(sizes)"),)),
        Mutant("numbers for bytes", "four bytes", (("4 * batch", "batch"),)),
        Mutant("one sample", "for one sample", (("4 * batch", "4"),)),
        Mutant("what goes in, not what comes out", "too small", (("widths[end] for", "widths[end - 1] for"),)),
        Mutant(
            "a middle rank sends one",
            "to the right and a gradient",
            (("to_the_right + to_the_left for", "max(to_the_right, to_the_left) for"),),
        ),
        Mutant("all cuts alike", "too (small|large)", (("widths[end] for", "widths[ends[0]] for"),), hard_coded=True),
    ],
    "suffices": [
        Mutant("as printed", "so it counts", "suffices = suffices_as_printed"),
        Mutant(
            "the limit itself is too much", "exactly as heavy", (("filled + cost > limit", "filled + cost >= limit"),)
        ),
        Mutant("the first stage does not count", "so it counts", (("stages, filled = 1, 0", "stages, filled = 0, 0"),)),
        Mutant(
            "the new stage is empty",
            "is in that stage",
            (("0\n        filled = filled + cost", "0\n        else:\n            filled = filled + cost"),),
        ),
        Mutant(
            "a heavy layer passes",
            "fits nowhere",
            (("if cost > limit:", "if False:"), ("1, 0\n    for", "0, limit\n    for")),
        ),
        Mutant("exactly p stages", "Fewer stages than p|by hand", (("stages <= p", "stages == p"),), hard_coded=True),
        Mutant(
            "the total is enough",
            "by hand",
            "def suffices(costs, p, limit):\n    return max(costs) <= limit and sum(costs) <= p * limit",
            hard_coded=True,
        ),
    ],
}
