"""What is happening at one moment of a trace: who works, what is under way, what is kept, and a sentence. No widget."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pipelab.action import Action, Kind
from pipelab.captions import COSTS_UNIT, drawable, time_unit, unit_of
from pipelab.dependencies import needs
from pipelab.trace import Message, Span, Trace


class Kept(NamedTuple):
    """An activation that a rank keeps: the whole, only the stage's `input` until it is recomputed, or what W needs."""

    stage: int
    microbatch: int
    form: Literal["whole", "input", "for W"]


@dataclass(frozen=True)
class Moment:
    """What is happening at `time`, in the trace's unit. `running` and `kept` have one entry a rank.

    Messages in `arrived` are there, but the action that needs them has not begun.
    """

    time: float
    running: tuple[Span | None, ...]
    in_flight: tuple[Message, ...]
    arrived: tuple[Message, ...]
    kept: tuple[tuple[Kept, ...], ...]
    sentence: str


class Film:
    """A trace that can be looked at moment by moment. Raises CostError where it is none, or empty, or takes no time."""

    def __init__(self, trace: Trace) -> None:
        self.trace = drawable(trace)
        self.events = tuple(sorted({t for span in trace.spans for t in (trace.start, span.start, span.end)}))
        self._starts = [[span.start for span in row] for row in trace.by_rank]
        self._kept = [list(_lives(row, trace.end)) for row in trace.by_rank]
        self._span_of = {span.action: span for span in trace.spans if not span.recompute}
        self._message_to = {message.reader: message for message in trace.messages}

    @property
    def most_kept(self) -> int:
        """How many activations the fullest rank keeps at its fullest moment."""
        return max(len(kept) for time in self.events for kept in self.at(time).kept)

    def at(self, time: float) -> Moment:
        """The moment `time`; what starts then has started, what ends then has ended."""
        running = tuple(self._running(rank, time) for rank in range(self.trace.num_ranks))
        messages = self.trace.messages
        return Moment(
            time,
            running,
            tuple(m for m in messages if m.sent <= time < m.arrived),
            tuple(m for m in messages if m.arrived <= time < self._span_of[m.reader].start),
            tuple(tuple(kept for begin, end, kept in lives if begin <= time < end) for lives in self._kept),
            self._sentence(time, running),
        )

    def _running(self, rank: int, time: float) -> Span | None:
        last = bisect_right(self._starts[rank], time) - 1
        if last < 0 or time >= self.trace.by_rank[rank][last].end:
            return None
        return self.trace.by_rank[rank][last]

    # --- words -------------------------------------------------------------------------------------------------------

    def _sentence(self, time: float, running: tuple[Span | None, ...]) -> str:
        """How many ranks work, and what the rank that stopped last is waiting for."""
        unit = unit_of(self.trace)
        scale, name = time_unit(unit, self.trace.makespan)
        now = f"At {(time - self.trace.start) * scale:.4g}{'' if unit == COSTS_UNIT else f' {name}'},"
        idle = [rank for rank, span in enumerate(running) if span is None]
        if time >= self.trace.end:
            return f"{now} everything is done."
        if not idle:
            return f"{now} every rank works."
        busy = len(running) - len(idle)
        work = f"{busy or 'none'} of {len(running)} ranks {'works' if busy <= 1 else 'work'}"
        last = max(idle, key=lambda rank: (self._stopped(rank, time), -rank))
        return f"{now} {work}; {self._why_idle(last, time)}."

    def _stopped(self, rank: int, time: float) -> float:
        ended = bisect_right(self._starts[rank], time) - 1
        return self.trace.by_rank[rank][ended].end if ended >= 0 else self.trace.start

    def _why_idle(self, rank: int, time: float) -> str:
        row = self.trace.by_rank[rank]
        coming = [span for span in row[bisect_right(self._starts[rank], time) :] if not span.recompute]
        if not coming:
            return f"rank {rank} is done"
        reader = coming[0].action
        for source in needs(reader, self.trace.schedule):
            message = self._message_to.get(reader)
            made = self._span_of[source]
            if made.rank != rank and (message.arrived if message else made.end) > time:
                what = "activation" if source.kind is Kind.F else "gradient"
                way = ", which is on its way" if message and message.sent <= time else ""
                return f"rank {rank} waits for the {what} of micro-batch {source.microbatch} from rank {made.rank}{way}"
        return f"rank {rank} has all that it needs for {reader} and starts it soon"


def _lives(row: tuple[Span, ...], end: float) -> Iterator[tuple[float, float, Kept]]:
    """From when to when a rank keeps which activation; as in pipelab.memory, but one by one."""
    at = {(span.action, span.recompute): span for span in row}

    def find(kind: Kind, of: Action, recompute: bool = False) -> Span | None:
        return at.get((of._replace(kind=kind), recompute))

    for span in row:
        if span.action.kind is not Kind.F or span.recompute:
            continue
        stage, _, microbatch = span.action
        back = find(Kind.B, span.action) or find(Kind.I, span.action)
        again = find(Kind.F, span.action, recompute=True)
        weights = find(Kind.W, span.action)
        until = back.end if back else end
        if again:
            yield span.start, again.start, Kept(stage, microbatch, "input")
        yield (again or span).start, until, Kept(stage, microbatch, "whole")
        if weights:
            yield until, weights.end, Kept(stage, microbatch, "for W")
