"""The one palette of the book: what colour F, B, I, W and U have in every picture.

Told apart three ways, so that no reader needs all of them: by hue, by lightness (the pictures read in grey), and by the
blue to yellow axis that people with deuteranopia see. B is I + W, so all three are warm: B lies between its halves.
"""

from __future__ import annotations

from pipelab.action import Kind

COLOURS: dict[Kind, str] = {
    Kind.F: "#3270b5",
    Kind.B: "#f2a03d",
    Kind.I: "#f5d973",
    Kind.W: "#6f2840",
    Kind.U: "#1f2328",
}
NAMES: dict[Kind, str] = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.U: "weight update",
}
INK = "#1f2328"  # text, axes, outlines
PAPER = "#ffffff"  # behind every picture, so that it reads in a dark notebook too
IDLE, IDLE_HATCH = "#f6f6f7", "#d5d7da"
MARK = "#d1006c"  # what a picture points at: late actions, the critical path, arrows

_LIGHTEST = 0.34  # how far the last virtual stage of a rank is mixed with white


def shade(kind: Kind, depth: int = 0, depths: int = 1) -> str:
    """The colour of `kind` on a rank's virtual stage number `depth` of `depths`: later stages are lighter."""
    return _whitened(COLOURS[kind], _LIGHTEST * depth / max(depths - 1, 1))


def faded(colour: str) -> str:
    """`colour` for what a picture does not point at."""
    return _whitened(colour, 0.75)


def ink_on(colour: str) -> str:
    """Black or white text, whichever reads better on `colour`: WCAG 2.1's contrast, from relative luminance."""
    return INK if luminance(colour) > 0.26 else PAPER


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, from 0 to 1: what is left of a colour in grey (WCAG 2.1, IEC 61966-2-1)."""
    red, green, blue = (_linear(c / 255) for c in _channels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _whitened(colour: str, white: float) -> str:
    return "#" + "".join(f"{round(c + (255 - c) * white):02x}" for c in _channels(colour))


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
