"""Which version of its weights every action uses, over time or as a map: stale weights, made visible."""

from __future__ import annotations

import math
from typing import Any

from pipelab import palette
from pipelab.action import Action, Kind
from pipelab.axes import HALF, Axes, at_the_right, frame, ink_on_paper, legend_below, name_rows, new_axes, titles
from pipelab.captions import drawable, unit_of
from pipelab.errors import ScheduleError
from pipelab.schedule import Schedule
from pipelab.trace import Span, Trace
from pipelab.versions import gradient_ages, stashed_versions, weight_versions

# light, so that black reads on each; neighbours differ in lightness too
_COLOURS = ("#e8e8ea", "#8ec1e8", "#f6d58a", "#7fcbb0", "#f3b79a", "#b9a7dc", "#d9e08a")


@ink_on_paper
def version_plot(trace: Trace, rule: str = "stashing", ax: Axes | None = None) -> Axes:
    """Draw `trace` with a colour for each version of a stage's weights, used by `rule` (see `weight_versions`).

    In a bar: what it does for which micro-batch, and below it the version, by number of updates. An update is a black
    line. Outlined: a backward with other weights than its forward's. At the right: the versions that a rank keeps at
    once, at the most. Raises ScheduleError where the rule has no answer, or where the trace is of a run by another one.
    """
    used = weight_versions(drawable(trace).schedule, rule)
    recorded = {s.action: s.version for s in trace.spans if s.version is not None and s.action.kind is not Kind.U}
    if recorded and recorded != used:
        raise ScheduleError(f"the run has used other weights than the rule {rule!r} says: name the rule of the run")
    if ax is None:
        (ax,) = new_axes([trace.num_ranks])
    frame(ax, trace.num_ranks, trace.makespan, unit_of(trace))
    at_the_right(ax, "kept", [str(count) for count in stashed_versions(trace.schedule, rule)])
    titles(ax, f"{trace.schedule.name}, weights by the rule {rule!r}", "a colour, a version")
    handles = {}
    for span in trace.spans:
        action = span.action
        if action.kind is Kind.U:
            style = {"facecolors": palette.INK, "edgecolors": palette.INK, "linewidth": 1.6, "zorder": 4}
            handles["U"] = _bar(ax, trace, span, label="U weight update", **style)
        elif not span.recompute:
            colour = _COLOURS[used[action] % len(_COLOURS)]
            _bar(ax, trace, span, facecolors=colour, edgecolors=palette.PAPER, linewidth=0.6)
            middle = (span.start + span.end) / 2 - trace.start
            room_pt = _width_pt(ax) * span.duration / trace.makespan
            _write(ax, middle, span.rank - 0.2, f"{action.kind}{action.microbatch}", "#000000", 6.5, room_pt)
            _write(ax, middle, span.rank + 0.17, str(used[action]), "#000000", 8.5, room_pt)
            if used[action] != used[action._replace(kind=Kind.F)]:
                style = {"facecolors": "none", "edgecolors": palette.MARK, "linewidth": 1.6, "zorder": 3}
                handles["mixed"] = _bar(ax, trace, span, label="other weights than in its forward", **style)
    legend_below(ax, list(handles.values()))
    return ax


@ink_on_paper
def version_map(schedule: Schedule, rule: str = "stashing", ax: Axes | None = None) -> Axes:
    """Draw a map without a clock: a row a stage, a column a micro-batch, the darker the later its gradient.

    In a cell: the version of its stage's weights that the forward uses, and behind an arrow the backward's where that
    is another one. Raises ScheduleError where the rule has no answer.
    """
    used, ages = weight_versions(schedule, rule), gradient_ages(schedule, rule)
    if ax is None:
        (ax,) = new_axes([schedule.num_stages])
    latest = max(map(max, ages))
    m = schedule.num_microbatches
    room_pt = _width_pt(ax) / m
    cells: Any = ax.imshow(ages, cmap="Purples", vmin=0, vmax=max(4, latest), aspect="auto")
    for stage, row in enumerate(ages):
        for k, age in enumerate(row):
            versions = [used.get(Action(stage, kind, k)) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)]
            text = "→".join(dict.fromkeys(str(version) for version in versions if version is not None))
            ink = palette.ink_on(f"#{bytes(cells.to_rgba(age, bytes=True)[:3]).hex()}")
            _write(ax, k, stage, text, ink, 9, room_pt)
    shown = range(0, m, math.ceil(m / 32))
    ax.set_xticks(shown, map(str, shown), fontsize=9)
    name_rows(ax, "stage", schedule.num_stages)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("micro-batch", loc="left", fontsize=9.5)
    late = "no gradient is late" if not latest else f"gradients up to {latest} update{'s' * (latest > 1)} late"
    titles(ax, f"{schedule.name}, weights by the rule {rule!r}", late)
    return ax


def _bar(ax: Axes, trace: Trace, span: Span, **style: Any) -> Any:
    return ax.broken_barh([(span.start - trace.start, span.duration)], (span.rank - HALF, 2 * HALF), **style)


def _width_pt(ax: Axes) -> float:
    return 72 * float(ax.get_window_extent().width) / ax.figure.dpi


def _write(ax: Axes, x: float, y: float, text: str, ink: str, size: float, room_pt: float) -> None:
    """Write `text` in `size`, smaller where there are only `room_pt` points; not at all where nobody could read it."""
    size = min(size, room_pt / (0.72 * len(text)))
    if size >= 4.5:
        ax.text(x, y, text, ha="center", va="center", fontsize=size, color=ink)
