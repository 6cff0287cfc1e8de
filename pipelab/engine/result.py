"""What a step returns: the ranks' reports, put together into one result with one trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipelab.action import Action, Kind
from pipelab.costs import Costs
from pipelab.engine.loss import whole
from pipelab.engine.recipe import Report
from pipelab.errors import EngineError
from pipelab.mesh import AXES, Mesh
from pipelab.schedule import Schedule
from pipelab.trace import Message, Span, Trace


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    `loss` is that of the whole batch before the update, or where updates are made on the way, of every micro-batch with
    the weights that it met. `trace` tells when every action ran, in seconds from the first one's start; its source is
    "measured", or "paced" on emulated accelerators; `began_s` is that start on the ranks' clock, `pipelab.ranks.now`.
    `sent_bytes` is the size of the tensors that each rank sent.
    `gradient_norm` is the norm over all ranks before clipping, where gradients are clipped.
    Where the pipeline measures memory, `peak_bytes` is the most that each rank had above its parameters and optimizer,
    messages included that wait for the word that they have arrived (see `pipelab.engine.channel`),
    and `held_bytes[r]` what rank r's stages held for later actions after each of its spans, `trace.by_rank[r]`: without
    messages and gradients of weights. Otherwise both are None.
    `too_busy`: on emulated accelerators, some action was late by more than its own time, so the machine could not keep
    real time, and the trace shows the machine rather than the schedule. `held_versions` is how many versions of its
    weights each rank had at once, at the most: 1 unless the schedule updates on the way. `skipped`: no rank has
    updated, because a gradient was not finite, as happens in float16.

    On a mesh tuples have an entry for each of its ranks, and `trace` is that of the pipeline at dp 0, tp 0; `traces`
    has all, by (dp, tp). `axis_bytes["tp"][r]` is what rank r sent along that axis: along "pp" its messages, and the
    gradients of weights that it shares with other stages; along "dp" and "tp" its collectives, counted as a ring sends
    them (see `pipelab.engine.collectives`). A few numbers a step, as norms and verdicts, are not counted.
    """

    loss: float
    trace: Trace
    sent_bytes: tuple[int, ...]
    peak_bytes: tuple[int, ...] | None = None
    held_bytes: tuple[tuple[int, ...], ...] | None = None
    gradient_norm: float | None = None
    too_busy: bool = False
    skipped: bool = False
    held_versions: tuple[int, ...] = ()
    axis_bytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    traces: Mapping[tuple[int, int], Trace] = field(default_factory=dict)
    began_s: float = 0.0

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
    schedule: Schedule, sources: Mapping[Action, Action], pace: Costs | None, mesh: Mesh, reports: Sequence[Report]
) -> StepResult:
    """One result from the reports of all ranks of the mesh, in rank order."""
    traces = {
        place: _trace(schedule, sources, pace, [reports[rank] for rank in ranks])
        for place, ranks in mesh.pipelines().items()
    }
    last = [reports[mesh.rank(dp=dp, pp=schedule.placement[-1])] for dp in range(mesh.dp)]
    peaks = tuple(report.peak_bytes for report in reports if report.peak_bytes is not None)
    sent = {axis: tuple(report.sent_bytes[axis] for report in reports) for axis in AXES}
    return StepResult(
        loss=whole([report.loss for report in last if report.loss is not None]),
        trace=traces[0, 0],
        traces=traces,
        began_s=_began(reports[rank] for rank in mesh.pipelines()[0, 0]),
        sent_bytes=sent["pp"],
        axis_bytes=sent,
        peak_bytes=peaks or None,
        held_bytes=tuple(tuple(report.held_bytes) for report in reports) if peaks else None,
        gradient_norm=last[0].gradient_norm,
        skipped=reports[0].skipped,
        held_versions=tuple(report.held_versions for report in reports),
        too_busy=pace is not None and any(_too_busy(trace.spans, pace, schedule) for trace in traces.values()),
    )


def _began(reports: Iterable[Report]) -> float:
    first: float = min(timing.start for report in reports for timing in report.timings)
    return first


def _trace(
    schedule: Schedule, sources: Mapping[Action, Action], pace: Costs | None, reports: Sequence[Report]
) -> Trace:
    """What the ranks of one pipeline did, on a clock that starts with the first of them."""
    zero = _began(reports)
    spans = tuple(
        Span(rank, timing.action, timing.start - zero, timing.end - zero, timing.recompute, timing.version, timing.late)
        for rank, report in enumerate(reports)
        for timing in report.timings
    )
    made = {timing.action: timing.end for report in reports for timing in report.timings if not timing.recompute}
    messages = tuple(
        Message(
            sources[arrival.reader],
            arrival.reader,
            schedule.placement[sources[arrival.reader].stage],
            rank,
            max(arrival.sent, made[sources[arrival.reader]]) - zero,  # a GPU is told to send what it has yet to make
            arrival.arrived - zero,
            arrival.bytes,
        )
        for rank, report in enumerate(reports)
        for arrival in report.arrivals
    )
    return Trace(schedule, spans, messages, "paced" if pace else "measured")


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
