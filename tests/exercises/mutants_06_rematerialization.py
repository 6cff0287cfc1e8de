"""Wrong answers to assignment 06."""

from assignment import Mutant

MUTANTS = {
    "kept_bytes": [
        Mutant(
            "every call counts",
            "kept twice",
            (
                ("sizes = {storage.data_ptr(): storage.nbytes()", "sizes = {k: storage.nbytes()"),
                ("for storage in storages}", "for k, storage in enumerate(storages)}"),
            ),
        ),
        Mutant(
            "weights counted",
            "The weights are in it",
            ((" - sum(sizes.get(weight.data_ptr(), 0) for weight in weights)", ""),),
        ),
        Mutant(
            "numbers for bytes",
            "a number has 4 bytes",
            ((": storage.nbytes()", ": storage.nbytes() // 4"),),
        ),
        Mutant(
            "nobody holds the result", "The graph goes", (("result = function(x)", "function(x)"), ("del result", ""))
        ),
        Mutant("without the input", "Does x count", (("for weight in weights)", "for weight in [x, *weights])"),)),
        Mutant(
            "the view, not what it keeps",
            "keeps the whole",
            (
                (
                    "sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}",
                    "sizes = {box.tensor.untyped_storage().data_ptr(): box.tensor.nbytes for box in boxes}",
                ),
            ),
            hard_coded=True,
        ),
        Mutant(
            "holds what has been let go",
            "let go before",
            (("boxes = WeakSet()", "boxes = set()"),),
            hard_coded=True,
        ),
        Mutant(
            "every number has 4 bytes",
            "a number of 8 bytes",
            (
                (
                    "sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}",
                    "sizes = {box.tensor.untyped_storage().data_ptr(): box.tensor._base.numel() * 4 "
                    "if box.tensor._base is not None else box.tensor.numel() * 4 for box in boxes}",
                ),
            ),
            hard_coded=True,
        ),
    ],
    "best_segments": [
        Mutant("sqrt(n)", "for one micro-batch", (("min(kept, key=kept.get)", "round(n**0.5)"),)),
        Mutant("one segment", "keep 20 units", (("min(kept, key=kept.get)", "1"),)),
        Mutant(
            "one micro-batch's inputs",
            "and not only one",
            (("m * s + -(-n // s)", "s + -(-n // s)"),),
        ),
        Mutant("inputs alone", "inside of the segment", (("m * s + -(-n // s)", "m * s"),)),
        Mutant("insides of all", "goes backward at a time", (("-(-n // s)", "m * -(-n // s)"),)),
        Mutant(
            "as small as can be",
            "one segment has its inside|fewer",
            (("kept[best]", "m * best + n"),),
        ),
        Mutant(
            "the root, rounded",
            "keeps fewer|keep fewer|smaller number",
            (("min(kept, key=kept.get)", "max(1, round((n / m) ** 0.5))"),),
            hard_coded=True,
        ),
        Mutant(
            "small segments for the largest", "largest segment has more", (("-(-n // s)", "n // s"),), hard_coded=True
        ),
        Mutant("layers cut", "cannot be cut", (("-(-n // s)", "n / s"),), hard_coded=True),
        Mutant(
            "divisors only",
            "keeps fewer",
            (("for s in range(1, n + 1)}", "for s in range(1, n + 1) if n % s == 0}"),),
            hard_coded=True,
        ),
    ],
    "again": [
        Mutant("as printed", "did the second forward draw", "again = again_as_printed"),
        Mutant("no remat", "what is recomputed", "def again(segment, x):\n    return segment(x)"),
        Mutant(
            "torch's checkpoint",
            "has moved",
            """
            from torch.utils.checkpoint import checkpoint


            def again(segment, x):
                return checkpoint(segment, x, use_reentrant=False)
            """,
        ),
        Mutant(
            "one seed for all",
            "did the second forward draw",
            (
                ("random = torch.get_rng_state()", "torch.manual_seed(0)"),
                ("torch.set_rng_state(random)", "torch.manual_seed(0)"),
            ),
        ),
        Mutant(
            "the state put back, and left there",
            "where does the stream go on|did the second forward draw",
            (("with torch.random.fork_rng(devices=[]), torch.enable_grad():", "with torch.enable_grad():"),),
        ),
        Mutant(
            "only the random numbers mended",
            "has moved",
            (("                buffer.copy_(value)\n", "                pass\n"),),
        ),
        Mutant(
            "evaluation the second time",
            "did the second forward draw",
            (("y = segment(x)", "y = segment.eval()(x)"),),
        ),
        Mutant(
            "statistics put back, the count forgotten",
            "has moved .*num_batches_tracked",
            (("segment.buffers()]", "segment.buffers() if buffer.dim()]"), ("before, strict=True", "before")),
        ),
        Mutant(
            "one state for all micro-batches",
            "did the second forward draw",
            (("random = ", "segment.random = "), ("set_rng_state(random)", "set_rng_state(segment.random)")),
            hard_coded=True,
        ),
        Mutant(
            "statistics as they were after the forward",
            "has moved",
            (
                (
                    "            return segment(x)",
                    "            y = segment(x)\n"
                    "            ctx.after = [buffer.clone() for buffer in segment.buffers()]\n"
                    "            return y",
                ),
                ("before = [buffer.clone() for buffer in segment.buffers()]", "before = ctx.after"),
            ),
            hard_coded=True,
        ),
    ],
    "steps": [
        Mutant(
            "late for early",
            "That is late",
            (("(p - 1) * (F + B) + hops,\n    }", "(p - 1) * (2 * F + B) + hops,\n    }"),),
        ),
        Mutant(
            "all hidden",
            "never waits can hide none",
            (("m * (2 * F + B) + (p - 1) * (F + B)", "m * (F + B) + (p - 1) * (2 * F + B)"),),
        ),
        Mutant(
            "one hidden",
            "hides one second forward",
            (("m * (2 * F + B) + (p - 1) * (F + B)", "m * (2 * F + B) + (p - 1) * (2 * F + B) - F"),),
        ),
        Mutant(
            "the last rank hides too",
            "The last rank cannot",
            (("m * (2 * F + B) + (p - 1) * (F + B)", "(m - 1) * (2 * F + B) + p * (F + B)"),),
        ),
        Mutant(
            "remat is free",
            "That is the step without remat",
            (("m * (2 * F + B) + (p - 1) * (F + B)", "(m + p - 1) * (F + B)"),),
        ),
        Mutant("no draining", "without filling", (("(m + p - 1) * (F + B) +", "m * (F + B) +"),)),
        Mutant("free hops", "hops are free", (("2 * (p - 1) * c", "0"),)),
        Mutant("hops one way", "there and back", (("2 * (p - 1) * c", "(p - 1) * c"),)),
        Mutant("p boundaries", "p - 1 boundaries", (("2 * (p - 1) * c", "2 * p * c"),)),
        Mutant("F:B = 1:2 only", "too (large|small)|That is", (("(2 * F + B)", "4 * F"),), hard_coded=True),
        Mutant(
            "four ranks only", "too (large|small)|That is", (("(p - 1) * (F + B)", "3 * (F + B)"),), hard_coded=True
        ),
    ],
    "deepest": [
        Mutant("one micro-batch", "m micro-batches in flight", (("m * n,", "n,"), ("m + n,", "1 + n,"))),
        Mutant("without the weights", "weights need room", (("state * (n + 1) + ", ""),)),
        Mutant("all weights on every rank", "own layers alone", (("state * (n + 1)", "p * state * (n + 1)"),)),
        Mutant("for one rank", "asked is the whole model", (("p * n", "n"),)),
        Mutant("one too many", "more than fits", (("found[how] = p * n", "found[how] = p * (n + 1)"),)),
        Mutant("inputs alone", "inside of the segment", (("m + n,", "m,"),)),
        Mutant(
            "one segment for the best",
            "That is one segment a stage",
            (("min(m * s + -(-n // s) for s in range(1, n + 1))", "m + n"),),
        ),
        Mutant(
            "sqrt(n) segments",
            "with m micro-batches fewer|too (large|small)|would fit",
            (("min(m * s + -(-n // s) for s in range(1, n + 1))", "m * round(n**0.5) + -(-n // round(n**0.5))"),),
        ),
        Mutant(
            "one layer always fits",
            "not even one layer",
            (("        n = 0\n", "        n = 1\n"),),
            hard_coded=True,
        ),
        Mutant(
            "four micro-batches only",
            "not even one layer",
            (("m * n,", "4 * n,"),),
            hard_coded=True,
        ),
    ],
}
