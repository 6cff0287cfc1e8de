"""1F1B: a backward as soon as there is one to do, so that few micro-batches are kept."""

from __future__ import annotations

from pipelab.action import Action, Kind
from pipelab.errors import positive_integer
from pipelab.schedule import Schedule


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """A few forwards to fill the pipeline, then one forward and one backward in turn, then the backwards that are left.

    The order with a flush at the end of the step: PipeDream-Flush of Narayanan et al. 2021 (arXiv 2104.04473), section
    2.2.1; also DAPPLE, Fan et al. 2021. Rank r warms up with p - 1 - r forwards. Any sizes from 1; with fewer
    micro-batches than ranks the warmup is cut short at m. Makespan as GPipe's with equal stages; rank r keeps min(m, p
    - r) micro-batches.
    """
    p = positive_integer("num_ranks", num_ranks)
    m = positive_integer("num_microbatches", num_microbatches)
    return Schedule("one_f_one_b", tuple(tuple(_order(rank, p, m)) for rank in range(p)), tuple(range(p)), m)


def _order(rank: int, p: int, m: int) -> list[Action]:
    warmup = min(m, p - 1 - rank)
    order = [Action(rank, Kind.F, k) for k in range(warmup)]
    for k in range(m - warmup):  # steady: one forward, one backward
        order += [Action(rank, Kind.F, warmup + k), Action(rank, Kind.B, k)]
    return order + [Action(rank, Kind.B, k) for k in range(m - warmup, m)]  # cooldown
