"""Trace → SVG text: the live twin of `pipelab.gantt`, about a hundred times quicker to make.

Same colours, same words. Text and outlines take the page's own text colour (`currentColor`), so the picture reads in a
light and in a dark notebook; every bar says what it is when the pointer rests on it; the whole has a text alternative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

from pipelab import palette
from pipelab.action import Kind
from pipelab.captions import COSTS_UNIT, headline, in_words, shares, time_unit, unit_of
from pipelab.trace import Trace

WIDTH = 980
STRETCH = f"min-width:640px;max-width:{WIDTH}px;display:block"  # below 640 pixels nothing could be read
SCROLLS = {"overflow": "auto hidden"}  # the layout of what holds a picture, on a page that is narrower
WORDS_WRAP = "<style>.pl-ranks .widget-html-content, .pl-ran .widget-html-content {min-width: 0}</style>"  # there too
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 52, 30, 44  # pixels around the rows
_DIGIT = 6.4  # pixels a digit at 11 px


@dataclass(frozen=True)
class Grid:
    """Where times and ranks lie in the picture, in its own pixels."""

    num_ranks: int
    start: float
    longest: float

    @classmethod
    def of(cls, trace: Trace, until: float = 0.0) -> Grid:
        """The grid of `trace`, whose axis goes on to `until` where that is later. Raises CostError without spans."""
        return cls(trace.num_ranks, trace.start, max(trace.makespan, until))

    @property
    def row(self) -> int:
        """From one rank to the next."""
        return 28 if self.num_ranks <= 8 else 20

    @property
    def bar(self) -> int:
        """The height of a bar."""
        return self.row - 4

    @property
    def bottom(self) -> int:
        """Where the rows end."""
        return _TOP + self.row * self.num_ranks

    @property
    def height(self) -> int:
        """Of the whole picture, with its axis and legend."""
        return self.bottom + _BOTTOM

    def x(self, time: float) -> float:
        """Where `time` lies on the axis."""
        return _LEFT + (time - self.start) / self.longest * (WIDTH - _LEFT - _RIGHT)

    def y(self, rank: int) -> int:
        """The top of `rank`'s bars."""
        return _TOP + self.row * rank + 2


def gantt_svg(
    trace: Trace,
    *,
    unit: str | None = None,
    pattern: str = "pl-idle",
    until: float = 0.0,
    mark: float | None = None,
) -> str:
    """`trace` as one `<svg>` element, 980 pixels wide; the same text for the same trace.

    `unit` names the time axis, as in `pipelab.gantt`; the axis goes on to `until` where that is later, and a dashed
    line stands at `mark`. `pattern` is the hatching's id on the page: a picture that can be hidden needs its own, or it
    takes the hatching of others with it. Raises CostError where the trace is empty or takes no time.
    """
    unit = unit or unit_of(trace)
    numbers, name = shares(trace, unit), headline(trace)
    grid = Grid.of(trace, until)
    room = WIDTH - _LEFT - _RIGHT - 6.3 * len(numbers) - 12  # for the name, by the usual width of the numbers' letters
    squeezed = f' textLength="{room:.0f}" lengthAdjust="spacingAndGlyphs"' if 7.8 * len(name) > room else ""
    return "".join(
        [
            opening(grid.height, name, in_words(trace, unit)),
            f'<text x="{_LEFT}" y="18" font-size="13.5" font-weight="600"{squeezed}>{escape(name)}</text>',
            f'<text x="{WIDTH - _RIGHT}" y="18" text-anchor="end">{escape(numbers)}</text>',
            f'<text x="{WIDTH - _RIGHT + 8}" y="18">idle</text>',
            *_rows(trace, grid, pattern),
            *_bars(trace, grid, unit),
            *_axis(grid, unit),
            *_mark(grid, mark),
            *_legend(trace, grid.height - 10, pattern),
            "</svg>",
        ]
    )


def opening(height: int, title: str, description: str) -> str:
    """The start of a picture `height` pixels high, with its alternative in words."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {WIDTH} {height}" width="100%" '
        f'style="{STRETCH}" font-family="system-ui, sans-serif" font-size="12" '
        f'fill="currentColor"><title>{escape(title)}</title><desc>{escape(description)}</desc>'
    )


def _rows(trace: Trace, grid: Grid, pattern: str) -> list[str]:
    """Idle time, hatched, behind every row; the rank's number before it, its idle share after it."""
    width, right = grid.x(trace.end) - _LEFT, WIDTH - _RIGHT
    parts = [
        f'<pattern id="{pattern}" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<path d="M0 0V7" stroke="currentColor" stroke-opacity=".22"/></pattern>'
    ]
    for rank in range(trace.num_ranks):
        y, text = grid.y(rank), grid.y(rank) + grid.bar // 2 + 4
        share = f"{100 * trace.idle(rank) / trace.makespan:.0f} %"
        parts.append(
            f'<path d="M{_LEFT} {y}h{width:.1f}v{grid.bar}h{-width:.1f}z" fill="url(#{pattern})"/>'
            f'<text x="{_LEFT - 8}" y="{text}" text-anchor="end">rank {rank}</text>'
            f'<text x="{right + 8}" y="{text}">{share}</text>'
        )
    return parts


