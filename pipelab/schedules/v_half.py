"""V-Half: two stages a rank, in a V, with about half of 1F1B's memory."""

from __future__ import annotations

from pipelab.schedule import Schedule
from pipelab.schedules._v_shape import v_shaped


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Let every micro-batch take two slots a rank on its way down, one on its way up, and start one every six slots.

    Qi et al. 2024 (arXiv 2405.15362), section 3: between V-Min, whose block is shorter, and ZB-V, which keeps as much
    as 1F1B. Rank r holds stages r and 2p - 1 - r. Any sizes from 1.
    With F = I = W of one slot a stage, a rank keeps at most floor(p / 2) + 1 micro-batches, and with p >= 2 and m > p
    the makespan is at most 6m + 3p - 4 slots: half of 1F1B's memory and half of its idle time.
    """
    return v_shaped("v_half", num_ranks, num_microbatches, down=2, up=1, keeps=lambda p: p // 2 + 1)
