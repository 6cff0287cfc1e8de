"""What is asked of a search, and what it answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pipelab.action import Action, Kind
from pipelab.schedules._block import stations


@dataclass(frozen=True)
class Task:
    """What all schedules of one search have in common.

    `F`, `I`, `W`: the time of each stage's actions; `hop[s]`: the delay between stages s and s + 1, both ways.
    `room`: how many stages' activations fit on a rank; F takes 1 of it, I gives 1 - weight_part back, W weight_part.
    Without `split`, a backward is one action B that takes I + W and gives 1 back.
    `makespan`: the cost is the last end; else it is the longest time that one rank takes from first start to last end.
    """

    placement: tuple[int, ...]
    num_microbatches: int
    F: tuple[float, ...]
    I: tuple[float, ...]  # noqa: E741
    W: tuple[float, ...]
    hop: tuple[float, ...]
    room: float
    weight_part: float = 1.0
    split: bool = True
    makespan: bool = False

    @property
    def num_stages(self) -> int:
        """Stages over all ranks; there are twice as many stations."""
        return len(self.placement)

    @cached_property
    def stations_of(self) -> tuple[tuple[int, ...], ...]:
        """The stations of each rank."""
        where = stations(self.placement)
        return tuple(tuple(s for s, on in enumerate(where) if on == rank) for rank in range(1 + max(where)))

    @cached_property
    def duration(self) -> tuple[float, ...]:
        """The time of each station's action."""
        backward = self.I if self.split else tuple(map(sum, zip(self.I, self.W, strict=True)))
        return self.F + backward[::-1]

    @cached_property
    def delay(self) -> tuple[float, ...]:
        """From the end of each station's action until the next station has its value; 0 on the same rank."""
        held_by = stations(self.placement)
        hop = (*self.hop, 0.0, *reversed(self.hop))
        ways = zip(hop, held_by, held_by[1:], strict=False)
        return (*(0.0 if here == there else delay for delay, here, there in ways), 0.0)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """The time that each rank is busy."""
        times = [f + i + w for f, i, w in zip(self.F, self.I, self.W, strict=True)]
        return tuple(
            self.num_microbatches * sum(t for t, on in zip(times, self.placement, strict=True) if on == rank)
            for rank in range(len(self.stations_of))
        )


@dataclass(frozen=True)
class Squeezed:
    """What became of a wish: its cost, and each rank's order; `codes` are stations and, beyond them, W of stages."""

    task: Task
    cost: float
    codes: tuple[tuple[int, ...], ...]

    def ranks(self) -> tuple[tuple[Action, ...], ...]:
        """The order of actions on every rank."""
        stages, done = self.task.num_stages, [0] * (3 * self.task.num_stages)
        back = Kind.I if self.task.split else Kind.B
        kind = [Kind.F] * stages + [back] * stages + [Kind.W] * stages
        stage = [*range(stages), *reversed(range(stages)), *range(stages)]

        def actions(order: tuple[int, ...]) -> Iterator[Action]:
            for code in order:
                yield Action(stage[code], kind[code], done[code])
                done[code] += 1

        return tuple(tuple(actions(order)) for order in self.codes)
