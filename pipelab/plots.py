"""Curves beside the Gantt: memory over time, the bubble over the number of micro-batches, anything over anything.

They stand on the axes that `pipelab.axes` makes, so the words, the ranks and the time axis are the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipelab import palette
from pipelab.action import Kind
from pipelab.axes import Axes, at_the_right, frame, ink_on_paper, legend_below, new_axes, titles
from pipelab.captions import drawable, headline, unit_of
from pipelab.errors import SizeError
from pipelab.memory import MemoryCurve
from pipelab.trace import Trace

if TYPE_CHECKING:
    from pipelab.planner import Plan

_HIGH = 0.86  # of a row, for the fullest moment of all ranks
_KEPT, _KEPT_FOR_W = "#4d7ea8", "#c9b3bf"
# Okabe and Ito 2008, each with a mark and dashes of its own, for readers without colours
_LOOKS = (
    ("#0072b2", "o", "-"),
    ("#d55e00", "s", (0, (5, 1.5))),
    ("#009e73", "^", (0, (1.5, 1.5))),
    ("#cc79a7", "D", (0, (5, 1.5, 1.5, 1.5))),
    ("#000000", "v", "-"),
    ("#56b4e9", "P", (0, (5, 1.5))),
    ("#e69f00", "X", (0, (1.5, 1.5))),
)
_BARS_AN_IN, _LETTERS_AN_IN = 4, 10  # more leave no room for their values, or for names beside one another
_PREFIXES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))


@ink_on_paper
def memory_plot(
    curve: MemoryCurve, trace: Trace, ax: Axes | None = None, *, unit: str = "bytes", limit: float | None = None
) -> Axes:
    """Draw what every rank of `trace` keeps over time: a row a rank, all on one scale, each rank's peak at the right.

    The lighter part, on top, waits for W alone. `unit` names what the curve counts ("bytes" become kB, MB or GB);
    `limit` draws a dashed line at that much. Raises SizeError where the curve is of another number of ranks.
    """
    if len(curve.times) != drawable(trace).num_ranks:
        raise SizeError(f"the curve is of {len(curve.times)} ranks, the trace of {trace.num_ranks}")
    if ax is None:
        (ax,) = new_axes([trace.num_ranks])
    frame(ax, trace.num_ranks, trace.makespan, unit_of(trace))
    fullest = max(max(curve.peak), limit or 0.0) or 1.0
    scale, name = _prefix(fullest) if unit == "bytes" else (1.0, unit)
    parts: list[Any] = []
    kinds = {span.action.kind for span in trace.spans}
    readers = " or ".join(kind.value for kind in (Kind.B, Kind.I) if kind in kinds)
    for rank, times in enumerate(curve.times):
        floor = rank + 0.5
        heights = [_HIGH / fullest * kept for kept in curve.total[rank]]
        until_input = [_HIGH / fullest * kept for kept in curve.until_input[rank]]
        at = [time - trace.start for time in (*times, trace.end)]
        lower = [floor - height for height in (*until_input, *until_input[-1:])]
        upper = [floor - height for height in (*heights, *heights[-1:])]
        style: dict[str, Any] = {"step": "post", "linewidth": 0}
        parts = [
            ax.fill_between(at, floor, lower, color=_KEPT, label=f"kept for {readers}", **style),
            ax.fill_between(at, lower, upper, color=_KEPT_FOR_W, label="kept for W", **style),
        ]
        ax.axhline(floor, color=palette.INK, linewidth=0.5)
        if limit is not None:
            line = ax.axhline(floor - _HIGH * limit / fullest, color=palette.MARK, linewidth=1, linestyle=(0, (4, 2)))
            line.set_label(f"limit {limit / scale:.4g} {name}")
            parts.append(line)
    at_the_right(ax, "peak", [f"{peak / scale:.3g}" for peak in curve.peak])
    titles(ax, headline(trace), f"kept at the fullest moment: {max(curve.peak) / scale:.4g} {name}")
    splits = any(any(row) for row in curve.until_weight)
    legend_below(ax, parts if splits else [part for part in parts if part is not parts[1]])
    return ax


@ink_on_paper
def bubble_plot(
    curves: Mapping[str, Mapping[int, float]], ax: Axes | None = None, *, xlabel: str = "micro-batches"
) -> Axes:
    """Draw bubble fractions over micro-batches: `curves` holds {name: {micro-batches: bubble fraction}}.

    Every curve has its own colour, mark and dashes; the horizontal axis doubles in equal steps.
    Raises SizeError where there is nothing to draw.
    """
    percent = {name: {count: 100 * share for count, share in curve.items()} for name, curve in curves.items()}
    return line_plot(percent, ax, xlabel=xlabel, ylabel="bubble, % of makespan × ranks", doubling=True)


@ink_on_paper
def line_plot(
    curves: Mapping[str, Mapping[Any, float]],
    ax: Axes | None = None,
    *,
    xlabel: str,
    ylabel: str,
    doubling: bool = False,
    spread: Mapping[str, Mapping[Any, float]] | None = None,
) -> Axes:
    """Draw `curves`, {name: {x: y}}, each with a colour, a mark and dashes of its own.

    With `doubling` the horizontal axis doubles in equal steps, and every x is written below it. The vertical axis
    begins at 0 where nothing lies below. A curve of more than 24 points is drawn without marks. `spread`, {name: {x:
    half a height}}, draws a pale band around the curves that it names.
    Raises SizeError where there is nothing to draw.
    """
    if not (isinstance(curves, Mapping) and curves and all(isinstance(c, Mapping) and c for c in curves.values())):
        raise SizeError("a plot needs at least one curve, each with at least one point: {name: {x: y}}")
    if ax is None:
        (ax,) = new_axes([8])
    for number, (name, curve) in enumerate(curves.items()):
        colour, marker, dashes = _look(number)
        xs = sorted(curve)
        mark = marker if len(xs) <= 24 else ""
        ys = [curve[x] for x in xs]
        ax.plot(xs, ys, color=colour, marker=mark, linestyle=dashes, markersize=5, linewidth=1.6, label=name)
        if spread and name in spread:
            at = [x for x in xs if x in spread[name]]
            below, above = ([curve[x] + sign * spread[name][x] for x in at] for sign in (-1, 1))
            ax.fill_between(at, below, above, color=colour, alpha=0.15, linewidth=0)
    if doubling:
        counts = sorted({count for curve in curves.values() for count in curve})
        ax.set_xscale("log", base=2)
        ax.set_xticks(counts, [f"{count:g}" for count in counts])
        ax.minorticks_off()
    ax.set_xlabel(xlabel, loc="left", fontsize=9.5)
    if min(y for curve in curves.values() for y in curve.values()) >= 0:
        ax.set_ylim(0, None)
    ax.set_ylabel(ylabel, fontsize=9.5)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", color=palette.IDLE_HATCH, linewidth=0.6)
    ax.legend(frameon=False, fontsize=9, ncols=math.ceil(len(curves) / 8))
    return ax


def _look(number: int) -> tuple[str, str, Any]:
    """Colour, mark and dashes of a curve; when the colours begin again, they get other marks."""
    return _LOOKS[number % len(_LOOKS)][0], *_LOOKS[(number + number // len(_LOOKS)) % len(_LOOKS)][1:]


@ink_on_paper
def bar_plot(
    bars: Mapping[str, Sequence[float]],
    ax: Axes | None = None,
    *,
    ylabel: str,
    names: Sequence[str] | None = None,
    predicted: Mapping[str, Sequence[float]] | None = None,
) -> Axes:
    """Draw `bars`, {name: [value, ...]}: a group a place, a bar a name with its value above it.

    The places are rank 0, rank 1, ... unless `names` says otherwise. `predicted`, of the same form, marks with a line
    what was expected of a bar. Raises SizeError where there is nothing to draw, or rows and names are not equally long.
    """
    lengths = {len(row) for row in (*bars.values(), *(predicted or {}).values())}
    if len(lengths) != 1 or 0 in lengths:
        raise SizeError(f"a bar plot needs rows of one length, {{name: [value, ...]}}: got lengths {sorted(lengths)}")
    (places,) = lengths
    names = names or [f"rank {rank}" for rank in range(places)]
    if len(names) != places:
        raise SizeError(f"{len(names)} names for {places} groups of bars: {', '.join(names)}")
    if ax is None:
        (ax,) = new_axes([6])
    width_in = ax.get_window_extent().width / ax.figure.dpi
    width = 0.84 / len(bars)
    for number, (name, row) in enumerate(bars.items()):
        at = [place + (number - (len(bars) - 1) / 2) * width for place in range(places)]
        drawn = ax.bar(at, row, 0.92 * width, color=_look(number)[0], label=name)
        if len(bars) * places <= _BARS_AN_IN * width_in:
            ax.bar_label(drawn, fmt="%.3g", fontsize=8)
        if predicted and name in predicted:
            ends = [x - width / 2 for x in at], [x + width / 2 for x in at]
            ax.hlines(predicted[name], *ends, color=palette.MARK, linewidth=2, zorder=3)
    if predicted:
        ax.plot([], [], color=palette.MARK, linewidth=2, label="predicted")
    step = math.ceil(sum(map(len, names)) / (_LETTERS_AN_IN * width_in))
    ax.set_xticks(range(0, places, step), names[::step], fontsize=9)
    ax.tick_params(axis="x", length=0)
    ax.set_ylabel(ylabel, fontsize=9.5)
    below, above = ax.get_ylim()
    ax.set_ylim(min(0, below), 1.25 * above)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=9, ncols=len(bars) + bool(predicted), loc="upper center")
    return ax


def _prefix(largest: float) -> tuple[float, str]:
    return next(((size, name) for size, name in _PREFIXES if largest >= size), (1.0, "bytes"))


@ink_on_paper
def pareto_plot(plan: Plan, ax: Axes | None = None) -> Axes:
    """Draw every feasible choice of `plan`: memory of the fullest rank against throughput, a mark a schedule.

    The line joins the choices that no other beats in both; of those the leanest and the fastest are named.
    Raises PlanError where nothing is feasible.
    """
    best = plan.best
    if ax is None:
        (ax,) = new_axes([10])
    names = sorted({str(choice.candidate.schedule) for choice in plan})
    for name, (colour, marker, _) in zip(names, itertools.cycle(_LOOKS)):
        points = [c for c in plan if c.candidate.schedule == name]
        xs = [choice.memory_bytes / 1e9 for choice in points]
        ys = [choice.samples_per_s for choice in points]
        ax.plot(xs, ys, marker, color=colour, markersize=4, alpha=0.45, markeredgewidth=0, label=name)
    front = plan.pareto
    xs, ys = [c.memory_bytes / 1e9 for c in front], [c.samples_per_s for c in front]
    ax.plot(xs, ys, color=palette.INK, linewidth=1.2, drawstyle="steps-post", label="not beaten in both")
    limit = plan.question.hardware.memory_bytes / 1e9
    ax.axvline(limit, color=palette.MARK, linewidth=1.2, linestyle=(0, (4, 2)), label=f"limit {limit:g} GB")
    named = []
    for choice, word, marker in ((front[0], "leanest", "o"), (best, "fastest", "*")):
        c = choice.candidate
        named += ax.plot(
            *(choice.memory_bytes / 1e9, choice.samples_per_s, marker),
            color=palette.PAPER,
            markeredgecolor=palette.INK,
            markersize=8 if marker == "o" else 13,
            zorder=4,
            label=f"{word}: dp {c.dp} × tp {c.tp} × pp {c.pp}, {c.schedule}, remat {c.remat}, {c.sharding}",
        )
    ax.add_artist(ax.legend(handles=named, loc="upper left", frameon=False, fontsize=8.5, borderaxespad=0))
    ax.set_xlim(0, limit * 1.04)
    ax.set_ylim(0, 1.3 * max(choice.samples_per_s for choice in plan))
    ax.set_xlabel("memory of the fullest rank (GB)", loc="left", fontsize=9.5)
    ax.set_ylabel("samples a second", fontsize=9.5)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(color=palette.IDLE_HATCH, linewidth=0.6)
    hardware = plan.question.hardware
    titles(ax, f"{plan.name} on {hardware.gpus} GPUs", f"batch {plan.question.batch}, {len(plan):,} choices")
    legend_below(ax, [handle for handle in ax.get_legend_handles_labels()[0] if handle not in named])
    return ax
