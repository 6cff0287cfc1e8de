"""Trace → matplotlib axes: a row a rank, ranks from the top, a bar an action.

All bars of a picture are one PolyCollection: hundreds of patches would take most of a second. Times start at 0, the
trace's first start, and stay in its unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipelab import palette
from pipelab.action import Kind
from pipelab.dependencies import needs
from pipelab.errors import CostError, SizeError
from pipelab.trace import Span, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WIDTH_IN, _DPI = 10.0, 100
_LEFT_IN, _RIGHT_IN, _TOP_IN, _BOTTOM_IN = 0.72, 0.62, 0.5, 0.72  # around the bars; the top once more between two axes
_HALF = 0.42  # half a bar's height, in rows
_FONTS = (9.0, 8.0, 7.0, 6.0)  # points; a number that does not fit in the last is left out
_COSTS = "units of the costs"

_Box = tuple[float, float, float]  # row, start, end


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
    Raises CostError where the trace is empty, SizeError where `arrows_of` names no micro-batch.
    """
    microbatches = trace.schedule.num_microbatches
    if arrows_of is not None and arrows_of not in range(microbatches):
        raise SizeError(f"arrows_of names micro-batch {arrows_of!r}, but there are {microbatches} (from 0)")
    if ax is None:
        (ax,) = _new_axes([trace.num_ranks])
    unit = unit or _unit_of(trace)
    _draw(ax, trace, unit, trace.makespan, lit=arrows_of)
    ax.set_title(title or _headline(trace), loc="left", fontsize=11, fontweight="bold")
    ax.set_title(_shares(trace, unit), loc="right", fontsize=9.5)
    extra: list[Any] = []
    if critical_path:
        extra += _critical_path(ax, trace)
    if arrows_of is not None:
        extra += _arrows(ax, trace, arrows_of)
    _legend(ax, [trace], extra)
    return ax


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
    if not 1 / 50 < measured.makespan / predicted.makespan < 50:
        raise CostError(
            f"the makespans are {predicted.makespan:.4g} ({predicted.source}) and {measured.makespan:.4g} "
            f"({measured.source}), so the two are not in one unit of time: simulate with costs in seconds"
        )
    above, below = axes if axes is not None else _new_axes([predicted.num_ranks, measured.num_ranks])
    unit = unit or _unit_of(measured)
    longest = max(predicted.makespan, measured.makespan)
    for ax, trace in ((above, predicted), (below, measured)):
        _draw(ax, trace, unit, longest)
        ax.set_title(_headline(trace), loc="left", fontsize=11, fontweight="bold")
        ax.set_title(_shares(trace, unit), loc="right", fontsize=9.5)
        ax.axvline(predicted.makespan, color=palette.MARK, linewidth=1.2, linestyle=(0, (4, 2)), zorder=5)
    above.tick_params(labelbottom=False)
    above.set_xlabel("")
    extra: list[Any] = [Line2D([], [], color=palette.MARK, linestyle=(0, (4, 2)), label=f"{predicted.source} end")]
    if predicted.schedule == measured.schedule:
        late = _later(predicted, measured, tolerance * predicted.makespan)
        label = f"ends later by over {100 * tolerance:g} % of it: {len(late)} of {len(measured.spans)}"
        extra.append(_outline(below, measured, late, label))
    _legend(below, [predicted, measured], extra)
    return above, below


# --- the parts of a picture ------------------------------------------------------------------------------------------


def _new_axes(rows: Sequence[int]) -> list[Axes]:
    """A figure 10 inches wide with axes below one another that share the time, as many rows high as asked."""
    row_in = 0.34 if max(rows) <= 8 else 0.25
    heights = [row_in * max(n, 2) for n in rows]
    whole = sum(heights) + _TOP_IN * len(rows) + _BOTTOM_IN
    figure = plt.figure(figsize=(_WIDTH_IN, whole), dpi=_DPI, facecolor=palette.PAPER)
    left, width = _LEFT_IN / _WIDTH_IN, 1 - (_LEFT_IN + _RIGHT_IN) / _WIDTH_IN
    axes: list[Axes] = []
    top = whole
    for height in heights:
        top -= _TOP_IN + height
        share = axes[0] if axes else None
        axes.append(figure.add_axes((left, top / whole, width, height / whole), sharex=share))
    return axes


