"""The two moving pictures of the player: what lies over the Gantt, and the ranks with what they hold; and how several
of them become a reel that the browser shows by itself, so that a film does not wait for the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from pipelab import palette
from pipelab.action import Kind
from pipelab.trace import Message
from pipelab.widgets.play_model import Kept, Moment
from pipelab.widgets.svg import STRETCH, WIDTH, Grid, opening

_BOX_TOP, _BOX_HIGH = 46, 30  # of a rank
_LANES = {Kind.F: 12, Kind.B: 32, Kind.I: 32}  # where activations fly, and gradients
_SQUARE = 17

# the cursor covers the Gantt, whose tooltips must still be reached
NO_MOUSE = "<style>.pl-cursor, .pl-cursor * {pointer-events: none}</style>"


def cursor_svg(grid: Grid, moment: Moment) -> str:
    """A line at the moment, and an outline around every action that runs; to be laid over the Gantt of `grid`."""
    x = grid.x(moment.time)
    parts = [f'<path d="M{x:.1f} 24V{grid.bottom}" stroke="{palette.MARK}" stroke-width="1.5"/>']
    for span in filter(None, moment.running):
        left, width = grid.x(span.start), max(grid.x(span.end) - grid.x(span.start), 1.5)
        parts.append(
            f'<rect x="{left:.1f}" y="{grid.y(span.rank)}" width="{width:.1f}" height="{grid.bar}" fill="none" '
            f'stroke="{palette.MARK}" stroke-width="2.5"/>'
        )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" aria-hidden="true" viewBox="0 0 {WIDTH} {grid.height}" width="100%" '
        f'style="{STRETCH}">{"".join(parts)}</svg>'
    )


def ranks_svg(moment: Moment, colours: dict[tuple[int, Kind], tuple[str, str]], most_kept: int) -> str:
    """The ranks side by side: what each does, the activations that it keeps below, messages between them above.

    `colours` are `svg.styles`; the picture leaves room for `most_kept` activations, so that its height stays.
    """
    num_ranks = len(moment.running)
    pitch = (WIDTH - 20) / num_ranks
    width = min(pitch - 10, 150)
    columns = max(1, int(width / _SQUARE))
    height = _BOX_TOP + _BOX_HIGH + 24 + _SQUARE * -(-most_kept // columns)

    def centre(rank: int) -> float:
        return 10 + pitch * (rank + 0.5)

    parts = [opening(height, "What every rank does and keeps", moment.sentence)]
    for rank, span in enumerate(moment.running):
        fill, ink, text = "none", "currentColor", "idle"
        if span is not None:
            fill, ink = colours[span.action.stage, span.action.kind]
            text = f"{span.action}{' again' * span.recompute}"
        left = centre(rank) - width / 2
        parts.append(
            f'<rect x="{left:.1f}" y="{_BOX_TOP}" width="{width:.1f}" height="{_BOX_HIGH}" rx="4" fill="{fill}" '
            f'stroke="currentColor"/>'
            f'<text x="{centre(rank):.1f}" y="{_BOX_TOP + 20}" text-anchor="middle" fill="{ink}">{text}</text>'
            f'<text x="{left:.1f}" y="{_BOX_TOP + _BOX_HIGH + 14}" font-size="11">rank {rank} keeps '
            f"{len(moment.kept[rank])}</text>"
        )
        for place, kept in enumerate(moment.kept[rank]):
            row, column = divmod(place, columns)
            x, y = left + _SQUARE * column, _BOX_TOP + _BOX_HIGH + 20 + _SQUARE * row
            parts.append(_activation(kept, x, y, colours))
    for message in moment.in_flight:
        part = (moment.time - message.sent) / (message.arrived - message.sent)
        here = centre(message.sender) + part * (centre(message.receiver) - centre(message.sender))
        parts.append(_message(message, here, colours, "on its way"))
    waiting: dict[tuple[int, int], int] = {}
    for message in moment.arrived:
        lane = message.receiver, _LANES[message.action.kind]
        waiting[lane] = place = waiting.get(lane, -1) + 1
        parts.append(_message(message, centre(message.receiver) + 12 * place, colours, "arrived, not read yet"))
    return "".join([*parts, "</svg>"])


def _activation(kept: Kept, x: float, y: float, colours: dict[tuple[int, Kind], tuple[str, str]]) -> str:
    kind = Kind.W if kept.form == "for W" else Kind.F
    fill, ink = colours[kept.stage, kind]
    if kept.form == "input":
        fill, ink = "none", "currentColor"
    title = f"stage {kept.stage}, micro-batch {kept.microbatch}: {kept.form}"
    return (
        f'<rect x="{x:.1f}" y="{y}" width="15" height="15" fill="{fill}" stroke="currentColor" stroke-opacity=".5">'
        f'<title>{title}</title></rect><text x="{x + 7.5:.1f}" y="{y + 11}" font-size="9.5" text-anchor="middle" '
        f'fill="{ink}" pointer-events="none">{kept.microbatch}</text>'
    )


def _message(message: Message, x: float, colours: dict[tuple[int, Kind], tuple[str, str]], state: str) -> str:
    fill, ink = colours[message.action.stage, message.action.kind]
    y = _LANES[message.action.kind]
    title = escape(f"{message.action} from rank {message.sender} to rank {message.receiver}: {state}")
    return (
        f'<circle cx="{x:.1f}" cy="{y}" r="9" fill="{fill}" stroke="currentColor" stroke-opacity=".5">'
        f'<title>{title}</title></circle><text x="{x:.1f}" y="{y + 4}" font-size="10" text-anchor="middle" '
        f'fill="{ink}" pointer-events="none">{message.action.microbatch}</text>'
    )


_SHOWN = "<style>@keyframes pl-shown {from, to {visibility: visible}}</style>"


def reel(pictures: Sequence[str], frame_ms: float) -> str:
    """HTML that shows every one of `pictures`, which are HTML of one size, for `frame_ms` milliseconds.

    The first is seen at once, the last one stays. What is not seen is hidden from screen readers and the mouse too.
    """
    if len(pictures) == 1:
        return pictures[0]
    last = len(pictures) - 1
    frames = (
        f'<div style="grid-area: 1 / 1; visibility: hidden; animation: pl-shown {frame_ms:g}ms {n * frame_ms:g}ms'
        f'{" forwards" if n == last else ""}">{picture}</div>'
        for n, picture in enumerate(pictures)
    )
    return f'{_SHOWN}<div style="display: grid">{"".join(frames)}</div>'
