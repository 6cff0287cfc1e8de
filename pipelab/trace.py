"""What happened when: spans of time on ranks, and the messages between them.

The simulator makes a Trace and so does a real run; nothing but the label `source` tells them apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipelab.action import Action, Kind
from pipelab.errors import CostError, SizeError
from pipelab.schedule import Schedule

Source = Literal["simulated", "paced", "measured"]


class Span(NamedTuple):
    """One action on one rank, from `start` to `end` (seconds, or the unit of the costs).

    `recompute` marks the second run of a forward under rematerialization. `version` is the weights' version that the
    action used, where that matters; of an update, the one that it makes. `late` is how far a paced run's action ended
    behind its virtual deadline, in seconds.
    """

    rank: int
    action: Action
    start: float
    end: float
    recompute: bool = False
    version: int | None = None
    late: float = 0.0

    @property
    def duration(self) -> float:
        """End minus start."""
        return self.end - self.start

    @property
    def name(self) -> str:
        """`0F0`, or `0F0 again` for its recomputation."""
        return f"{self.action} again" if self.recompute else str(self.action)


class Message(NamedTuple):
    """What `action` made, on its way from rank `sender` to rank `receiver`, where `reader` needs it.

    `sent` and `arrived` are in the trace's unit of time; `bytes` is 0 where it is not known.
    """

    action: Action
    reader: Action
    sender: int
    receiver: int
    sent: float
    arrived: float
    bytes: float = 0.0


def timed(found: object) -> Trace:
    """`found`, if it is a Trace; else raises CostError, which says where to get one."""
    if not isinstance(found, Trace):
        raise CostError(
            f"this needs the times of a Trace, and {type(found).__name__} has none: "
            "give simulate(schedule), or the trace of a step, result.trace"
        )
    return found


class IdleByPhase(NamedTuple):
    """Idle time of one rank in its three phases, in the trace's unit of time."""

    warmup: float
    steady: float
    cooldown: float


