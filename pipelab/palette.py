"""The one palette of the book: what colour F, B, I, W and U have in every picture.

Told apart three ways, so that no reader needs all of them: by hue, by lightness (the pictures read in grey), and by the
blue to yellow axis that people with deuteranopia see. B is I + W, so all three are warm: B lies between its halves.
"""

from __future__ import annotations

from pipelab.action import Kind
from pipelab.schedule import Schedule

COLOURS: dict[Kind, str] = {
    Kind.F: "#2a63a8",
    Kind.B: "#ea922c",
    Kind.I: "#f7de80",
    Kind.W: "#641f3c",
    Kind.U: "#101214",
}
# the last virtual stage of a rank: light, but no kind grows as light as the next one
_LIGHTEST: dict[Kind, str] = {
    Kind.F: "#6490c5",
    Kind.B: "#f2b671",
    Kind.I: "#fbf0c4",
    Kind.W: "#7f3a57",
    Kind.U: "#202226",
}
NAMES: dict[Kind, str] = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.U: "weight update",
}
INK = "#1f2328"  # text, axes, outlines
PALE_INK = "#59636e"  # text beside the rows, which is not the first thing to read
PAPER = "#ffffff"  # behind every picture, so that it reads in a dark notebook too
IDLE, IDLE_HATCH = "#f6f6f7", "#d5d7da"
MARK = "#d1006c"  # what a picture points at: late actions, the critical path, arrows


def shade(kind: Kind, depth: int = 0, depths: int = 1) -> str:
    """The colour of `kind` on a rank's virtual stage number `depth` of `depths`: later stages are lighter."""
    return _mixed(COLOURS[kind], _LIGHTEST[kind], depth / max(depths - 1, 1))


def stage_colours(schedule: Schedule) -> dict[tuple[int, Kind], str]:
    """The colour of every stage's actions: `shade` by the stage's place among those of its rank."""
    depths = schedule.stages_per_rank
    return {
        (stage, kind): shade(kind, depth, depths)
        for rank in range(schedule.num_ranks)
        for depth, stage in enumerate(schedule.stages_on(rank))
        for kind in Kind
    }


def faded(colour: str) -> str:
    """`colour` for what a picture does not point at."""
    return _mixed(colour, PAPER, 0.75)


def ink_on(colour: str) -> str:
    """Black or white text, whichever has more contrast on `colour` (WCAG 2.1): one of them has at least 4.5 on any."""
    light = luminance(colour) + 0.05
    return "#000000" if light / 0.05 > 1.05 / light else "#ffffff"


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, from 0 to 1: what is left of a colour in grey (WCAG 2.1, IEC 61966-2-1)."""
    red, green, blue = (_linear(c / 255) for c in _channels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _mixed(colour: str, other: str, part: float) -> str:
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in pairs)


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