def _bars(trace: Trace, grid: Grid, unit: str) -> list[str]:
    """A `<rect>` with a tooltip for every span, and its micro-batch's number where there is room."""
    zero, scale = trace.start, (WIDTH - _LEFT - _RIGHT) / grid.longest
    unit_scale, unit_name = time_unit(unit, grid.longest)
    suffix = "" if unit == COSTS_UNIT else f" {unit_name}"
    style = styles(trace)
    bars: list[str] = []
    dark: list[str] = []
    light: list[str] = []
    tops, high = [grid.y(rank) for rank in range(trace.num_ranks)], grid.bar
    for rank, action, start, end, again, *_ in trace.spans:
        stage, kind, microbatch = action
        fill, ink = style[stage, kind]
        x, y, width = _LEFT + (start - zero) * scale, tops[rank], (end - start) * scale
        tooltip = (
            f"{stage}{kind.value}{microbatch}{' again' if again else ''}, rank {rank}, "
            f"{(start - zero) * unit_scale:.4g} to {(end - zero) * unit_scale:.4g}{suffix}"
        )
        bars.append(
            f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.7, 1.5):.1f}" height="{high}" fill="{fill}"'
            f"{_AGAIN if again else ''}><title>{tooltip}</title></rect>"
        )
        if width > _DIGIT * (1 if microbatch < 10 else 2 if microbatch < 100 else 4) + 2 and not again:
            (dark if ink == "#000000" else light).append(
                f'<text x="{x + width / 2:.1f}" y="{y + high // 2 + 4}">{microbatch}</text>'
            )
    numbers = 'text-anchor="middle" font-size="11" pointer-events="none"'
    return [
        '<g stroke="currentColor" stroke-opacity=".35" stroke-width=".5">', *bars, "</g>",
        f'<g fill="#000000" {numbers}>', *dark, "</g>", f'<g fill="#ffffff" {numbers}>', *light, "</g>",
    ]  # fmt: skip


_AGAIN = ' fill-opacity=".45" stroke-dasharray="3 2"'  # a forward that runs for the second time


def styles(trace: Trace) -> dict[tuple[int, Kind], tuple[str, str]]:
    """Colour and ink of every stage's kinds: a stage further along on its rank is lighter."""
    return {key: (colour, palette.ink_on(colour)) for key, colour in palette.stage_colours(trace.schedule).items()}


def compare_svg(predicted: Trace, measured: Trace, *, pattern: str) -> str:
    """`predicted` above `measured` on one time axis, in seconds; a dashed line in both at the end of `predicted`."""
    until = max(predicted.makespan, measured.makespan)
    pair = enumerate((predicted, measured))
    return "".join(
        gantt_svg(trace, unit="s", pattern=f"{pattern}-{place}", until=until, mark=predicted.makespan)
        for place, trace in pair
    )


def _mark(grid: Grid, mark: float | None) -> list[str]:
    if mark is None:
        return []
    x = grid.x(grid.start + mark)
    return [f'<path d="M{x:.1f} {_TOP - 4}V{grid.bottom + 2}" stroke="{palette.MARK}" stroke-dasharray="4 2"/>']


def _axis(grid: Grid, unit: str) -> list[str]:
    y = grid.bottom
    scale, name = time_unit(unit, grid.longest)
    whole, width = grid.longest * scale, WIDTH - _LEFT - _RIGHT
    step = _round_step(whole / 9)
    parts = [f'<path d="M{_LEFT} {y + 2}h{width}" stroke="currentColor"/>']
    for number in range(math.floor(whole / step + 1e-9) + 1):
        x = _LEFT + number * step / whole * width
        parts.append(
            f'<path d="M{x:.1f} {y + 2}v4" stroke="currentColor"/>'
            f'<text x="{x:.1f}" y="{y + 18}" text-anchor="middle">{number * step:.6g}</text>'
        )
    parts.append(f'<text x="{_LEFT}" y="{y + 34}">time ({escape(name)})</text>')
    return parts


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _legend(trace: Trace, y: int, pattern: str) -> list[str]:
    kinds = {span.action.kind for span in trace.spans}
    entries = [(palette.COLOURS[kind], f"{kind.value} {palette.NAMES[kind]}", "") for kind in Kind if kind in kinds]
    depths = trace.schedule.stages_per_rank
    if depths > 1:
        entries.append((palette.shade(Kind.F, depths - 1, depths), "a rank's later stage", ""))
    if any(span.recompute for span in trace.spans):
        entries.append((palette.COLOURS[Kind.F], "F again", _AGAIN))
    entries.append((f"url(#{pattern})", "idle", ""))
    widths = [36 + 6.3 * len(label) for _, label, _ in entries]  # pixels, by the usual width of a letter
    x = WIDTH - _RIGHT + 17 - sum(widths)
    parts = []
    for (fill, label, style), width in zip(entries, widths, strict=True):
        parts.append(
            f'<path d="M{x:.0f} {y - 9}h14v10h-14z" fill="{fill}"{style} stroke="currentColor" stroke-opacity=".35" '
            f'stroke-width=".5"/><text x="{x + 19:.0f}" y="{y}">{label}</text>'
        )
        x += width
    return parts
