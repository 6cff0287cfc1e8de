"""V-Min: two stages a rank, in a V, with the least memory: about a third of 1F1B's."""

from __future__ import annotations

from pipelab.schedule import Schedule
from pipelab.schedules._v_shape import v_shaped


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Let every micro-batch run down the V, up, and back as fast as it can, and start the next one every six slots.

    Qi et al. 2024 (arXiv 2405.15362), section 3: the memory of a schedule is the lifespan of its block, and this block
    has the shortest lifespan that there is. Rank r holds stages r and 2p - 1 - r. Any sizes from 1.
    With F = I = W of one slot a stage, a rank keeps at most floor((p + 4) / 3) micro-batches, and with p >= 2 the
    makespan is at most 6m + 4p - 5 slots: a third of 1F1B's memory and two thirds of its idle time. Where F, I and W
    differ, every micro-batch pays for the difference, since there is nothing in store to wait with.
    """
    return v_shaped("v_min", num_ranks, num_microbatches, down=1, up=1, keeps=lambda p: (p + 4) // 3)
