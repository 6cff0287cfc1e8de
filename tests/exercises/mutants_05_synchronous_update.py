"""Wrong answers to assignment 05."""

from assignment import Mutant

MUTANTS = {
    "factors": [
        Mutant("mean of means", "the mean of means", (("replicas * n / samples", "1 / len(row)"),)),
        Mutant("sum of the means", "the sum of the means", (("replicas * n / samples", "1"),)),
        Mutant("undivided", "Nothing is divided", (("replicas * n / samples", "n"),)),
        Mutant(
            "double scaling",
            "so twice",
            (("replicas * n / samples", "replicas * n / samples / len(row)"),),
        ),
        Mutant("averaged means twice divided", "divides once more", (("len(sizes) if averaged else 1", "1"),)),
        Mutant("always times the replicas", "not averaged", (("len(sizes) if averaged else 1", "len(sizes)"),)),
        Mutant(
            "replicas like micro-batches",
            "who multiplies",
            (("len(sizes) if averaged else 1", "1 if averaged else 1 / len(sizes)"),),
        ),
        Mutant(
            "share of its own replica", "of its own replica|not averaged", (("replicas * n / samples", "n / sum(row)"),)
        ),
        Mutant(
            "replicas of equal size",
            "of its own replica|too (large|small)",
            (("replicas * n / samples", "replicas / len(sizes) * n / sum(row)"),),
            hard_coded=True,
        ),
    ],
    "accumulate": [
        Mutant(
            "mean of means",
            "mean of the parts' means",
            (('y.flatten(), reduction="sum") / count', "y.flatten()) / m"),),
        ),
        Mutant(
            "weighted by samples",
            "by its samples; their tokens",
            (('y.flatten(), reduction="sum") / count', "y.flatten()) * len(x) / len(inputs)"),),
        ),
        Mutant(
            "sum of the means",
            "sum of the parts' means",
            (('y.flatten(), reduction="sum") / count', "y.flatten())"),),
        ),
        Mutant("divided twice", "once too often", (("/ count", "/ count / m"),)),
        Mutant("not divided", "not divided by the number of tokens", ((" / count", ""),)),
        Mutant(
            "padding counts as tokens",
            "Padding counts",
            (("(targets != -100).sum()", "targets.numel()"),),
        ),
        Mutant(
            "all at once",
            "saw 10 samples at once",
            (("inputs.tensor_split(m), targets.tensor_split(m)", "[inputs], [targets]"),),
        ),
        Mutant(
            "one backward at the end",
            "graph of an earlier micro-batch",
            (
                ("        loss.backward()\n        total += loss.item()\n", "        total = total + loss\n"),
                ("    return total", "    total.backward()\n    return total.item()"),
            ),
        ),
        Mutant(
            "mean of the losses",
            "That is the loss of the last part|too (large|small)",
            (("total += loss.item()", "total = loss.item()"),),
        ),
        Mutant(
            "empty parts not thought of",
            "0/0|not a number",
            (
                (
                    'y.flatten(), reduction="sum") / count',
                    "y.flatten()) * (y != -100).sum() / count",
                ),
            ),
            hard_coded=True,
        ),
        Mutant("never emptied", "what stood in", (("    model.zero_grad()\n", ""),), hard_coded=True),
    ],
    "clipped": [
        Mutant("each by its own norm", "this rank's own norm", (("    dist.all_reduce(squares)\n", ""),)),
        Mutant(
            "norms added up",
            "do not add",
            (
                ("    dist.all_reduce(squares)\n", "    squares = squares.sqrt()\n    dist.all_reduce(squares)\n"),
                ("squares.sqrt().item()", "squares.item()"),
            ),
        ),
        Mutant(
            "the longest rank decides",
            "the longest of the ranks",
            (("dist.all_reduce(squares)", "dist.all_reduce(squares, dist.ReduceOp.MAX)"),),
        ),
        Mutant("averaged over ranks", "averaged over the ranks", (("squares.sqrt()", "(squares / 3).sqrt()"),)),
        Mutant("no root", "That is its square", (("squares.sqrt()", "squares"),)),
        Mutant(
            "one norm, and nothing cut",
            "the gradients are not clipped",
            (("factor = max_norm / norm if norm > max_norm else 1", "factor = 1"),),
        ),
        Mutant(
            "cut to the root of a share",
            "wrong gradients",
            (("max_norm / norm if", "(max_norm / norm) ** 0.5 if"),),
        ),
        Mutant(
            "always to max_norm",
            "made longer",
            (("max_norm / norm if norm > max_norm else 1", "max_norm / norm"),),
            hard_coded=True,
        ),
        Mutant(
            "only the rank that sees it stops",
            "this rank must not update either",
            (
                ("if not 0 <= norm", "if not all(g.isfinite().all() for g in gradients)"),
                (' < float("inf"):', ":"),
            ),
            hard_coded=True,
        ),
        Mutant(
            "infinity is long, nothing more",
            "must not update either",
            (('if not 0 <= norm < float("inf")', "if norm != norm"),),
            hard_coded=True,
        ),
        Mutant(
            "a rank without parameters stays away",
            "gave no answer within",
            (("    squares = ", "    if not gradients:\n        return [], 0.0\n    squares = "),),
            hard_coded=True,
        ),
    ],
    "deferred": [
        Mutant(
            "an update for every micro-batch",
            "an update for every micro-batch",
            """
            def deferred(microbatches, running_mean, running_var, momentum):
                mean, variance = running_mean.clone(), running_var.clone()
                for x in microbatches:
                    nn.functional.batch_norm(x, mean, variance, training=True, momentum=momentum)
                return mean, variance
            """,
        ),
        Mutant(
            "mean of means and of variances",
            "mean of the parts' means",
            """
            def deferred(microbatches, running_mean, running_var, momentum):
                means, variances = [], []
                for x in microbatches:
                    values = x.transpose(0, 1).flatten(1)
                    means.append(values.mean(1))
                    variances.append(values.var(1))
                mean, variance = sum(means) / len(means), sum(variances) / len(variances)
                mean = (1 - momentum) * running_mean + momentum * mean
                return mean, (1 - momentum) * running_var + momentum * variance
            """,
        ),
        Mutant(
            "the means differ too",
            "because their means differ",
            ((" + difference**2 * (count * n / (count + n))", ""),),
        ),
        Mutant("biased", "not by one less", (("deviations / (count - 1)", "deviations / count"),)),
        Mutant(
            "old and new exchanged",
            "Old and new are exchanged",
            (
                ("(1 - momentum) * running_mean + momentum * mean", "momentum * running_mean + (1 - momentum) * mean"),
                (
                    "(1 - momentum) * running_var + momentum * variance",
                    "momentum * running_var + (1 - momentum) * variance",
                ),
            ),
        ),
        Mutant(
            "keeps all micro-batches",
            "has not been let go",
            (("    for x in microbatches:", "    for x in [torch.cat(list(microbatches))]:"),),
        ),
        Mutant(
            "in place",
            "return new tensors",
            (("    return ", "    running_mean.mul_(1 - momentum)\n    return "),),
        ),
        Mutant(
            "images counted by their samples",
            "running (mean|variance) of",
            (("values.shape[1], ", "len(x), "),),
            hard_coded=True,
        ),
        Mutant(
            "squares minus squared mean in 32 bits",
            "large squares subtracted",
            """
            def deferred(microbatches, running_mean, running_var, momentum):
                count, total, squares = 0, 0.0, 0.0
                for x in microbatches:
                    values = x.transpose(0, 1).flatten(1)
                    count, total = count + values.shape[1], total + values.sum(1)
                    squares = squares + values.square().sum(1)
                mean = total / count
                variance = (squares - count * mean**2) / (count - 1)
                mean = (1 - momentum) * running_mean + momentum * mean
                return mean, (1 - momentum) * running_var + momentum * variance
            """,
            hard_coded=True,
        ),
    ],
    "tied_gradients": [
        Mutant("as printed", "half of a mean of means|is not right", "tied_gradients = tied_gradients_as_printed"),
        Mutant(
            "averaged",
            "average of the copies",
            (("shared = embedding.grad + head.grad", "shared = (embedding.grad + head.grad) / 2"),),
        ),
        Mutant(
            "exchanged in the loop",
            "exchanged again",
            (
                ("        loss.backward()\n    shared", "        loss.backward()\n        shared"),
                ("    embedding.grad, head.grad =", "        embedding.grad, head.grad ="),
            ),
        ),
        Mutant(
            "in the loop and averaged",
            "average of the copies",
            (
                (
                    "        loss.backward()\n    shared = embedding.grad + head.grad",
                    "        loss.backward()\n        shared = (embedding.grad + head.grad) / 2",
                ),
                ("    embedding.grad, head.grad =", "        embedding.grad, head.grad ="),
            ),
        ),
        Mutant("mean of means", "mean of their means", (("* len(targets) / samples", "/ len(parts)"),)),
        Mutant(
            "nothing exchanged",
            "Only its own use",
            (("    embedding.grad, head.grad = shared.clone(), shared.clone()\n", ""),),
        ),
        Mutant(
            "counts the copies",
            "counts twice",
            (("[embedding, *body.parameters()]", "[embedding, *body.parameters(), head]"),),
        ),
        Mutant(
            "one tensor for both",
            "hold one gradient tensor",
            (("shared.clone(), shared.clone()", "shared, shared"),),
        ),
        Mutant(
            "three micro-batches at most",
            "of the body is wrong|is not right",
            (("    for tokens", "    parts = parts[:3]\n    for tokens"),),
            hard_coded=True,
        ),
    ],
}