@dataclass(frozen=True, repr=False, eq=False)
class Trace:
    """A schedule with times: simulated, paced or measured.

    `spans` are sorted by rank and start. Ranks wait between their spans: those waits are the bubble. `note` says what
    else a reader of the times has to know.
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    messages: tuple[Message, ...] = ()
    source: Source = "simulated"
    note: str = ""

    @property
    def num_ranks(self) -> int:
        """Ranks of the schedule."""
        return self.schedule.num_ranks

    @cached_property
    def by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank, in order of start."""
        rows: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            rows[span.rank].append(span)
        return tuple(map(tuple, rows))

    @cached_property
    def start(self) -> float:
        """The first start of all ranks. Raises CostError where the trace is empty."""
        return min(self._filled, key=lambda s: s.start).start

    @cached_property
    def end(self) -> float:
        """The last end of all ranks. Raises CostError where the trace is empty."""
        return max(self._filled, key=lambda s: s.end).end

    def _row(self, rank: int) -> tuple[Span, ...]:
        if rank not in range(self.num_ranks):
            raise SizeError(f"the trace of {self.schedule.name!r} has ranks 0 to {self.num_ranks - 1}, got {rank!r}")
        return self.by_rank[rank]

    @property
    def _filled(self) -> tuple[Span, ...]:
        if not self.spans:
            raise CostError(f"the trace of {self.schedule.name!r} holds no spans, so it has no times")
        return self.spans

    @property
    def makespan(self) -> float:
        """Last end minus first start, over all ranks."""
        return self.end - self.start

    def busy(self, rank: int) -> float:
        """Time that `rank` spends on actions. Raises SizeError for a rank that there is not."""
        return math.fsum(span.duration for span in self._row(rank))

    def idle(self, rank: int) -> float:
        """Time between the trace's first start and last end that `rank` does not spend on actions."""
        return self.makespan - self.busy(rank)

    @cached_property
    def bubble_fraction(self) -> float:
        """Share of rank time spent idle between the first start and the last end, from 0 to 1.

        The denominator is makespan times ranks. Equal stages without communication give (p - 1) / (m + p - 1):
        Huang et al. 2019, section 2.3. Raises CostError where the trace is empty or takes no time.
        """
        whole = self.makespan * self.num_ranks
        if whole <= 0:
            raise CostError(f"the trace of {self.schedule.name!r} takes no time, so it has no bubble fraction")
        return (whole - math.fsum(map(self.busy, range(self.num_ranks)))) / whole

    @property
    def longest_rank_span(self) -> float:
        """The longest time that one rank takes from its own first start to its own last end. Raises CostError if empty.

        The cost that the zero-bubble papers quote for ZB-H2 and for their search: the next step of a rank need not wait
        for the others (Qi et al. 2023, section 4).
        """
        _ = self._filled  # raises
        return max(row[-1].end - row[0].start for row in self.by_rank if row)

    def ends(self) -> dict[str, float]:
        """When each action ended, counted from the first end of all, to the microsecond: {"0F0": 0, ...}.

        In a paced run the time is that of the emulated clock: `late`, by which a busy machine woke the rank too late,
        is taken off. So a paced run has exactly the ends of the simulation with the costs that paced it. Recomputed
        forwards are called "0F0 again". Raises CostError where the trace is empty.
        """
        on_clock = {span.name: span.end - span.late for span in self._filled}
        first = min(on_clock.values())
        return {name: round(end - first, 6) for name, end in on_clock.items()}

    def idle_by_phase(self, rank: int) -> IdleByPhase:
        """Idle time of `rank` before its first backward (warmup), after its last forward (cooldown), and between."""
        row = [s for s in self._row(rank) if not s.recompute]
        first_backward = min((s.start for s in row if s.action.kind in (Kind.B, Kind.I)), default=self.end)
        last_forward = max((s.end for s in row if s.action.kind is Kind.F), default=self.start)
        cooldown_from = max(first_backward, last_forward)

        def idle(begin: float, end: float) -> float:
            inside = (min(s.end, end) - max(s.start, begin) for s in self.by_rank[rank])
            return (end - begin) - math.fsum(t for t in inside if t > 0)

        return IdleByPhase(
            idle(self.start, first_backward), idle(first_backward, cooldown_from), idle(cooldown_from, self.end)
        )

    def critical_path(self) -> tuple[Span, ...]:
        """The chain of spans that sets the makespan, first to last: each began when the one before let it.

        A span began when its rank was free or when its message came, whichever was later; the recomputation for a
        backward may have waited for that one's message. Stepping from span to span, back from the last end, gives the
        path.
        """
        by_action = {(s.action, s.recompute): s for s in self.spans}
        pairs = [pair for row in self.by_rank for pair in pairwise(row)]
        before, after = {span: previous for previous, span in pairs}, dict(pairs)
        came = {message.reader: message for message in self.messages}
        path = [max(self._filled, key=lambda s: s.end)]
        while True:
            span = path[-1]
            previous = before.get(span)
            message = came.get(after[span].action if span.recompute else span.action)
            if span.recompute and message is not None and message.arrived > span.start:
                message = None  # it recomputed early
            if message is not None and (previous is None or message.arrived > previous.end):
                path.append(by_action[message.action, False])
            elif previous is not None:
                path.append(previous)
            else:
                return tuple(reversed(path))

    # --- Chrome trace event format, which Perfetto opens -------------------------------------------------------------

    def to_chrome(
        self, path: str | Path, *, counters: dict[str, Sequence[Sequence[tuple[float, float]]]] | None = None
    ) -> None:
        """Write the trace as JSON that Perfetto and chrome://tracing open: a row a rank, an arrow a message.

        One unit of time is written as one second. `counters` adds curves: a name, and for each rank (time, value)
        pairs, as `memory_curve(trace, ...).pairs()` gives them.
        """
        import json

        with Path(path).open("w") as file:
            other = {"otherData": {"note": self.note}} if self.note else {}
            events = self._chrome_events(counters or {})
            json.dump({"displayTimeUnit": "ms", "traceEvents": events} | other, file)

    def _chrome_events(self, counters: dict[str, Sequence[Sequence[tuple[float, float]]]]) -> list[dict[str, Any]]:
        def event(phase: str, name: str, rank: int, **fields: Any) -> dict[str, Any]:
            # Perfetto takes process 0 and thread 0 for the kernel's idle task, and would merge ranks 0 and 1
            return {"ph": phase, "name": name, "pid": 1, "tid": rank + 1, **fields}

        def at(time: float) -> float:
            return (time - self.start) * 1e6

        events = [event("M", "process_name", 0, args={"name": f"{self.schedule.name} ({self.source})"})]
        for rank in range(self.num_ranks):
            events.append(event("M", "thread_name", rank, args={"name": f"rank {rank}"}))
            events.append(event("M", "thread_sort_index", rank, args={"sort_index": rank}))
        for span in self.spans:
            stage, kind, microbatch = span.action
            args = {"stage": stage, "microbatch": microbatch, "late_s": span.late, "version": span.version}
            times = {"ts": at(span.start), "dur": span.duration * 1e6}
            events.append(event("X", span.name, span.rank, cat=kind.value, **times, args=args))
        spans = {(s.action, s.recompute): s for s in self.spans}
        for number, message in enumerate(self.messages):
            sent, read = spans[message.action, False], spans[message.reader, False]
            # a flow is tied to the slice around its time stamp, so it leaves inside the sender's slice
            leaves = min(message.sent, sent.start + 0.999 * sent.duration)
            name, flow = str(message.action), {"cat": "message", "id": number}
            events.append(event("s", name, message.sender, ts=at(leaves), args={"bytes": message.bytes}, **flow))
            events.append(event("f", name, message.receiver, ts=at(read.start), bp="e", **flow))
        for name, curves in counters.items():
            for rank, curve in enumerate(curves):
                title = f"{name}, rank {rank}"
                events += [event("C", title, rank, ts=at(time), args={name: value}) for time, value in curve]
        return events

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """In a notebook a trace is a picture; the text behind it has no times of a run, for they differ every time."""
        from pipelab.gantt import show

        run = f"<Trace of {self.schedule.name}, {self.source}: {self.num_ranks} ranks, {len(self.spans)} spans>"
        return show(self, repr(self) if self.source == "simulated" else run)

    def __repr__(self) -> str:
        if not self.spans or not self.makespan:
            why = "takes no time" if self.spans else "empty"
            return f"<Trace of {self.schedule.name}, {self.source}: {why}>"
        return (
            f"<Trace of {self.schedule.name}, {self.source}: {self.num_ranks} ranks, makespan {self.makespan:.6g}, "
            f"bubble {self.bubble_fraction:.1%} of makespan x ranks>"
        )
