"""Wrong answers to assignment 12."""

from assignment import Mutant

FITS = "min(m, p) * samples // m <= room"
SHARE = "interval / (failures * (between + restart))"
FACTOR = "* len(targets) / samples"

MUTANTS = {
    "culprit": [
        Mutant(
            "whoever waits most",
            "waiting alone is no fault|only wait|arrived - sent",
            """
            def culprit(trace):
                idlest = max(range(trace.num_ranks), key=trace.idle)
                return f"stage {idlest}"
            """,
        ),
        Mutant("the fastest stage", "far longer", (("max(backward, key", "min(backward, key"),)),
        Mutant("a slow one wherever there is a slowest", "nothing is slow|arrived", (("> 1.5 *", ">= 1.0 *"),)),
        Mutant("every message is slow", "nothing is slow", (("hop > forward / 2", "hop > 0"),)),
        Mutant(
            "hops in the costs' unit",
            "nothing is slow|arrived - sent",
            (("hop > forward / 2", "hop > 0.5"),),
            hard_coded=True,
        ),
        Mutant(
            "slower than the last one",
            "far longer|nothing is slow",
            (("1.5 * median(backward.values())", "1.5 * backward[max(backward)]"),),
            hard_coded=True,
        ),
        Mutant(
            "the link first",
            "far longer",
            (("if backward[slowest] > 1.5", "if len(backward) < 5 and backward[slowest] > 1.5"),),
            hard_coded=True,
        ),
    ],
    "csv": [
        Mutant(
            "in the order of the list",
            "another order",
            (("sorted(trace.spans, key=lambda span: span.start)", "trace.spans"),),
        ),
        Mutant(
            "a line a micro-batch",
            "lines for|another order|no action",
            (("lines[span.rank]", "lines[span.action.microbatch % len(lines)]"),),
        ),
        Mutant("all in one line", "lines for", (('"\\n".join', '",".join'),)),
        Mutant("a line a stage", "IndexError", (("lines[span.rank]", "lines[span.action.stage]"),), hard_coded=True),
        Mutant("forwards twice", "recomputes by itself", (("not span.recompute and ", ""),), hard_coded=True),
        Mutant("with the updates", "has no action", ((" and span.action.kind is not pl.Kind.U", ""),), hard_coded=True),
        Mutant(
            "F and B alone",
            "actions are missing",
            (("is not pl.Kind.U", "in (pl.Kind.F, pl.Kind.B)"),),
            hard_coded=True,
        ),
    ],
    "mended": [
        Mutant("as found", "divide by what", "gradients = gradients_as_found"),
        Mutant("a sum of means", "divide by what", ((FACTOR, ""),)),
        Mutant("divided twice", "divide by what", ((FACTOR, "/ len(micro_batches) ** 2"),)),
        Mutant("the last call's are still there", "still there", (("    model.zero_grad()\n", ""),)),
        Mutant("a mean of means", "may not count as much", ((FACTOR, "/ len(micro_batches)"),), hard_coded=True),
        Mutant(
            "by the first one's size",
            "times that of the batch",
            ((FACTOR, "* len(micro_batches[0][1]) / samples"),),
            hard_coded=True,
        ),
    ],
    "tuned": [
        Mutant(
            "the smallest bubble",
            "another m that fits is faster",
            (("key=lambda m: (m + p - 1) * (T / m + o)", "key=lambda m: -m"),),
        ),
        Mutant(
            "the root, rounded",
            "does not divide|would keep|is faster",
            "def tuned(p, T, o, samples, room):\n    return round(((p - 1) * T / o) ** 0.5)",
        ),
        Mutant("memory does not matter", "would keep", ((f" and {FITS}", ""),)),
        Mutant("GPipe's memory", "does that fit", ((FITS, "samples <= room"),)),
        Mutant(
            "a power of two",
            "is faster",
            (("samples % m == 0", "samples % m == 0 and m & (m - 1) == 0"),),
            hard_coded=True,
        ),
        Mutant("an error where nothing fits", "ValueError|max|min", ((", default=None", ""),), hard_coded=True),
        Mutant(
            "p micro-batches even where there are fewer",
            "does that fit|is faster",
            ((FITS, "p * samples // m <= room"),),
            hard_coded=True,
        ),
    ],
    "useful": [
        Mutant("first order", "exact share", ((SHARE, "1 - write / interval - (interval / 2 + restart) / between"),)),
        Mutant("restarts take no time", "Restarts take time", ((SHARE, "interval / (failures * between)"),)),
        Mutant("writes never fail", "during a write", (("(interval + write) / between", "interval / between"),)),
        Mutant("writing counts", "not training", ((SHARE, "(interval + write) / (failures * (between + restart))"),)),
        Mutant("one GPU", "single GPU", (("gpu_hours / gpus", "gpu_hours"),)),
        Mutant("the chapter's rate", "too", (("gpu_hours / gpus", "50_000 / 10_000"),), hard_coded=True),
        Mutant("an hour's restart", "too", (("between + restart", "between + 1.0"),), hard_coded=True),
    ],
}
