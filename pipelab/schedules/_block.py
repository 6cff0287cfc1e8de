"""Building blocks: the slots in which one micro-batch is at each of its stations. Repeated, a block is a schedule.

The idea is that of Qi et al. 2024 (arXiv 2405.15362): every later micro-batch does the same, one period later, so the
memory of a schedule can be read off its block. A stage keeps a micro-batch from F to I (and W); that lifespan over the
period is how many it keeps at once.

A micro-batch passes 2S stations, numbered along its way: F of stages 0 to S - 1, then I of stages S - 1 to 0. Here is
V-Min's block on two ranks in the V placement (stages 0 and 3 on rank 0); a period has 6 slots, W takes two of them:

    slot      0   1   2   3   4   5   6   7
    rank 0   0F0         3F0 3I0         0I0        station 0 .. 3 .. 4 .. 7
    rank 1       1F0 2F0         2I0 1I0            station . 1 2 .. 5 6 .
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

Block = tuple[float, ...]  # the slot of micro-batch 0 at each station
Wish = tuple[tuple[int, ...], ...]  # each rank's stations, in the order in which it would like to work; without W


def stations(placement: tuple[int, ...]) -> tuple[int, ...]:
    """The rank of each station."""
    return placement + placement[::-1]


def block(placement: tuple[int, ...], *, down: float, up: float, pauses: tuple[int, ...] = ()) -> Block:
    """The block that takes `down` slots from a rank to the next, `up` slots from a rank to the one before.

    Where a micro-batch stays on its rank or jumps around a loop, the next of `pauses` says how many slots it takes;
    1 where there are no more.
    """
    waits = iter(pauses)
    slots = [0.0]
    for here, there in pairwise(stations(placement)):
        step = {1: down, -1: up}.get(there - here)
        slots.append(slots[-1] + (next(waits, 1) if step is None else step))
    return tuple(slots)


def tight_block(placement: tuple[int, ...], *, down: float, up: float, period: int) -> Block:
    """The shortest such block that can be repeated: no two actions of a rank fall on the same slot of the period.

    Of several that are equally short, the one whose longest pause is shortest. Where there is none within a period,
    the block without pauses.
    """
    count = sum(abs(there - here) != 1 for here, there in pairwise(stations(placement)))
    for total in range(count, count + period + 1):
        for pauses in sorted(_splits(total, count), key=lambda split: (max(split), split)):
            candidate = block(placement, down=down, up=up, pauses=pauses)
            taken = {(rank, slot % period) for rank, slot in zip(stations(placement), candidate, strict=True)}
            if len(taken) == len(candidate):
                return candidate
    return block(placement, down=down, up=up)


def _splits(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as `count` whole numbers of at least 1."""
    if count == 1:
        yield (total,)
        return
    for first in range(1, total - count + 2):
        for rest in _splits(total - first, count - 1):
            yield (first, *rest)


def repeat(slots: Block, placement: tuple[int, ...], num_microbatches: int, period: float) -> Wish:
    """The block for every micro-batch, each one period after the one before: every rank's stations in order of slot."""
    times: list[list[tuple[float, int]]] = [[] for _ in range(max(placement) + 1)]
    for station, rank in enumerate(stations(placement)):
        times[rank] += [(slots[station] + k * period, station) for k in range(num_microbatches)]
    return tuple(tuple(station for _, station in sorted(row)) for row in times)
