"""ZB-H2: twice 1F1B's memory, and hardly a bubble."""

from __future__ import annotations

from pipelab.errors import positive_integer
from pipelab.schedule import Schedule
from pipelab.schedules.zb_h1 import split_order


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1 with everything doubled: 2(p - 1 - r) forwards to warm up, and W held back by 2r micro-batches.

    Qi et al. 2023 (arXiv 2401.10241), section 2.2: the extra forwards fill the wait for the first gradient, and the
    late W the end. With F = I = W no rank waits between its first start and its last end. Ranks start and end shifted
    against each other, which pays where the next step does not wait for all of them, so the paper's cost is the longest
    span of one rank, `Trace.longest_rank_span`: m C + (p - 1)(F + I - 2W) with C = F + I + W, W <= min(F, I), m >= 2p
    and equal stages. Any sizes from 1; with few micro-batches warmup and delay are cut short. Rank r keeps
    2(p - r) - 1 micro-batches until I, and 2r until W.
    """
    p = positive_integer("num_ranks", num_ranks)
    m = positive_integer("num_microbatches", num_microbatches)
    ranks = (split_order(rank, m, warmup=2 * (p - 1 - rank), delay=2 * rank) for rank in range(p))
    return Schedule("zb_h2", tuple(ranks), tuple(range(p)), m)
