"""What V-Min and V-Half have in common: a block, repeated and squeezed."""

from __future__ import annotations

from collections.abc import Callable

from pipelab.errors import ScheduleError, positive_integer
from pipelab.schedule import Schedule, placed
from pipelab.schedules._block import repeat, tight_block
from pipelab.schedules._squeeze import squeeze
from pipelab.schedules._task import Task

_PERIOD = 6  # slots: F, I and W of two stages


def v_shaped(
    name: str, num_ranks: int, num_microbatches: int, *, down: int, up: int, keeps: Callable[[int], int]
) -> Schedule:
    """The schedule whose block goes down the ranks in steps of `down` slots and comes up in steps of `up`.

    F, I and W take one slot each; `keeps(p)` is how many micro-batches, whole and until W, a rank has room for. Where
    the block repeats, its order stays; before and after, where repetitions are missing, F and I move up into the holes.
    """
    p = positive_integer("num_ranks", num_ranks)
    m = positive_integer("num_microbatches", num_microbatches)
    placement = placed(p, 2, "v")
    wish = repeat(tight_block(placement, down=down, up=up, period=_PERIOD), placement, m, _PERIOD)
    slot = (1.0,) * len(placement)
    hop = (0.0,) * (len(placement) - 1)
    squeezed = squeeze(Task(placement, m, F=slot, I=slot, W=slot, hop=hop, room=2 * keeps(p)), wish, overtaking="ramps")
    if squeezed is None:
        raise ScheduleError(f"{name} finds no order for {p} ranks and {m} micro-batches; please report these numbers")
    return Schedule(name, squeezed.ranks(), placement, m)