def _draw(ax: Axes, trace: Trace, unit: str, longest: float, *, lit: int | None = None) -> None:
    """Axes, idle time, bars and numbers of one trace; `lit` is the only micro-batch that is not faded."""
    ranks = range(trace.num_ranks)
    ax.set_facecolor(palette.PAPER)
    ax.set_xlim(0, longest)
    ax.set_ylim(trace.num_ranks - 0.5, -0.5)
    ax.set_yticks(ranks, [f"rank {rank}" for rank in ranks], fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    scale, name = _time_unit(unit, longest)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{time * scale:.6g}"))
    ax.set_xlabel(f"time ({name})", loc="left", fontsize=9.5)
    for rank in ranks:
        share = f"{100 * trace.idle(rank) / trace.makespan:.0f} %"
        ax.text(1.008, rank, share, transform=ax.get_yaxis_transform(), va="center", fontsize=8.5, color=palette.INK)
    ax.text(1.008, -0.62, "idle", transform=ax.get_yaxis_transform(), va="bottom", fontsize=8.5, color=palette.INK)

    whole = [(rank, trace.start, trace.end) for rank in ranks]
    idle = _boxes(trace, whole, facecolors=palette.IDLE, edgecolors=palette.IDLE_HATCH, linewidths=0, hatch="////")
    ax.add_collection(idle, autolim=False)
    for again in (False, True):
        spans = [span for span in trace.spans if span.recompute is again]
        if spans:
            ax.add_collection(_bars(trace, spans, lit), autolim=False)
    _numbers(ax, trace, longest, lit)


def _bars(trace: Trace, spans: Sequence[Span], lit: int | None) -> PolyCollection:
    depth = {s: d for rank in range(trace.num_ranks) for d, s in enumerate(trace.schedule.stages_on(rank))}
    depths = trace.schedule.stages_per_rank
    colours = [
        palette.faded(colour) if lit not in (None, span.action.microbatch) else colour
        for span in spans
        for colour in [palette.shade(span.action.kind, depth[span.action.stage], depths)]
    ]
    again = spans[0].recompute
    return _boxes(
        trace,
        [(span.rank, span.start, span.end) for span in spans],
        facecolors=colours,
        edgecolors=palette.PAPER,
        linewidths=0.6,
        hatch="xxxx" if again else None,
        label="recomputation" if again else "actions",
    )


def _boxes(trace: Trace, boxes: Iterable[_Box], **style: Any) -> PolyCollection:
    """One collection of boxes, in rows; times count from the trace's first start."""
    zero = trace.start
    corners = [
        [
            (start - zero, row - _HALF),
            (end - zero, row - _HALF),
            (end - zero, row + _HALF),
            (start - zero, row + _HALF),
        ]
        for row, start, end in boxes
    ]
    return PolyCollection(corners, **style)


def _numbers(ax: Axes, trace: Trace, longest: float, lit: int | None) -> None:
    """Write the micro-batch into every bar that has room for it, in the largest size that most bars have room for."""
    box = ax.get_window_extent()
    pixels_per_time, row_pixels = box.width / longest, box.height / trace.num_ranks
    digits = len(str(trace.schedule.num_microbatches - 1))
    shown = [s for s in trace.spans if not s.recompute and lit in (None, s.action.microbatch)]
    widths = [span.duration * pixels_per_time for span in shown]

    def fits(width: float, size: float) -> bool:
        pixels = size * ax.figure.dpi / 72
        return width > 0.66 * pixels * digits + 1 and row_pixels * 2 * _HALF > pixels

    size = next((f for f in _FONTS if sum(fits(w, f) for w in widths) > 0.9 * len(widths)), _FONTS[-1])
    for span, width in zip(shown, widths, strict=True):
        if fits(width, size):
            ax.text(
                (span.start + span.end) / 2 - trace.start,
                span.rank,
                str(span.action.microbatch),
                color=palette.ink_on(palette.shade(span.action.kind)),
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


# --- words -----------------------------------------------------------------------------------------------------------


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"


def _headline(trace: Trace) -> str:
    microbatches = _counted(trace.schedule.num_microbatches, "micro-batch", "es")
    return f"{trace.schedule.name}, {_counted(trace.num_ranks, 'rank')}, {microbatches}: {trace.source}"


def _shares(trace: Trace, unit: str) -> str:
    scale, name = _time_unit(unit, trace.makespan)
    makespan = f"{trace.makespan * scale:.4g}{'' if unit == _COSTS else f' {name}'}"
    share = f"{100 * trace.bubble_fraction:.1f} %"
    return f"makespan {makespan}, bubble {share} of makespan × {_counted(trace.num_ranks, 'rank')}"


def _unit_of(*traces: Trace) -> str:
    """A run's clock counts seconds; a simulation's unit is whatever its costs were in."""
    return _COSTS if all(trace.source == "simulated" for trace in traces) else "s"


def _time_unit(unit: str, longest: float) -> tuple[float, str]:
    """What to multiply times with, and the unit's name: seconds are written as ms or µs where they are short."""
    if unit != "s" or longest >= 1:
        return 1.0, unit
    return (1e3, "ms") if longest >= 1e-3 else (1e6, "µs")


def _swatch(label: str, **style: Any) -> Patch:
    return Patch(label=label, **style)


def _legend(ax: Axes, traces: Sequence[Trace], extra: Iterable[Any]) -> None:
    """Which letter has which colour, in one row below the axes."""
    kinds = {span.action.kind for trace in traces for span in trace.spans}
    swatches = [
        _swatch(f"{kind.value} {palette.NAMES[kind]}", facecolor=palette.COLOURS[kind])
        for kind in Kind
        if kind in kinds
    ]
    depths = max(trace.schedule.stages_per_rank for trace in traces)
    if depths > 1:
        swatches.append(_swatch("a rank's later stage", facecolor=palette.shade(Kind.F, depths - 1, depths)))
    if any(span.recompute for trace in traces for span in trace.spans):
        swatches.append(_swatch("F again", facecolor=palette.COLOURS[Kind.F], edgecolor=palette.PAPER, hatch="xxxx"))
    swatches.append(_swatch("idle", facecolor=palette.IDLE, edgecolor=palette.IDLE_HATCH, hatch="////"))
    height = ax.get_window_extent().height / ax.figure.dpi
    ax.legend(
        handles=[*swatches, *extra],
        loc="upper right",
        bbox_to_anchor=(1, -0.31 / height),
        ncols=12,
        frameon=False,
        fontsize=9,
        handlelength=1.4,
        columnspacing=1.2,
        handletextpad=0.5,
        borderpad=0,
        borderaxespad=0,
    )
