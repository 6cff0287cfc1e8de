"""What a step returns: the ranks' reports, put together into one result with one trace."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelab.action import Action, Kind
from pipelab.costs import Costs
from pipelab.engine.resident import Report
from pipelab.errors import EngineError
from pipelab.schedule import Schedule
from pipelab.trace import Message, Span, Trace


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    `loss` is that of the whole batch before the update. `trace` tells when every action ran, in seconds from the first
    one's start; its source is "measured", or "paced" on emulated accelerators. `sent_bytes` is the size of the tensors
    that each rank sent. `gradient_norm` is the norm over all ranks before clipping, where gradients are clipped.
    Where the pipeline measures memory, `peak_bytes` is the most that each rank had above its parameters and optimizer,
    and `held_bytes[r]` what rank r's stages held for later actions after each of its spans, `trace.by_rank[r]`: without
    messages and gradients of weights. Otherwise both are None.
    `too_busy`: on emulated accelerators, some action was late by more than its own time, so the machine could not keep
    real time, and the trace shows the machine rather than the schedule. `held_versions` is how many versions of its
    weights each rank had at once, at the most: 1 unless the schedule updates on the way.
    """

    loss: float
    trace: Trace
    sent_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...] | None = None
    held_bytes: tuple[tuple[int, ...], ...] | None = None
    gradient_norm: float | None = None
    too_busy: bool = False
    held_versions: tuple[int, ...] = ()

    @property
    def versions(self) -> dict[Action, int]:
        """The version of its weights that every F, B, I and W found, as the ranks counted their updates (U)."""
        return {
            span.action: span.version
            for span in self.trace.spans
            if span.version is not None and span.action.kind is not Kind.U and not span.recompute
        }

    def __repr__(self) -> str:
        busy = ", machine too busy: late by more than an action" if self.too_busy else ""
        return f"<StepResult: loss {self.loss:.6g}, {self.trace.source} makespan {self.trace.makespan:.4g} s{busy}>"


def put_together(
    schedule: Schedule, sources: Mapping[Action, Action], pace: Costs | None, reports: Sequence[Report]
) -> StepResult:
    """One result from the reports of all ranks, in rank order."""
    zero = min(timing.start for report in reports for timing in report.timings)
    spans = tuple(
        Span(rank, timing.action, timing.start - zero, timing.end - zero, timing.recompute, timing.version, timing.late)
        for rank, report in enumerate(reports)
        for timing in report.timings
    )
    messages = tuple(
        Message(
            sources[arrival.reader],
            arrival.reader,
            schedule.placement[sources[arrival.reader].stage],
            rank,
            arrival.sent - zero,
            arrival.arrived - zero,
            arrival.bytes,
        )
        for rank, report in enumerate(reports)
        for arrival in report.arrivals
    )
    last = reports[schedule.placement[-1]]
    assert last.loss is not None
    peaks = tuple(report.peak_bytes for report in reports if report.peak_bytes is not None)
    return StepResult(
        loss=last.loss,
        trace=Trace(schedule, spans, messages, "paced" if pace else "measured"),
        sent_bytes=tuple(report.sent_bytes for report in reports),
        peak_bytes=peaks or None,
        held_bytes=tuple(tuple(report.held_bytes) for report in reports) if peaks else None,
        gradient_norm=last.gradient_norm,
        held_versions=tuple(report.held_versions for report in reports),
        too_busy=pace is not None and _too_busy(spans, pace, schedule),
    )


def check_finite(loss: float, reports: Sequence[Report], last_rank: int) -> None:
    """Raise EngineError where something of a step is no number: with the step, and all ranks where it is so."""
    ranks = [rank for rank, report in enumerate(reports) if not report.finite]
    if ranks or not math.isfinite(loss):
        found = [f"the loss is {loss} (on rank {last_rank})"] if not math.isfinite(loss) else []
        found += [f"gradients are not finite on rank {', '.join(map(str, ranks))}"] if ranks else []
        raise EngineError(
            f"in step {reports[0].step}, counted from 0, {' and '.join(found)}. The optimizer has updated nothing, but "
            "BatchNorm's running statistics have seen this batch. Look at its values; nan='ignore' trains on"
        )


def _too_busy(spans: Sequence[Span], pace: Costs, schedule: Schedule) -> bool:
    times = pace.per_stage(schedule.num_stages)
    return any(0 < times[span.action.kind][span.action.stage] < span.late for span in spans)
