"""DualPipeV: a forward and a backward always side by side, so that the messages of one hide behind the other's work."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from pipelab.action import Action, Kind
from pipelab.errors import SizeError, positive_integer
from pipelab.schedule import Schedule, placed

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Run the forward of one of a rank's two stages together with the backward of the other.

    DeepSeek-AI 2024 (arXiv 2412.19437), section 3.2.1; the V form is that of their repository DualPipe, and the order
    that of torch's ScheduleDualPipeV. Rank r holds stages r and 2p - 1 - r. A pair that they overlap stands here as F,
    then B. Only where there is nothing to pair with is the backward split, so that W can wait for the end. Takes 2p
    micro-batches or more, two for each rank. Raises SizeError, with the nearest legal number, for fewer.
    With F = I = W, the makespan is m C + (p - 1) F / 2, with C = F + I + W and F of a whole rank; every rank of two or
    more keeps p + 1/2 micro-batches.
    """
    p = positive_integer("num_ranks", num_ranks)
    m = positive_integer("num_microbatches", num_microbatches)
    if m < 2 * p:
        raise SizeError(
            f"dualpipe_v needs at least two micro-batches a rank (a pair for every rank to overlap), "
            f"got {m} for {p} ranks; the nearest is {2 * p}"
        )
    return Schedule("dualpipe_v", tuple(tuple(_order(rank, p, m)) for rank in range(p)), placed(p, 2, "v"), m)


def _order(rank: int, p: int, m: int) -> Iterator[Action]:
    down, up = rank, 2 * p - 1 - rank  # the rank's stage on the way down, and that on the way up
    to_last = p - 1 - rank  # how many ranks lie between here and where the V turns
    counters = {(stage, back): count() for stage in (down, up) for back in (False, True)}
    due: list[Action] = []  # every W whose I has been

    def do(stage: int, kind: Kind) -> Action:
        action = Action(stage, kind, next(counters[stage, kind is not F]))
        if kind is I:
            due.append(action._replace(kind=W))
        return action

    for _ in range(2 * to_last):  # warmup
        yield do(down, F)
    for _ in range(rank + 1):
        yield do(down, F)
        yield do(up, F)
    for _ in range(to_last):
        yield do(up, I)
        yield due.pop(0)
        yield do(up, F)
    for _ in range(m - 2 * p + rank + 1):  # steady: two pairs
        yield do(down, F)
        yield do(up, B)
        yield do(up, F)
        yield do(down, B)
    for _ in range(to_last):  # no forward left on the way down
        yield do(up, B)
        yield do(up, F)
        yield do(down, B)
    for n in range(2 * (rank + 1)):  # cooldown: no forward left; the later half only sends its gradient on
        yield do(down if n % 2 else up, B if n <= rank else I)
    for _ in range(to_last):
        yield due.pop(0)
        yield do(down, I)
    yield from due
