"""Wrong answers to assignment 10."""

from assignment import Mutant

LAST = "part + b if rank == 0 else part"

MUTANTS = {
    "slices": [
        Mutant("every rank adds the bias", "in the sum 2 times", ((LAST, "part + b"),)),
        Mutant("nobody adds the bias", "not in the sum", ((LAST, "part"),)),
        Mutant("without the first bias", "first bias is missing", ((" + a[mine]", ""),)),
        Mutant("the last rank adds it", "its own share", (("rank == 0", "rank == tp - 1"),)),
        Mutant(
            "rows of A first",
            "gelu of parts",
            """
            def slices(x, A, a, B, b, tp):
                pairs = zip(x.chunk(tp, 1), A.chunk(tp, 0), strict=True)
                parts = [gelu(x_r @ A_r + a / tp) @ B for x_r, A_r in pairs]
                return [part + b if rank == 0 else part for rank, part in enumerate(parts)]
            """,
        ),
        Mutant(
            "everything on rank 0",
            "its own share",
            """
            def slices(x, A, a, B, b, tp):
                y = gelu(x @ A + a) @ B + b
                return [y] + [torch.zeros_like(y)] * (tp - 1)
            """,
        ),
        Mutant(
            "everything on every rank",
            "do not add up|in the sum",
            "def slices(x, A, a, B, b, tp):\n    return [gelu(x @ A + a) @ B + b] * tp",
        ),
        Mutant(
            "two ranks only",
            "a part for each rank|its own share|not add up",
            (("A.shape[1] // tp", "A.shape[1] // 2"),),
            hard_coded=True,
        ),
    ],
    "traffic": [
        Mutant("the whole model's gradients", "whole model", (("n / (pp * tp)", "n"),)),
        Mutant("whole layers' gradients", "slices of its layers", (("n / (pp * tp)", "n / pp"),)),
        Mutant("half a ring", "does not hand round", (("2 * (size - 1)", "(size - 1)"),)),
        Mutant("one direction", "one direction", (("2 * m * tensor", "m * tensor"),)),
        Mutant("all layers", "those of its stage", (("layers / pp", "layers"),)),
        Mutant("forward only", "count forward and backward", (("tensor * 4 * m", "tensor * 2 * m"),)),
        Mutant("one micro-batch", "one micro-batch", (("4 * m * layers", "4 * layers"),)),
        Mutant(
            "a pipeline of one rank",
            "Without a pipeline",
            (("2 * m * tensor if pp > 1 else 0", "2 * m * tensor"),),
            hard_coded=True,
        ),
        Mutant("a ring of two", "'tp'", (("ring(tp)", "(tp - 1)"),), hard_coded=True),
    ],
    "layout": [
        Mutant("the order from the wrong end", "wrong end", (("reversed(order)", "order"),)),
        Mutant("neighbours whatever the axis", "wrong end|more than", (("stride = total", "stride = 1"),)),
        Mutant(
            "ranks instead of groups", "number of ranks", (("sum(len(", "sum(sizes[axis] * (len("), (") > 1", ") > 1)"))
        ),
        Mutant("one node at most", "of the groups cross", (("}) > 1", "}) > 0"),)),
        Mutant("wires inside", "of the groups cross", (("}) > 1", "}) == 1"),)),
        Mutant("from the last group on", "their order is not", (("return groups,", "return groups[::-1],"),)),
        Mutant(
            "Megatron's order, whatever is asked",
            "begins with|wrong end|order is not",
            (("reversed(order)", 'reversed(("pp", "dp", "tp"))'),),
            hard_coded=True,
        ),
    ],
    "accounts": [
        Mutant("as printed", "forgets the slices", "accounts = accounts_as_printed"),
        Mutant("without the stages", "forgets the stages", (("dp = gpus // (tp * pp)", "dp = gpus // tp"),)),
        Mutant("without the replicas", "forgets the replicas", (("m = batch // (dp * b)", "m = batch // b"),)),
        Mutant(
            "stages share samples", "Stages share layers", (("m = batch // (dp * b)", "m = batch // (dp * pp * b)"),)
        ),
        Mutant("the other denominator", "share of the ideal time", (("(m + pp - 1)", "m"),)),
        Mutant(
            "the rate follows the replicas", "follows the replicas", (("rate * batch / batch_before", "rate * dp"),)
        ),
        Mutant("the rate stays", "batch has changed", (("rate * batch / batch_before", "rate"),)),
        Mutant(
            "rounds down in silence",
            "raise ValueError",
            (("if gpus % (tp * pp) or batch % (gpus // (tp * pp) * b):", "if gpus < 1:"),),
            hard_coded=True,
        ),
        Mutant(
            "four stages only",
            "'bubble'",
            (("(pp - 1) / (m + pp - 1)", "3 / (m + 3)"),),
            hard_coded=True,
        ),
    ],
    "shortest": [
        Mutant("keeps one micro-batch", "would need", (("min(m, pp) * kept", "kept"),)),
        Mutant("keeps all, as GPipe", "shorter pipeline fits|something fits", (("min(m, pp)", "m"),)),
        Mutant("nothing is sharded", "shorter pipeline fits", (("(dp if shard else 1)", "1"),)),
        Mutant("everything is sharded", "would need", (("(4 + 12 / (dp if shard else 1))", "16 / dp"),)),
        Mutant("tp shares nothing", "shorter pipeline fits|something fits", (("kept / (pp * tp)", "kept / pp"),)),
        Mutant("weights forgotten", "would need", (("(4 + 12 /", "(12 /"),)),
        Mutant("the longest", "shorter pipeline fits", (("range(1, gpus // tp + 1)", "range(gpus // tp, 0, -1)"),)),
        Mutant("any length", "no whole number", (("gpus % (tp * pp)", "False"),)),
        Mutant("always as many as stages", "shorter|something fits", (("min(m, pp)", "pp"),), hard_coded=True),
    ],
}
