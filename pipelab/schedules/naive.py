"""The naive pipeline: one rank works, the others wait."""

from __future__ import annotations

from pipelab.action import Action, Kind
from pipelab.errors import positive_integer
from pipelab.schedule import Schedule


def naive(num_ranks: int, num_microbatches: int = 1) -> Schedule:
    """Each micro-batch goes forward through all stages and back again before the next one starts.

    What GPipe's authors call naive model parallelism: "only one accelerator is active at a time" is its whole behaviour
    (Huang et al. 2019, figure 2b). Any sizes from 1. Makespan m p (F + B) with equal stages; bubble (p - 1) / p.
    """
    p = positive_integer("num_ranks", num_ranks)
    m = positive_integer("num_microbatches", num_microbatches)
    order = [[Action(rank, kind, k) for k in range(m) for kind in (Kind.F, Kind.B)] for rank in range(p)]
    return Schedule("naive", tuple(map(tuple, order)), tuple(range(p)), m)
