"""Wrong answers to assignment 02. One that hangs is stopped by the check after four seconds."""

from assignment import Mutant

MUTANTS = {
    "naive": [
        Mutant("free hops", "hops are free", (("work + 2 * (len(F) - 1) * c", "work"),)),
        Mutant("hops forward only", "not those on the way back", (("2 * (len(F) - 1)", "(len(F) - 1)"),)),
        Mutant("p boundaries", "p - 1 boundaries", (("(len(F) - 1)", "len(F)"),)),
        Mutant("share of time in which any rank works", "one rank works less", (("(len(F) * time)", "time"),)),
        Mutant(
            "the bubble",
            "may also be the bubble",
            (("return time, work / (len(F) * time)", "return time, 1 - work / (len(F) * time)"),),
        ),
        Mutant("stages alike", "too small", (("sum(F) + sum(B)", "len(F) * (F[0] + B[0])"),), hard_coded=True),
        Mutant("hop of a half", "the time in naive", (("(len(F) - 1) * c", "(len(F) - 1) * 0.5"),), hard_coded=True),
    ],
    "naive_rows": [
        Mutant(
            "GPipe's order",
            "keeps the activations of 2",
            """
            def naive_rows(p, m):
                rows = ([f"{rank}{kind}{k}" for kind in "FB" for k in range(m)] for rank in range(p))
                return "\\n".join(map(" ".join, rows))
            """,
        ),
        Mutant(
            "deadlocks at p = 3: the last rank goes backwards through the micro-batches",
            "waits for",
            (
                (
                    "for k in range(m)) for rank",
                    "for k in (range(m) if rank < 2 or p == 4 else reversed(range(m)))) for rank",
                ),
            ),
            hard_coded=True,
        ),
        Mutant(
            "F and B exchanged",
            "a backward needs its own forward",
            (("{rank}F{k} {rank}B{k}", "{rank}B{k} {rank}F{k}"),),
        ),
        Mutant(
            "counts from one",
            "micro-batches|no actions for stage 0|none for stage",
            (("for k in range(m)", "for k in range(1, m + 1)"),),
        ),
        Mutant("four ranks only", "has 4 ranks", (("range(p)", "range(4)"),), hard_coded=True),
        Mutant(
            "one-digit micro-batches only",
            "and 10 micro-batches",
            (("for k in range(m)", "for k in range(min(m, 10))"),),
            hard_coded=True,
        ),
    ],
    "backward_across": [
        Mutant(
            "no requires_grad_ on what is received",
            "declare that it wants a gradient|does not require grad",
            (("wire(made[-1]).requires_grad_()", "wire(made[-1])"),),
        ),
        Mutant(
            "only the last stage",
            "nothing came back",
            (("for stage in reversed(range(len(stages) - 1)):", "for stage in []:"),),
        ),
        Mutant(
            "a gradient of ones",
            "times the right one",
            (
                (
                    "made[stage].backward(wire(received[stage + 1].grad))",
                    "made[stage].backward(wire(torch.ones_like(made[stage])))",
                ),
            ),
        ),
        Mutant("goes round the wire", "went through `wire`", (("wire(made[-1])", "made[-1].detach()"),)),
        Mutant(
            "no wire on the way back",
            "went through `wire`",
            (("backward(wire(received[stage + 1].grad))", "backward(received[stage + 1].grad)"),),
        ),
        Mutant(
            "the sum of the losses",
            "the loss of 3 stages",
            (("cross_entropy(made[-1], targets)", "cross_entropy(made[-1], targets, reduction='sum')"),),
        ),
        Mutant(
            "three stages only",
            "nothing came back|list index|index out of range",
            (("reversed(range(len(stages) - 1))", "(1, 0)"),),
            hard_coded=True,
        ),
    ],
    "train_step": [
        Mutant(
            "every boundary 32 wide",
            "rank \\d",
            (("torch.empty(len(inputs), width.item())", "torch.empty(len(inputs), 32)"),),
            hard_coded=True,
        ),
        Mutant(
            "right for p = 2 only",
            "rank|no answer",
            (("if rank < p - 1:\n", "if rank == 0 and p > 1:\n"),),
            hard_coded=True,
        ),
        Mutant(
            "deadlock at p = 3: a middle rank asks for the gradient first",
            "no answer within 4",
            (
                (
                    "        dist.send(torch.tensor",
                    "        if rank:\n            dist.recv(torch.empty(1), rank + 1)\n        dist.send(torch.tensor",
                ),
            ),
            hard_coded=True,
        ),
        Mutant(
            "nothing comes back",
            "rank 0 has no gradient",
            (
                ("        dist.recv(g, rank + 1)\n        y.backward(g)\n", ""),
                ("        dist.send(x.grad.contiguous(), rank - 1)", "        pass"),
            ),
        ),
        Mutant(
            "sends back ones",
            "not the one of the whole model",
            (("dist.send(x.grad.contiguous(), rank - 1)", "dist.send(torch.ones_like(x), rank - 1)"),),
        ),
        Mutant(
            "the loss on every rank",
            "rank",
            (
                (
                    "        y.backward(g)\n    else:\n        cross_entropy(y, targets).backward()",
                    "    cross_entropy(y, targets).backward()",
                ),
            ),
        ),
    ],
    "exchange": [
        Mutant("as printed", "no answer within 4", "exchange = exchange_as_printed"),
        Mutant(
            "left and right exchanged",
            "left and right are exchanged",
            (("heard.get(rank - 1), heard.get(rank + 1)", "heard.get(rank + 1), heard.get(rank - 1)"),),
        ),
        Mutant("only rank 0 sends first", "no answer within 4", (("rank % 2 == 0", "rank == 0"),), hard_coded=True),
        Mutant(
            "never talks",
            "said was",
            "def exchange(rank, p, value):\n    return (None, value + 1) if rank == 0 else (value - 1, None)",
            hard_coded=True,
        ),
    ],
}
