"""Wrong answers to assignment 11."""

from assignment import Mutant

TWO = "max(k // m - 1, 0)"
EDGE = "2 * sin(pi / (2 * (2 * d + 1))) / curvature"
STORED = "self.held[self.newest] = weight.detach().clone()"

MUTANTS = {
    "version": [
        Mutant("2BW with the newest", "not made before", ((TWO, "k // m"),)),
        Mutant("micro-batches from 1", "first version is 0|count from 0", ((TWO, "max((k - 1) // m - 1, 0)"),)),
        Mutant("negative versions", "first version is 0", (("max(k - (p - 1 - rank), 0)", "k - (p - 1 - rank)"),)),
        Mutant(
            "vertical sync by its own rank", "rank 0 used", (("max(k - (p - 1), 0)", "max(k - (p - 1 - rank), 0)"),)
        ),
        Mutant("stashing by rank 0", "too small", (("max(k - (p - 1 - rank), 0)", "max(k - (p - 1), 0)"),)),
        Mutant("ranks from the other end", "not made before", (("(p - 1 - rank)", "rank"),)),
        Mutant("groups of p", "not made before|too", ((TWO, "max(k // p - 1, 0)"),), hard_coded=True),
        Mutant("in floating point", "whole numbers", ((TWO, "max(int(k / m) - 1, 0)"),), hard_coded=True),
    ],
    "weigh": [
        Mutant("stashing alike on all ranks", "same version", (("[p - rank for rank in range(p)]", "[p] * p"),)),
        Mutant(
            "vertical sync as stashing",
            "however old",
            (('"vertical_sync": [p] * p', '"vertical_sync": [p - r for r in range(p)]'),),
        ),
        Mutant("from the other end", "most micro-batches in flight", (("p - rank for", "rank + 1 for"),)),
        Mutant("without the newest", "newest version", (("[2] * p", "[1] * p"),)),
        Mutant("versions in place of GB", "asked are GB", (("count * size", "count"),)),
        Mutant(
            "four ranks",
            "too|same version|however old",
            (("[p - rank for rank", "[4 - rank for rank"),),
            hard_coded=True,
        ),
        Mutant(
            "four versions", "too|newest", (('"vertical_sync": [p] * p', '"vertical_sync": [4] * p'),), hard_coded=True
        ),
    ],
    "kept": [
        Mutant("nothing is dropped", "nobody uses", (("n == newest or uses[n]", "True"),)),
        Mutant("the newest alone", "a later action uses", ((" or uses[n]", ""),)),
        Mutant("the newest may go", "the newest", (("n == newest or uses[n]", "uses[n]"),)),
        Mutant(
            "before the action",
            "nobody uses|the newest|a later",
            (("            uses[met[action]] -= 1", "            uses[met[action]] -= 0"),),
        ),
        Mutant(
            "backwards do not count",
            "a later action uses",
            (
                ("action.kind is not pl.Kind.U)", "action.kind is pl.Kind.F)"),
                ("        else:", "        elif action.kind is pl.Kind.F:"),
            ),
        ),
        Mutant(
            "whatever the rule, as under stashing",
            "nobody uses|a later action uses",
            """
            def kept(order, met):
                made, used = 0, {}
                for action in order:
                    made += action.kind is pl.Kind.U
                    if action.kind is pl.Kind.F:
                        used[action.microbatch] = made
                uses = Counter(used[action.microbatch] for action in order if action.kind is not pl.Kind.U)
                newest, held = 0, []
                for action in order:
                    if action.kind is pl.Kind.U:
                        newest += 1
                    else:
                        uses[used[action.microbatch]] -= 1
                    held.append([n for n in range(newest + 1) if n == newest or uses[n]])
                return held
            """,
            hard_coded=True,
        ),
    ],
    "mended": [
        Mutant("as printed", "either 0 counts", "Versions = VersionsAsPrinted"),
        Mutant("0 is nothing", "either 0 counts", (("self.newest if n is None else n", "n if n else self.newest"),)),
        Mutant("the live tensor", "changed by a later update", ((STORED, "self.held[self.newest] = weight.detach()"),)),
        Mutant("with its graph", "hangs on a graph", ((STORED, "self.held[self.newest] = weight.clone()"),)),
        Mutant(
            "version 0 with its graph", "version 0 hangs", (("{0: weight.detach().clone()}", "{0: weight.clone()}"),)
        ),
        Mutant("one too many is dropped", "KeyError: 1", (("number >= n", "number > n"),)),
        Mutant("nothing is dropped", "are still needed", (("number >= n", "True"),)),
        Mutant(
            "a list that is cut once",
            "another version|IndexError|not the newest|changed",
            """
            class Versions:
                def __init__(self, weight):
                    self.held, self.first = [weight.detach().clone()], 0

                def store(self, weight):
                    self.held.append(weight.detach().clone())

                def get(self, n=None):
                    return self.held[-1 if n is None else n - self.first]

                def drop_before(self, n):
                    self.held, self.first = self.held[n:], n

                def __len__(self):
                    return len(self.held)
            """,
            hard_coded=True,
        ),
    ],
    "step": [
        Mutant("without delay", "without delay", ((EDGE, "2 / curvature"),)),
        Mutant("2/(d + 1)", "too bold", ((EDGE, "2 / (d + 1) / curvature"),)),
        Mutant("1/(d + 1)", "step of 2/λ", ((EDGE, "1 / (d + 1) / curvature"),)),
        Mutant("the boldest stage", "too large", (("return min(", "return max("),)),
        Mutant("for long delays", "too large", ((EDGE, "pi / (2 * d + 1) / curvature"),)),
        Mutant(
            "the steepest with the latest",
            "too small",
            "def largest_step(stages):\n    steepest, latest = map(max, zip(*stages))\n"
            "    return 2 * sin(pi / (2 * (2 * latest + 1))) / steepest",
            hard_coded=True,
        ),
        Mutant(
            "the latest stage decides",
            "too large",
            "def largest_step(stages):\n    curvature, d = max(stages, key=lambda stage: stage[1])\n"
            "    return 2 * sin(pi / (2 * (2 * d + 1))) / curvature",
            hard_coded=True,
        ),
    ],
}
