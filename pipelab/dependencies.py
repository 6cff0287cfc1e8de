"""What must happen before what: the one place that knows it.

An action reads values and makes values. A value belongs to a stage and a micro-batch:

    output            what the stage's forward makes; the next stage's forward reads it, and its own backward
    input gradient    what B or I makes; the previous stage's backward reads it, and its own W
    weight gradient   what B or W makes; the weight update reads it

    stage s-1        stage s          stage s+1
    F --- output ---> F --- output ---> F
                      |  own output
    B <-- gradient -- B <-- gradient -- B        (or I, where the backward is split; W hangs below its I)

Everything that asks about order (validate, simulate, lower, the engine, arrows in pictures) asks here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pipelab.action import Action, Kind
from pipelab.errors import ScheduleError
from pipelab.schedule import Schedule

OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = 0, 1, 2

MAKES: dict[Kind, tuple[int, ...]] = {
    Kind.F: (OUTPUT,),
    Kind.B: (INPUT_GRADIENT, WEIGHT_GRADIENT),
    Kind.I: (INPUT_GRADIENT,),
    Kind.W: (WEIGHT_GRADIENT,),
    Kind.U: (),
}
# what a kind reads from its own stage, and what from a neighbour (as an offset to its own stage number)
READS_OWN: dict[Kind, int | None] = {
    Kind.F: None,
    Kind.B: OUTPUT,
    Kind.I: OUTPUT,
    Kind.W: INPUT_GRADIENT,
    Kind.U: WEIGHT_GRADIENT,
}
READS_NEIGHBOUR: dict[Kind, tuple[int, int] | None] = {
    Kind.F: (OUTPUT, -1),
    Kind.B: (INPUT_GRADIENT, +1),
    Kind.I: (INPUT_GRADIENT, +1),
    Kind.W: None,
    Kind.U: None,
}


@dataclass(frozen=True)
class Graph:
    """The dependencies of one schedule, by index into `actions` (rank 0's order, then rank 1's, and so on).

    `rank_of[i]` is the rank that has action i; `first[r]` is where rank r begins, `first[num_ranks]` the number of
    actions. `own[i]` and `neighbour[i]` are the actions that i needs, of its own stage and of a neighbouring one; -1
    where it needs none, or where the schedule lacks it. `crosses[i]`: the neighbour's value comes from another rank.
    `reader[i]`: which action on another rank reads what i makes; -1 where none does.
    """

    actions: list[Action]
    rank_of: list[int]
    first: list[int]
    own: list[int]
    neighbour: list[int]
    crosses: list[bool]
    reader: list[int]

    @cached_property
    def index_of(self) -> dict[Action, int]:
        """The index of every action."""
        return {action: index for index, action in enumerate(self.actions)}

    def place(self, index: int) -> str:
        """Rank and position of action `index`, in words."""
        rank = self.rank_of[index]
        return f"rank {rank}, position {index - self.first[rank]}"


def graph(schedule: Schedule) -> Graph:
    """The dependencies of `schedule`, worked out once and kept with it. Actions out of range depend on nothing."""
    kept = schedule.__dict__.get("_graph")
    if kept is None:
        kept = schedule.__dict__["_graph"] = _work_out(schedule)
    result: Graph = kept
    return result


def _work_out(schedule: Schedule) -> Graph:
    actions = [action for order in schedule.ranks for action in order]
    rank_of = [rank for rank, order in enumerate(schedule.ranks) for _ in order]
    first = [0]
    for order in schedule.ranks:
        first.append(first[-1] + len(order))
    stages, batches = schedule.num_stages, schedule.num_microbatches

    # maker[value] = index of the action that makes it; a value is numbered (stage, micro-batch, which)
    maker = [-1] * (3 * stages * batches)
    for index, (stage, kind, microbatch) in enumerate(actions):
        if stage < stages and microbatch < batches:
            value = 3 * (stage * batches + microbatch)
            for which in MAKES[kind]:
                maker[value + which] = index

    own, neighbour, crosses = [-1] * len(actions), [-1] * len(actions), [False] * len(actions)
    reader = [-1] * len(actions)
    # per kind and stage: how far its neighbour's value lies from (stage, micro-batch, 0), and whether another rank
    # makes it
    step = {kind: _neighbour_steps(schedule, kind) for kind in Kind}
    for index, (stage, kind, microbatch) in enumerate(actions):
        if stage >= stages or microbatch >= batches:
            continue
        value = 3 * (stage * batches + microbatch)
        mine = READS_OWN[kind]
        if mine is not None:
            own[index] = maker[value + mine]
        offset, other_rank = step[kind][stage]
        if offset is not None:
            source = neighbour[index] = maker[value + offset]
            if other_rank and source >= 0:
                crosses[index] = True
                reader[source] = index
    return Graph(actions, rank_of, first, own, neighbour, crosses, reader)


def _neighbour_steps(schedule: Schedule, kind: Kind) -> list[tuple[int | None, bool]]:
    reads = READS_NEIGHBOUR[kind]
    if reads is None:
        return [(None, False)] * schedule.num_stages
    which, offset = reads
    steps: list[tuple[int | None, bool]] = []
    for stage, rank in enumerate(schedule.placement):
        if 0 <= stage + offset < schedule.num_stages:
            distance = 3 * offset * schedule.num_microbatches + which
            steps.append((distance, schedule.placement[stage + offset] != rank))
        else:
            steps.append((None, False))
    return steps


def needs(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """The actions of `schedule` that must end before `action` may start, its own stage's first.

    `2F1` needs `1F1`; `2B1` needs `2F1` and the gradient of stage 3, which is `3B1` or `3I1`. Raises ScheduleError for
    an action that the schedule does not have.
    """
    g = graph(schedule)
    index = g.index_of.get(action)
    if index is None:
        raise ScheduleError(f"schedule {schedule.name!r} has no action {action}")
    return tuple(g.actions[i] for i in (g.own[index], g.neighbour[index]) if i >= 0)


def blocked(schedule: Schedule) -> dict[int, int]:
    """Which ranks can never finish, each with the index of the action at which it stops; empty where all can.

    Every rank goes through its order and waits where a value that it needs is not made yet: takes time linear in
    actions.
    """
    g = graph(schedule)
    position, waiting = g.first[:-1], {}
    done = bytearray(len(g.actions))
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        index, stop = position[rank], g.first[rank + 1]
        while index < stop:
            source = g.neighbour[index]
            if source >= 0 and not done[source]:
                waiting[source] = rank
                break
            source = g.own[index]
            if source >= 0 and not done[source]:
                break  # its own stage's value comes later in the same order: never
            done[index] = 1
            if index in waiting:
                ready.append(waiting.pop(index))
            index += 1
        position[rank] = index
    return {rank: index for rank, index in enumerate(position) if index < g.first[rank + 1]}


def waits(schedule: Schedule) -> Iterator[tuple[int, int, int]]:
    """For every rank that can never finish: (rank, index of the action where it stops, index of what it waits for)."""
    g = graph(schedule)
    for rank, index in blocked(schedule).items():
        later = g.own[index]
        stuck_on_own = later >= index or (later >= 0 and g.rank_of[later] != rank)
        yield rank, index, later if stuck_on_own else g.neighbour[index]
