"""ZB-H1: 1F1B's memory, a third of its bubble, by splitting the backward."""

from __future__ import annotations

from pipelab.action import Action, Kind
from pipelab.errors import positive_integer
from pipelab.schedule import Schedule


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with the backward split into I and W, and W held back, on rank r by r micro-batches, to fill the cooldown.

    Qi et al. 2023 (arXiv 2401.10241), section 2.1: nobody but the optimizer waits for W, so it may come late, as long
    as no rank has more micro-batches in flight than 1F1B's first. Any sizes from 1; with few micro-batches warmup and
    delay are cut short. Makespan m C + (p - 1)(F + I - W) with C = F + I + W, W <= min(F, I), m >= 2p and equal stages;
    rank r keeps p - r micro-batches until I, and r until W.
    """
    p = positive_integer("num_ranks", num_ranks)
    m = positive_integer("num_microbatches", num_microbatches)
    ranks = (split_order(rank, m, warmup=p - 1 - rank, delay=rank) for rank in range(p))
    return Schedule("zb_h1", tuple(ranks), tuple(range(p)), m)


def split_order(stage: int, m: int, *, warmup: int, delay: int) -> tuple[Action, ...]:
    """`warmup` forwards, then F and I in turn; each I is followed by the W of `delay` micro-batches before."""
    order = [Action(stage, Kind.F, k) for k in range(min(warmup, m))]
    for k in range(m + delay):
        if warmup + k < m:
            order.append(Action(stage, Kind.F, warmup + k))
        if k < m:
            order.append(Action(stage, Kind.I, k))
        if k >= delay:
            order.append(Action(stage, Kind.W, k - delay))
    return tuple(order)
