"""Schedule and costs in, trace out: every action starts as soon as its rank is free and what it needs is there."""

from __future__ import annotations

from typing import Literal

from pipelab.action import Kind
from pipelab.costs import Costs, Link
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
    Raises ScheduleError where the schedule cannot run, CostError where the costs are for another number of stages.
    """
    if remat not in (False, True, "early", "late"):
        raise CostError(f"remat must be False, True, 'early' or 'late', got {remat!r}")
    validate(schedule)
    costs = Costs() if costs is None else costs
    g = graph(schedule)
    times = costs.per_stage(schedule.num_stages)
    duration = [times[kind][stage] for stage, kind, _ in g.actions]
    again = [0.0] * len(duration)
    if remat:
        forward = times[Kind.F]
        again = [forward[a.stage] if a.kind in (Kind.B, Kind.I) else 0.0 for a in g.actions]
    clock = _Clock(schedule, g, costs)
    start = clock.run(duration, again, early=remat == "early")
    end = [t + d for t, d in zip(start, duration, strict=True)]
    spans = _spans(schedule, g, start, end)
    if remat:
        spans = _with_recomputation(spans, clock.began_again, again, g)
    return Trace(schedule, spans, _messages(schedule, g, costs, end, clock.arrival), "simulated")


class _Clock:
    """Runs every rank through its order; one pass over the actions."""

    def __init__(self, schedule: Schedule, g: Graph, costs: Costs) -> None:
        self.schedule, self.g = schedule, g
        self.link = costs.comm if isinstance(costs.comm, Link) else None
        delay = 0.0 if isinstance(costs.comm, Link) else costs.comm
        self.hop = [delay if reader >= 0 else 0.0 for reader in g.reader]  # time from an action's end to its reader
        self.bytes = _message_bytes(schedule, g, costs) if self.link else []
        self.arrival: list[float] = []
        self.began_again: list[float] = []

    def run(self, duration: list[float], again: list[float], *, early: bool) -> list[float]:
        """The start of every action; `again` is the time of the recomputation before it."""
        g, hop, link = self.g, self.hop, self.link
        neighbour = g.neighbour  # only they make a rank wait: what its own stage makes comes earlier in its order
        recomputes = any(again)
        start = [0.0] * len(duration)
        arrival = [-1.0] * len(duration)  # when an action's value is where its neighbour reads it; -1: not yet
        began_again = [0.0] * len(duration) if recomputes else []
        position, clock = g.first[:-1], [0.0] * self.schedule.num_ranks
        wire_free: dict[tuple[int, int], float] = {}
        waiting: dict[int, int] = {}
        ready = list(range(self.schedule.num_ranks))
        while ready:
            rank = ready.pop()
            index, stop, now = position[rank], g.first[rank + 1], clock[rank]
            while index < stop:
                source = neighbour[index]
                needed = now
                if source >= 0:
                    needed = arrival[source]
                    if needed < 0.0:
                        waiting[source] = rank
                        break
                if recomputes and again[index]:
                    begin = now if early else max(now, needed)
                    began_again[index] = begin
                    now = begin + again[index]
                if needed > now:
                    now = needed
                start[index] = now
                now += duration[index]
                if link is not None and g.reader[index] >= 0:
                    arrival[index] = self._over(link, index, now, rank, wire_free)
                else:
                    arrival[index] = now + hop[index]
                if index in waiting:
                    ready.append(waiting.pop(index))
                index += 1
            position[rank], clock[rank] = index, now
        self.arrival, self.began_again = arrival, began_again
        return start

    def _over(self, link: Link, index: int, end: float, rank: int, wire_free: dict[tuple[int, int], float]) -> float:
        wire = (rank, self.g.rank_of(self.g.reader[index]))
        leaves = max(end, wire_free.get(wire, 0.0)) + self.bytes[index] / link.bytes_per_s
        wire_free[wire] = leaves
        return leaves + link.latency_s


def _message_bytes(schedule: Schedule, g: Graph, costs: Costs) -> list[float]:
    """What every action's message weighs: a forward sends its stage's output, a backward the gradient of its input."""
    outputs = costs.bytes_per_stage(schedule.num_stages)
    return [
        0.0 if reader < 0 else outputs[action.stage] if action.kind is Kind.F else outputs[action.stage - 1]
        for action, reader in zip(g.actions, g.reader, strict=True)
    ]


def _spans(schedule: Schedule, g: Graph, start: list[float], end: list[float]) -> tuple[Span, ...]:
    rank_of = [rank for rank in range(schedule.num_ranks) for _ in range(g.first[rank], g.first[rank + 1])]
    return tuple(map(Span, rank_of, g.actions, start, end))


def _with_recomputation(spans: tuple[Span, ...], began: list[float], again: list[float], g: Graph) -> tuple[Span, ...]:
    """Every backward's span behind that of its recomputation."""
    out: list[Span] = []
    for index, span in enumerate(spans):
        if again[index]:
            forward = g.actions[index]._replace(kind=Kind.F)
            out.append(Span(span.rank, forward, began[index], began[index] + again[index], recompute=True))
        out.append(span)
    return tuple(out)


def _messages(
    schedule: Schedule, g: Graph, costs: Costs, end: list[float], arrival: list[float]
) -> tuple[Message, ...]:
    weight = _message_bytes(schedule, g, costs) if costs.boundary_bytes else [0.0] * len(end)
    rank_of = [rank for rank in range(schedule.num_ranks) for _ in range(g.first[rank], g.first[rank + 1])]
    return tuple(
        Message(action, g.actions[reader], rank, rank_of[reader], sent, arrived, size)
        for action, reader, rank, sent, arrived, size in zip(
            g.actions, g.reader, rank_of, end, arrival, weight, strict=True
        )
        if reader >= 0
    )
