"""Schedule and costs in, trace out: every action starts as soon as its rank is free and what it needs is there."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Literal

from pipelab.action import Action, Kind
from pipelab.costs import Costs, Link, Wire, or_unit
from pipelab.dependencies import Graph, graph
from pipelab.errors import CostError
from pipelab.schedule import Schedule
from pipelab.trace import Message, Span, Trace
from pipelab.validate import validate

Recomputation = Literal["early", "late"]


def simulate(schedule: Schedule, costs: Costs | None = None, *, remat: bool | Recomputation = False) -> Trace:
    """When every action of `schedule` starts and ends under `costs` (default: F = I = W = 1, messages free).

    A value reaches another rank one hop later; sends cost the sender no time. Over a Link, messages of one direction
    between two ranks queue first-in first-out for the bandwidth.
    With `remat`, a stage runs its forward once more before B or I: "late" (or True) after the gradient has come,
    "early" as soon as the rank is free, which hides the recomputation in the bubble.
    Raises ScheduleError where the schedule cannot run, CostError where the costs are for another number of stages or
    add up to more than a float can hold.
    """
    if remat not in (False, True, "early", "late"):
        raise CostError(f"remat must be False, True, 'early' or 'late', got {remat!r}")
    validate(schedule)
    costs, g = or_unit(costs), graph(schedule)
    times = costs.per_stage(schedule.num_stages)
    duration = [times[kind][stage] for stage, kind, _ in g.actions]
    sizes = costs.message_bytes(schedule.num_stages)
    size = [sizes[kind][stage] if r >= 0 else 0.0 for (stage, kind, _), r in zip(g.actions, g.reader, strict=True)]
    again = [0.0] * len(duration)
    if remat:
        again = [times[Kind.F][stage] if kind in (Kind.B, Kind.I) else 0.0 for stage, kind, _ in g.actions]
    start, arrival, begins_again = _run(g, duration, again, size, costs.link, early=remat == "early")
    end = [t + d for t, d in zip(start, duration, strict=True)]
    if math.isinf(max(arrival)):
        raise CostError(f"the times of {schedule.name!r} add up to more than a float can hold: take a larger unit")
    spans: Iterable[Span] = map(Span, g.rank_of, g.actions, start, end)
    if remat:
        spans = _with_recomputation(spans, begins_again, again)
    messages = (
        Message(g.actions[i], g.actions[reader], g.rank_of[i], g.rank_of[reader], end[i], arrival[i], size[i])
        for i, reader in enumerate(g.reader)
        if reader >= 0
    )
    return Trace(schedule, tuple(spans), tuple(messages), "simulated")


def in_order_of_start(schedule: Schedule) -> list[Action]:
    """All actions of `schedule`, one behind the other as they start with F = I = W = U = 1 and free messages.

    No action comes before one that it needs. Raises ScheduleError where the schedule cannot run.
    """
    spans = simulate(schedule, Costs(U=1.0)).spans  # with times of 0, a reader could start with its maker
    return [span.action for span in sorted(spans, key=lambda span: span.start)]


def _run(
    g: Graph, duration: list[float], again: list[float], size: list[float], link: Link, *, early: bool
) -> tuple[list[float], list[float], list[float]]:
    """When every action starts, when its value is where it is read, and when its recomputation (`again`) begins.

    Every rank goes through its order, and waits where a value is not made yet: one pass over the actions.
    """
    neighbour, reader = g.neighbour, g.reader  # what its own stage makes comes earlier in a rank's order: no wait
    start, begins_again = [0.0] * len(duration), [0.0] * len(duration)
    arrival = [-1.0] * len(duration)  # -1: not made yet
    position, clock = g.first[:-1], [0.0] * (len(g.first) - 1)
    wires: dict[tuple[int, int], Wire] = defaultdict(lambda: Wire(link))
    waiting: dict[int, int] = {}
    ready = list(range(len(clock)))
    while ready:
        rank = ready.pop()
        index, stop, now = position[rank], g.first[rank + 1], clock[rank]
        while index < stop:
            source = neighbour[index]
            needed = now if source < 0 else arrival[source]
            if needed < 0.0:
                waiting[source] = rank
                break
            if again[index]:
                begins_again[index] = now if early else max(now, needed)
                now = begins_again[index] + again[index]
            if needed > now:
                now = needed
            start[index] = now
            now += duration[index]
            arrival[index] = now
            if reader[index] >= 0:
                arrival[index] = wires[rank, g.rank_of[reader[index]]].send(now, size[index])
            if index in waiting:
                ready.append(waiting.pop(index))
            index += 1
        position[rank], clock[rank] = index, now
    return start, arrival, begins_again


def _with_recomputation(spans: Iterable[Span], begins: list[float], again: list[float]) -> Iterator[Span]:
    """Every backward's span behind that of its recomputation."""
    for span, begin, duration in zip(spans, begins, again, strict=True):
        if duration:
            forward = span.action._replace(kind=Kind.F)
            yield Span(span.rank, forward, begin, begin + duration, recompute=True)
        yield span
