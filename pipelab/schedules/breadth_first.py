"""Looped breadth-first: several stages a rank, and all micro-batches through one before the next."""

from __future__ import annotations

from pipelab.action import Action, Kind
from pipelab.errors import positive_integer
from pipelab.schedule import Schedule


def breadth_first(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> Schedule:
    """Give each rank several stages, p apart, and send all micro-batches through one of them before the next begins.

    Lamy-Poirier 2022 (arXiv 2211.05953): a rank touches the weights of a stage in one go, forward and again backward,
    so that sharded weights are gathered and gradients reduced once a stage and not once a micro-batch.
    Stage s is on rank s % p. The backwards run in the order of the micro-batches, as in `gpipe`. Any sizes from 1.
    Makespan (m + (p - 1) / v)(F + B) with equal stages where m >= p, F and B of a whole rank; every rank keeps m
    micro-batches.
    """
    p = positive_integer("num_ranks", num_ranks)
    m = positive_integer("num_microbatches", num_microbatches)
    v = positive_integer("stages_per_rank", stages_per_rank)
    return Schedule("breadth_first", tuple(tuple(_order(rank, p, m, v)) for rank in range(p)), tuple(range(p)) * v, m)


def _order(rank: int, p: int, m: int, v: int) -> list[Action]:
    stages = range(rank, p * v, p)
    forward = [Action(stage, Kind.F, k) for stage in stages for k in range(m)]
    return forward + [Action(stage, Kind.B, k) for stage in reversed(stages) for k in range(m)]
