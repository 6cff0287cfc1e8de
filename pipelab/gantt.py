"""Trace → matplotlib axes: a row a rank, ranks from the top, a bar an action.

All bars of a picture are one PolyCollection: hundreds of patches would take most of a second. Times start at 0, the
trace's first start, and stay in its unit.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from io import BytesIO
from itertools import pairwise
from typing import Any

from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from pipelab import palette
from pipelab.axes import HALF, Axes, at_the_right, frame, ink_on_paper, legend_of, new_axes, titles
from pipelab.captions import drawable, headline, shares, unit_of
from pipelab.dependencies import needs
from pipelab.errors import CostError, SizeError
from pipelab.trace import Span, Trace

_FONTS = (9.0, 8.0, 7.0, 6.0)  # points; a number that does not fit in the last is left out
_MOST_BARS = 10_000  # more than 10 inches at 100 dpi can tell apart; a cell should not wait seconds for a picture

_Box = tuple[float, float, float]  # row, start, end


@ink_on_paper
def gantt(
    trace: Trace,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    unit: str | None = None,
    critical_path: bool = False,
    arrows_of: int | None = None,
) -> Axes:
    """Draw `trace`: every action a bar with its micro-batch's number, idle time hatched, its share written out.

    `unit` names the time axis: seconds (as ms or µs where they are short) for a run, the costs' unit for a simulation.
    `critical_path` outlines the chain of actions that sets the makespan; `arrows_of` draws the messages of that
    micro-batch and fades the others. A stage further along on the same rank is lighter.
    Raises CostError where there is no trace, or an empty one; SizeError where `arrows_of` names no micro-batch.
    """
    microbatches = drawable(trace).schedule.num_microbatches
    if arrows_of is not None and arrows_of not in range(microbatches):
        raise SizeError(f"arrows_of names micro-batch {arrows_of!r}, but there are {microbatches} (from 0)")
    unit = unit or unit_of(trace)
    if ax is None:
        (ax,) = new_axes([trace.num_ranks])
    _draw(ax, trace, unit, trace.makespan, lit=arrows_of)
    titles(ax, title or headline(trace), shares(trace, unit))
    extra: list[Any] = []
    if critical_path:
        extra += _critical_path(ax, trace)
    if arrows_of is not None:
        extra += _arrows(ax, trace, arrows_of)
    legend_of(ax, [trace], extra)
    return ax


@ink_on_paper
def gantt_compare(
    predicted: Trace,
    measured: Trace,
    axes: Sequence[Axes] | None = None,
    *,
    unit: str | None = None,
    tolerance: float = 0.05,
) -> tuple[Axes, Axes]:
    """Draw `predicted` above `measured` on one time axis, and mark where they differ.

    A dashed line carries the end of `predicted` down. Where both are of one schedule, every action that ends later than
    predicted by more than `tolerance` (a share of the predicted makespan) is outlined, and the title counts them.
    Both must be in one unit of time: simulate with the costs that paced the run, or with measured ones.
    Raises CostError where the makespans differ more than 50 times, for then their units do.
    """
    unit = unit or unit_of(drawable(measured))
    if not 1 / 50 < measured.makespan / drawable(predicted).makespan < 50:
        raise CostError(
            f"the makespans are {predicted.makespan:.4g} ({predicted.source}) and {measured.makespan:.4g} "
            f"({measured.source}), so the two are not in one unit of time: simulate with costs in seconds"
        )
    above, below = axes if axes is not None else new_axes([predicted.num_ranks, measured.num_ranks])
    longest = max(predicted.makespan, measured.makespan)
    for ax, trace in ((above, predicted), (below, measured)):
        _draw(ax, trace, unit, longest)
        titles(ax, headline(trace), shares(trace, unit))
        end = ax.axvline(predicted.makespan, color=palette.MARK, linewidth=1.2, linestyle=(0, (4, 2)), zorder=5)
        end.set_clip_on(False)  # often it is where the axis ends
    above.tick_params(labelbottom=False)
    above.set_xlabel("")
    extra: list[Any] = [Line2D([], [], color=palette.MARK, linestyle=(0, (4, 2)), label=f"{predicted.source} end")]
    if predicted.schedule == measured.schedule:
        late = _later(predicted, measured, tolerance * predicted.makespan)
        label = f"late by over {100 * tolerance:g} % of makespan: {len(late)} of {len(measured.spans)}"
        extra.append(_outline(below, measured, late, label))
    legend_of(below, [predicted, measured], extra)
    return above, below


@ink_on_paper
def gantt_png(trace: Trace, **options: Any) -> bytes:
    """The picture that `gantt(trace, **options)` draws, as a PNG file; opens no window and leaves no figure behind."""
    figure, file = Figure(), BytesIO()
    gantt(trace, *new_axes([trace.num_ranks], figure), **options)
    figure.savefig(file, format="png", bbox_inches="tight", metadata={"Software": None})
    return file.getvalue()


def show(trace: Trace, text: str, **options: Any) -> dict[str, str]:
    """What a notebook stores for `trace`: picture and `text`; text alone where there is nothing or too much to draw."""
    if len(trace.spans) > _MOST_BARS:
        return {"text/plain": text}
    try:
        picture = gantt_png(trace, **options)
    except CostError:  # no spans, or no time
        return {"text/plain": text}
    return {"image/png": b64encode(picture).decode(), "text/plain": text}


# --- the parts of a picture ------------------------------------------------------------------------------------------


def _draw(ax: Axes, trace: Trace, unit: str, longest: float, *, lit: int | None = None) -> None:
    """Axes, idle time, bars and numbers of one trace; `lit` is the only micro-batch that is not faded."""
    ranks = range(trace.num_ranks)
    frame(ax, trace.num_ranks, longest, unit)
    at_the_right(ax, "idle", [f"{100 * trace.idle(rank) / trace.makespan:.0f} %" for rank in ranks])
    whole = [(rank, trace.start, trace.end) for rank in ranks]
    idle = _boxes(trace, whole, facecolors=palette.IDLE, edgecolors=palette.IDLE_HATCH, linewidths=0, hatch="////")
    ax.add_collection(idle, autolim=False)
    narrow = 4 * longest / ax.get_window_extent().width  # as long as 4 pixels
    for again in (False, True):
        spans = [span for span in trace.spans if span.recompute is again]
        if spans:
            ax.add_collection(_bars(trace, spans, lit, narrow), autolim=False)
    _numbers(ax, trace, longest, lit)


def _bars(trace: Trace, spans: Sequence[Span], lit: int | None, narrow: float) -> PolyCollection:
    again, of_stage = spans[0].recompute, palette.stage_colours(trace.schedule)
    colours = [of_stage[span.action.stage, span.action.kind] for span in spans]
    if lit is not None:
        colours = [c if s.action.microbatch == lit else palette.faded(c) for s, c in zip(spans, colours, strict=True)]
    return _boxes(
        trace,
        [(span.rank, span.start, span.end) for span in spans],
        facecolors=colours,
        # an action that takes no time is a line
        edgecolors=[palette.PAPER if s.duration else colour for s, colour in zip(spans, colours, strict=True)],
        linewidths=[2.0 if not s.duration else 0.6 if s.duration > narrow else 0.2 for s in spans],
        hatch="xxxx" if again else None,
        label="recomputation" if again else "actions",
    )


def _boxes(trace: Trace, boxes: Iterable[_Box], **style: Any) -> PolyCollection:
    """One collection of boxes, in rows; times count from the trace's first start."""
    zero = trace.start
    corners = [
        [
            (start - zero, row - HALF),
            (end - zero, row - HALF),
            (end - zero, row + HALF),
            (start - zero, row + HALF),
        ]
        for row, start, end in boxes
    ]
    return PolyCollection(corners, **style)


