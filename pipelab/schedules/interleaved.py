"""Interleaved 1F1B: several stages a rank, so that filling and draining takes shorter steps."""

from __future__ import annotations

from pipelab.action import Action, Kind
from pipelab.errors import SizeError, positive_integer
from pipelab.schedule import Schedule


def interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Give each rank several stages, p apart, and run 1F1B over them: p micro-batches through one stage, then the next.

    Narayanan et al. 2021 (arXiv 2104.04473), section 2.2.2, in the order of their Megatron-LM: depth-first, so a group
    of p micro-batches goes through all stages before the next group comes. Stage s is on rank s % p.
    With several stages a rank, the number of micro-batches must be a multiple of the number of ranks, so at least as
    many; with one stage a rank this is 1F1B, and any number will do. Raises SizeError, with the nearest legal number.
    Makespan (m + (p - 1) / v)(F + B) with equal stages, F and B of a whole rank; with m > p, rank 0 keeps
    p + (p - 1) / v micro-batches (Korthikanti et al. 2022, arXiv 2205.05198).
    """
    p = positive_integer("num_ranks", num_ranks)
    m = positive_integer("num_microbatches", num_microbatches)
    v = positive_integer("stages_per_rank", stages_per_rank)
    if v > 1 and m % p:
        nearest = max(p, p * round(m / p))
        raise SizeError(
            f"interleaved needs a multiple of its {p} ranks as num_microbatches (they go round in groups of {p}), "
            f"got {m}; the nearest is {nearest}"
        )
    return Schedule("interleaved", tuple(tuple(_order(rank, p, m, v)) for rank in range(p)), tuple(range(p)) * v, m)


def _order(rank: int, p: int, m: int, v: int) -> list[Action]:
    def nth(kind: Kind, n: int) -> Action:
        group, place = divmod(n, p * v)  # a group is p micro-batches on v stages
        turn, k = divmod(place, p)
        stage = (turn if kind is Kind.F else v - 1 - turn) * p + rank
        return Action(stage, kind, group * p + k)

    total = m * v
    # v > 1: the first backward comes after v - 1 rounds, p - 1 - rank steps down to the last rank and as many back
    warmup = min(total, p - 1 - rank if v == 1 else (v - 1) * p + 2 * (p - 1 - rank))
    order = [nth(Kind.F, n) for n in range(warmup)]
    for n in range(total - warmup):  # steady: one forward, one backward
        order += [nth(Kind.F, warmup + n), nth(Kind.B, n)]
    return order + [nth(Kind.B, n) for n in range(total - warmup, total)]  # cooldown
