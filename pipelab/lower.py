"""A schedule, lowered to what every rank really does: run, send, receive.

A send may block until its receive is reached (gloo and NCCL both do that), so the place of sends and receives matters.
1F1B with "receive just before use, send just after" hangs with two ranks: rank 0 wants to send an output while rank 1
wants to send a gradient. The cure is one order of events for the whole pipeline. Every message is one event in it, put
right behind the action that made it; every rank's program is that order, restricted to the rank. Then some rank can
always go on: the first event of the common order that has not happened yet has nothing before it, on neither side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile, zip_longest
from typing import NamedTuple

from pipelab.action import Action
from pipelab.dependencies import graph
from pipelab.errors import ScheduleError
from pipelab.schedule import Schedule
from pipelab.simulate import in_order_of_start


class Run(NamedTuple):
    """Compute `action`."""

    action: Action

    def __str__(self) -> str:
        return str(self.action)


class Send(NamedTuple):
    """Send what `action` made to rank `peer`."""

    action: Action
    peer: int

    def __str__(self) -> str:
        return f"send {self.action} to {self.peer}"


class Receive(NamedTuple):
    """Receive what `action` made on rank `peer`."""

    action: Action
    peer: int

    def __str__(self) -> str:
        return f"receive {self.action} from {self.peer}"


Instruction = Run | Send | Receive


@dataclass(frozen=True)
class Program:
    """What every rank does, in order: `ranks[r]` is rank r's tuple of Run, Send and Receive."""

    schedule: Schedule
    ranks: tuple[tuple[Instruction, ...], ...]

    def __str__(self) -> str:
        return "\n".join(f"rank {r}: {', '.join(map(str, order))}" for r, order in enumerate(self.ranks))


def lower(schedule: Schedule) -> Program:
    """The program of `schedule`: its actions in its order, with every send and receive in a place where it cannot hang.

    Raises ScheduleError where the schedule is not valid.
    """
    common_order, g = in_order_of_start(schedule), graph(schedule)
    ranks: list[list[Instruction]] = [[] for _ in range(schedule.num_ranks)]
    for action in common_order:
        rank, reader = schedule.placement[action.stage], g.reader[g.index_of[action]]
        ranks[rank].append(Run(action))
        if reader >= 0:
            peer = g.rank_of[reader]
            ranks[rank].append(Send(action, peer))
            ranks[peer].append(Receive(action, rank))
    return Program(schedule, tuple(map(tuple, ranks)))


def validate_program(program: Program) -> None:
    """Prove that `program` runs its schedule to the end even when every send blocks until its receive.

    Goes through it under exactly that rule. Programs of this kind have no choices, so if one order of events ends,
    every one does. Raises ScheduleError, with the place where each rank stands, for a program that hangs; also for an
    action that runs before a value of another rank is received, and for other actions than the schedule's in its order.
    """
    if not isinstance(program, Program):
        raise ScheduleError(f"expected a Program, as pl.lower(schedule) makes one, got {program!r}")
    ranks = program.ranks
    position = [0] * len(ranks)
    received: list[set[Action]] = [set() for _ in ranks]
    needed = _values_from_elsewhere(program.schedule)
    unsettled = list(range(len(ranks)))
    while unsettled:
        rank = unsettled.pop()
        while position[rank] < len(ranks[rank]):
            here = ranks[rank][position[rank]]
            if isinstance(here, Run):
                missing = needed.get(here.action)
                if missing is not None and missing not in received[rank]:
                    raise ScheduleError(
                        f"program of {program.schedule.name!r}: rank {rank}, position {position[rank]}: "
                        f"{here.action} runs before {missing} is received"
                    )
            else:
                if not 0 <= here.peer < len(ranks) or not _meets(ranks, position, rank, here):
                    break
                receiver = here.peer if isinstance(here, Send) else rank
                received[receiver].add(here.action)
                position[here.peer] += 1
                unsettled.append(here.peer)
            position[rank] += 1
    stuck = [r for r in range(len(ranks)) if position[r] < len(ranks[r])]
    if stuck:
        raise ScheduleError(
            f"program of {program.schedule.name!r} hangs when every send blocks until its receive",
            [f"rank {r}, position {position[r]}: waits to {ranks[r][position[r]]}" for r in stuck],
        )
    runs = (tuple(here.action for here in row if isinstance(here, Run)) for row in ranks)
    pairs = enumerate(zip_longest(runs, program.schedule.ranks, fillvalue=()))
    if others := [_difference(rank, found, order) for rank, (found, order) in pairs if found != order]:
        raise ScheduleError(f"program of {program.schedule.name!r} does not run its schedule", others)


def _difference(rank: int, found: Sequence[Action], order: Sequence[Action]) -> str:
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(found, order, strict=False)))
    return f"rank {rank} runs {len(found)} actions, the schedule has {len(order)}, and the first {same} are the same"


def _meets(ranks: Sequence[Sequence[Instruction]], position: list[int], rank: int, here: Send | Receive) -> bool:
    """Whether the peer stands at the other half of this message."""
    if position[here.peer] >= len(ranks[here.peer]):
        return False
    there = ranks[here.peer][position[here.peer]]
    other = Receive if isinstance(here, Send) else Send
    return isinstance(there, other) and there.peer == rank and there.action == here.action


def _values_from_elsewhere(schedule: Schedule) -> dict[Action, Action]:
    """For every action that reads from another rank: the action that makes the value."""
    g = graph(schedule)
    return {g.actions[i]: g.actions[g.neighbour[i]] for i in range(len(g.actions)) if g.crosses[i]}
