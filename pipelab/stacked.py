"""Pictures under one another on one time axis: several Gantts, or a Gantt and the memory that it takes."""

from __future__ import annotations

from collections.abc import Mapping

from pipelab.axes import Axes, ink_on_paper, legend_of, new_axes, titles
from pipelab.captions import drawable
from pipelab.errors import SizeError
from pipelab.gantt import gantt
from pipelab.memory import MemoryCurve, memory_curve
from pipelab.plots import memory_plot
from pipelab.trace import Trace


@ink_on_paper
def gantt_memory(trace: Trace, curve: MemoryCurve | None = None, *, unit: str = "micro-batches") -> tuple[Axes, Axes]:
    """Draw `trace`, and below it, on the same time axis, what every rank keeps.

    Without `curve` a forward keeps 1 and its backward lets it go, so the rows count micro-batches; with one, `unit`
    names what it counts, as in `memory_plot`. Gives the two axes.
    Raises CostError where the trace is empty, SizeError where the curve is of another number of ranks.
    """
    curve = memory_curve(drawable(trace), 1 / trace.schedule.stages_per_rank) if curve is None else curve
    above, below = new_axes([trace.num_ranks] * 2)
    gantt(trace, above)
    _join(above)
    memory_plot(curve, trace, below, unit=unit)
    titles(below, "what every rank keeps", below.get_title(loc="right"))
    kept = [area for area in below.collections if str(area.get_label()).startswith("kept")]
    splits = any(any(row) for row in curve.until_weight)
    legend_of(below, [trace], kept[: 1 + splits])
    return above, below


@ink_on_paper
def gantt_stack(traces: Mapping[str, Trace], *, unit: str | None = None) -> list[Axes]:
    """Draw `traces`, {title: trace}, under one another on one time axis, as long as the longest of them.

    All must be in one unit of time, which `unit` names, as in `gantt`. Gives the axes, from the top.
    Raises CostError where a trace is empty, SizeError where there is none.
    """
    if not isinstance(traces, Mapping) or not traces:
        raise SizeError("gantt_stack needs at least one trace: {title: trace}")
    axes = new_axes([trace.num_ranks for trace in traces.values()])
    for ax, (title, trace) in zip(axes, traces.items(), strict=True):
        gantt(trace, ax, title=title, unit=unit)
        if ax is not axes[-1]:
            _join(ax)
    axes[-1].set_xlim(0, max(trace.makespan for trace in traces.values()))
    legend_of(axes[-1], list(traces.values()))
    return axes


def _join(ax: Axes) -> None:
    """Leave names and numbers of the time axis, and the legend, to the picture below."""
    legend = ax.get_legend()
    if legend is not None:
        legend.remove()
    ax.set_xlabel("")
    ax.tick_params(labelbottom=False)
