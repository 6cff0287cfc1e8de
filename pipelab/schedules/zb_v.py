"""ZB-V: two stages a rank, in a V, no more memory than 1F1B and no wait between a rank's first and last action."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from pipelab.action import Action, Kind
from pipelab.errors import positive_integer
from pipelab.schedule import Schedule, placed

F, I, W = Kind.F, Kind.I, Kind.W  # noqa: E741


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Fold the pipeline into a V, so that the last forward ends where the first began, and fill every wait with a W.

    Qi et al. 2023 (arXiv 2401.10241), section 6. Rank r holds stages r and 2p - 1 - r: rank 0 has the loss too, so its
    first backward need not wait for a gradient to come up all ranks, and every rank keeps equally much.
    The order is that of torch's ScheduleZBVZeroBubble. Any sizes from 1; with fewer than 2p - 1 micro-batches it is the
    order for 2p - 1 without those that are missing.
    With m >= 2p and F = I = W: no rank waits between its first start and its last end, so the makespan is
    m C + (p - 1) F / 2 with C = F + I + W of a whole rank; every rank keeps p micro-batches.
    """
    p = positive_integer("num_ranks", num_ranks)
    m = positive_integer("num_microbatches", num_microbatches)
    ranks = (tuple(a for a in _order(rank, p, max(m, 2 * p - 1)) if a.microbatch < m) for rank in range(p))
    return Schedule("zb_v", tuple(ranks), placed(p, 2, "v"), m)


def _order(rank: int, p: int, m: int) -> Iterator[Action]:
    down, up = rank, 2 * p - 1 - rank  # the rank's stage on the way down, and that on the way up
    counters = {(stage, kind): count() for stage in (down, up) for kind in (F, I, W)}

    def do(stage: int, *kinds: Kind) -> Iterator[Action]:
        return (Action(stage, kind, next(counters[stage, kind])) for kind in kinds)

    for _ in range(2 * (p - rank) - 1):  # warmup: until the first micro-batch is back from the last rank
        yield from do(down, F)
    for _ in range(rank):
        yield from do(up, F)
        yield from do(down, F)
    for _ in range(p - rank):
        yield from do(up, F, I, W)
    for _ in range(m - p):  # steady: one micro-batch on the way down, one on the way up
        yield from do(down, F, I, W)  # the last of these F have no micro-batch left: zb_v drops them
        yield from do(up, F, I, W)
    for _ in range(rank):  # cooldown: gradients first, for the ranks that wait for them
        yield from do(down, I)
        yield from do(up, I)
    for _ in range(p - rank):
        yield from do(down, I, W)
    for stage in (up, down):
        for _ in range(rank):
            yield from do(stage, W)
