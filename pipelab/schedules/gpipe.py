"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from pipelab.action import Action, Kind
from pipelab.errors import positive_integer
from pipelab.schedule import Schedule


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """Cut the mini-batch into micro-batches, send all of them forward, then all of them backward.

    Huang et al. 2019 (arXiv 1811.06965), section 2.2: the mini-batch is divided into M equal micro-batches, which are
    pipelined through the K accelerators, and the gradients of all M are applied at the end. The backwards run in the
    order of the micro-batches, so that gradients add up in the same order as in one process. Any sizes from 1.
    Makespan (m + p - 1)(F + B) with equal stages; every rank keeps m micro-batches.
    """
    p = positive_integer("num_ranks", num_ranks)
    m = positive_integer("num_microbatches", num_microbatches)
    order = [[Action(rank, kind, k) for kind in (Kind.F, Kind.B) for k in range(m)] for rank in range(p)]
    return Schedule("gpipe", tuple(map(tuple, order)), tuple(range(p)), m)
