"""Axes for pictures of ranks over time: rows, time axis, title, legend, the same under Gantts, curves and maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import matplotlib.pyplot as plt
from matplotlib import rcParams, rcParamsDefault
from matplotlib.axes import Axes as Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.style import library as style_sheets
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipelab import palette
from pipelab.action import Kind
from pipelab.captions import time_unit
from pipelab.trace import Trace

HALF = 0.42  # of a bar's height, in rows
_WIDTH_IN, _DPI = 10.0, 100
_LEFT_IN, _RIGHT_IN, _TOP_IN, _BOTTOM_IN = 0.72, 0.62, 0.5, 0.95  # around the bars; the top once more between two axes
_HIGH_IN = 8.0  # of many rows, so that they fit on a screen
_NAME_IN = 0.15  # of a row that has room for its name
_GAP_IN = 0.3  # at least, between the headline and the numbers beside it


P = ParamSpec("P")
R = TypeVar("R")
_USUAL = {name: rcParamsDefault[name] for name in style_sheets["dark_background"]}  # all that a dark style changes


def ink_on_paper(draw: Callable[P, R]) -> Callable[P, R]:
    """Let `draw` use our ink on our paper wherever it makes the figure, whatever style is in force.

    Axes that it is given have the colours of whoever made them, and keep them.
    """
    parameters = signature(draw)

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> R:
        found = parameters.bind_partial(*args, **kwargs).arguments
        if any(found.get(name) is not None for name in ("ax", "axes")):
            return draw(*args, **kwargs)
        before = {name: rcParams[name] for name in _USUAL}
        rcParams.update(_USUAL)
        try:
            return draw(*args, **kwargs)
        finally:  # these names and no others: the first figure in a kernel turns `interactive` on, which has to stay
            rcParams.update(before)

    return drawn


def new_axes(rows: Sequence[int], figure: Figure | None = None) -> list[Axes]:
    """Axes below one another that share the time, as many rows high as asked, on `figure` or a new one."""
    figure = plt.figure() if figure is None else figure
    row_in = 0.34 if max(rows) <= 8 else min(0.25, max(0.1, _HIGH_IN / max(rows)))
    heights = [row_in * max(n, 2) for n in rows]
    whole = sum(heights) + _TOP_IN * len(rows) + _BOTTOM_IN
    figure.set_size_inches(_WIDTH_IN, whole)
    figure.set_dpi(_DPI)
    figure.set_facecolor(palette.PAPER)
    left, width = _LEFT_IN / _WIDTH_IN, 1 - (_LEFT_IN + _RIGHT_IN) / _WIDTH_IN
    axes: list[Axes] = []
    top = whole
    for height in heights:
        top -= _TOP_IN + height
        share = axes[0] if axes else None
        axes.append(figure.add_axes((left, top / whole, width, height / whole), sharex=share))
        axes[-1].tick_params(colors=palette.INK)  # ticks are made when they are drawn, by the style of then
    return axes


def titles(ax: Axes, left: str, right: str) -> None:
    """The headline, and the numbers beside it; a line above them where they would touch."""
    texts = (
        ax.set_title(left, loc="left", fontsize=11, fontweight="bold"),
        ax.set_title(right, loc="right", fontsize=9.5),
    )
    if sum(text.get_window_extent().width for text in texts) + _GAP_IN * ax.figure.dpi > ax.get_window_extent().width:
        ax.set_title(f"{left}\n", loc="left", fontsize=11, fontweight="bold")


def frame(ax: Axes, num_ranks: int, longest: float, unit: str) -> None:
    """Rows for the ranks, rank 0 on top, over a time axis from 0 to `longest`."""
    ax.set_facecolor(palette.PAPER)
    ax.set_xlim(0, longest)
    ax.set_ylim(num_ranks - 0.5, -0.5)
    name_rows(ax, "rank", num_ranks)
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)
    scale, name = time_unit(unit, longest)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda time, _: f"{time * scale:.6g}"))
    ax.set_xlabel(f"time ({name})", loc="left", fontsize=9.5)


def name_rows(ax: Axes, noun: str, rows: int) -> None:
    """`rank 0`, `rank 1`, ... left of the rows."""
    named = _named(ax, rows)
    ax.set_yticks(named, [f"{noun} {row}" for row in named], fontsize=9)


def _named(ax: Axes, rows: int) -> range:
    """Every row, or as many of them as have room for a name."""
    height_in = ax.get_window_extent().height / ax.figure.dpi
    return range(0, rows, max(1, math.ceil(_NAME_IN * rows / height_in)))


def at_the_right(ax: Axes, head: str, texts: Sequence[str]) -> None:
    """A column right of the rows: `head`, and the text of every rank whose row is named."""
    style: dict[str, Any] = {"transform": ax.get_yaxis_transform(), "fontsize": 8.5, "color": palette.PALE_INK}
    ax.text(1.008, -0.62, head, va="bottom", **style)
    for rank in _named(ax, len(texts)):
        ax.text(1.008, rank, texts[rank], va="center", **style)


def legend_of(ax: Axes, traces: Sequence[Trace], extra: Iterable[Any] = ()) -> None:
    """Which letter has which colour in `traces`, and `extra` handles behind, in one row below the axes."""
    kinds = {span.action.kind for trace in traces for span in trace.spans}
    swatches = [
        Patch(facecolor=palette.COLOURS[kind], label=f"{kind.value} {palette.NAMES[kind]}")
        for kind in Kind
        if kind in kinds
    ]
    depths = max(trace.schedule.stages_per_rank for trace in traces)
    if depths > 1:
        swatches.append(Patch(facecolor=palette.shade(Kind.F, depths - 1, depths), label="a rank's later stage"))
    if any(span.recompute for trace in traces for span in trace.spans):
        swatches.append(
            Patch(label="F again", facecolor=palette.COLOURS[Kind.F], edgecolor=palette.PAPER, hatch="xxxx")
        )
    swatches.append(Patch(label="idle", facecolor=palette.IDLE, edgecolor=palette.IDLE_HATCH, hatch="////"))
    legend_below(ax, [*swatches, *extra])


def legend_below(ax: Axes, handles: Sequence[Any]) -> None:
    """Right of the time axis' name where there is room, else in rows below it; none where there are no handles."""
    if not handles:
        return
    box = ax.get_window_extent()
    width, height = box.width / ax.figure.dpi, box.height / ax.figure.dpi
    room = [0.42 + 0.074 * len(handle.get_label()) for handle in handles]  # inches
    beside = sum(room) < width - 1.9
    ax.legend(
        handles=handles,
        loc="upper right" if beside else "upper left",
        bbox_to_anchor=(1, -0.31 / height) if beside else (0, -0.55 / height),
        ncols=math.ceil(len(handles) / math.ceil(sum(room) / width)),
        frameon=False,
        fontsize=9,
        handlelength=1.4,
        columnspacing=1.2,
        handletextpad=0.5,
        borderpad=0,
        borderaxespad=0,
    )