def _numbers(ax: Axes, trace: Trace, longest: float, lit: int | None) -> None:
    """Write the micro-batch into every bar that has room for it: in the largest size that most bars have room for, in
    those that have less room smaller."""
    box = ax.get_window_extent()
    pixels_per_time, row_pixels = box.width / longest, box.height / trace.num_ranks
    digits = len(str(trace.schedule.num_microbatches - 1))
    shown = [s for s in trace.spans if s.duration and not s.recompute and lit in (None, s.action.microbatch)]
    widths = [span.duration * pixels_per_time for span in shown]

    def fits(width: float, size: float) -> bool:
        pixels = size * ax.figure.dpi / 72
        return width > 0.66 * pixels * digits + 2 and row_pixels * 2 * HALF > pixels

    sizes = [f for f in _FONTS if sum(fits(w, f) for w in widths) > len(widths) / 2] or _FONTS[-1:]
    of_stage = palette.stage_colours(trace.schedule)
    for span, width in zip(shown, widths, strict=True):
        size = next((f for f in sizes if fits(width, f)), None)
        if size is not None:
            ax.text(
                (span.start + span.end) / 2 - trace.start,
                span.rank,
                str(span.action.microbatch),
                color=palette.ink_on(of_stage[span.action.stage, span.action.kind]),
                fontsize=size,
                ha="center",
                va="center_baseline",
            )


# --- what a picture points at ----------------------------------------------------------------------------------------


def _later(predicted: Trace, measured: Trace, tolerance: float) -> list[Span]:
    """The spans of `measured` that end more than `tolerance` after the same action of `predicted`."""
    end = {(s.action, s.recompute): s.end - predicted.start for s in predicted.spans}
    return [
        span
        for span in measured.spans
        if span.end - measured.start > end.get((span.action, span.recompute), float("inf")) + tolerance
    ]


def _outline(ax: Axes, trace: Trace, spans: Sequence[Span], label: str) -> PolyCollection:
    boxes = [(span.rank, span.start, span.end) for span in spans]
    marked = _boxes(trace, boxes, facecolors="none", edgecolors=palette.MARK, linewidths=1.6, zorder=4, label=label)
    ax.add_collection(marked, autolim=False)
    return marked


def _critical_path(ax: Axes, trace: Trace) -> list[Any]:
    path, zero = trace.critical_path(), trace.start
    outline = _outline(ax, trace, path, "critical path")
    steps = [[(a.end - zero, a.rank), (b.start - zero, b.rank)] for a, b in pairwise(path) if a.rank != b.rank]
    ax.add_collection(LineCollection(steps, colors=palette.MARK, linewidths=1.6, zorder=4), autolim=False)
    return [outline]


def _arrows(ax: Axes, trace: Trace, microbatch: int) -> list[Any]:
    """An arrow from every action of `microbatch` to the one on another rank that needs it."""
    spans = {span.action: span for span in trace.spans if not span.recompute}
    flight = {message.reader: (message.sent, message.arrived) for message in trace.messages}
    for action, span in spans.items():
        if action.microbatch != microbatch:
            continue
        for source in needs(action, trace.schedule):
            if spans[source].rank != span.rank:
                sent, arrived = flight.get(action, (spans[source].end, span.start))
                ax.annotate(
                    "",
                    xy=(arrived - trace.start, span.rank),
                    xytext=(sent - trace.start, spans[source].rank),
                    arrowprops={"arrowstyle": "-|>", "color": palette.MARK, "shrinkA": 0, "shrinkB": 0},
                    zorder=5,
                )
    return [Line2D([], [], color=palette.MARK, marker=">", markersize=5, label=f"messages of micro-batch {microbatch}")]
