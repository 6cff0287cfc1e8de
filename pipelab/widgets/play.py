"""The player: a trace as a film. A cursor sweeps the Gantt; below it the ranks, their messages and what they keep."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from html import escape
from typing import Any

import ipywidgets as W

from pipelab.captions import headline
from pipelab.trace import Trace
from pipelab.widgets.play_model import Film, Moment
from pipelab.widgets.play_svg import NO_MOUSE, cursor_svg, ranks_svg, reel
from pipelab.widgets.stored import Stored
from pipelab.widgets.svg import SCROLLS, WORDS_WRAP, Grid, gantt_svg, styles

_TICKS = 3000  # of the time slider
_FRAME_MS, _SECONDS = 33, 10  # a frame, and the whole film at single speed
_REEL, _CHANGE = 15, 6  # the frames that are drawn ahead while it plays, and after how many of them the next reel comes
_SPEEDS = {"¼ ×": 0.25, "½ ×": 0.5, "1 ×": 1.0, "2 ×": 2.0, "4 ×": 4.0}


def play(trace: Trace) -> Player:
    """Play `trace`: play, pause, step from event to event, speed, and a slider to scrub. Make it a cell's last line.

    Raises CostError where the trace is empty or takes no time.
    """
    return Player(trace)


class Player(Stored, W.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """The widget that `play` makes; `moment` is what it shows, `scrub` the time slider, from 0 to 3000."""

    def __init__(self, trace: Trace) -> None:
        self.still = trace
        self.film, self._grid, self._colours = Film(trace), Grid.of(trace), styles(trace)
        self._most_kept = self.film.most_kept
        # the slider's place for every event: where it has just happened
        places = [(math.ceil((t - trace.start) / trace.makespan * _TICKS - 1e-6), t) for t in self.film.events]
        self._event_at = dict(places)
        self.scrub = W.IntSlider(
            min=0,
            max=_TICKS,
            description="time",
            readout=False,
            style={"description_width": "4em"},
            layout={"width": "22em", "max_width": "98%"},
        )
        self.speed = W.Dropdown(
            options=list(_SPEEDS.items()),
            value=1.0,
            description="speed",
            layout={"width": "9em"},
            style={"description_width": "4em"},
        )
        self.back = W.Button(description="step back", icon="step-backward", layout={"width": "auto"})
        self.forward = W.Button(description="step forward", icon="step-forward", layout={"width": "auto"})
        self.clock = W.Play(min=0, max=_TICKS, interval=_FRAME_MS, step=self._step())
        W.jslink((self.clock, "value"), (self.scrub, "value"))  # in the browser: no round trip for the clock
        picture, self.cursor = W.HTML(), W.HTML()
        picture.value = gantt_svg(trace, pattern=f"i{picture.model_id}")
        for layer in (picture, self.cursor):
            layer.layout.grid_area = "all"
        self.cursor.add_class("pl-cursor")
        self.ranks = W.HTML(layout=SCROLLS)  # with the sentence, so that a reel is two messages
        self.ranks.add_class("pl-ranks")
        controls = W.Box(
            [self.clock, self.back, self.forward, self.scrub, self.speed], layout={"flex_flow": "row wrap"}
        )
        layers = W.GridBox([picture, self.cursor], layout={"grid_template_areas": '"all"', **SCROLLS})
        super().__init__([controls, layers, self.ranks])
        self.add_class("pl-play")
        self.speed.observe(lambda _: self._set_speed(), names="value")
        self.back.on_click(lambda _: self._to_event(-1))
        self.forward.on_click(lambda _: self._to_event(+1))
        self.scrub.observe(self._show, names="value")
        self._drawn = range(0)  # the slider's places that need no new reel while it plays
        self._playing = "playing" if self.clock.has_trait("playing") else "_playing"  # its name in ipywidgets 8 and 7
        self.clock.observe(self._show, names=self._playing)
        self._show()

    @property
    def moment(self) -> Moment:
        """What is happening at the cursor."""
        return self._moment_at(self.scrub.value)

    def _moment_at(self, place: int) -> Moment:
        trace = self.film.trace
        return self.film.at(self._event_at.get(place, trace.start + trace.makespan * place / _TICKS))

    def _show(self, change: dict[str, Any] | None = None) -> None:
        """Draw the moment; while it plays also those to come, because every reel is a round trip to the kernel."""
        here, step = self.scrub.value, self.clock.step
        plays = getattr(self.clock, self._playing) and here < _TICKS
        if plays and change and change["name"] == "value" and here in self._drawn:
            return
        self._drawn = range(here, here + _CHANGE * step) if plays else range(0)
        places = range(here, min(here + _REEL * step, _TICKS + step), step) if plays else [here]
        moments = [self._moment_at(min(place, _TICKS)) for place in places]
        self.cursor.value = NO_MOUSE + reel([cursor_svg(self._grid, moment) for moment in moments], _FRAME_MS)
        self.ranks.value = WORDS_WRAP + reel([self._ranks_at(moment) for moment in moments], _FRAME_MS)

    def _ranks_at(self, moment: Moment) -> str:
        words = f'<p style="line-height: 1.6">{escape(moment.sentence)}</p>'
        return words + ranks_svg(moment, self._colours, self._most_kept)

    def _set_speed(self) -> None:
        self.clock.step = self._step()
        self._show()

    def _step(self) -> int:
        speed: float = self.speed.value
        return max(1, round(_TICKS * _FRAME_MS / 1000 / _SECONDS * speed))

    def _to_event(self, direction: int) -> None:
        """Move the cursor to the next start or end of an action, or to the one before."""
        places, here = list(self._event_at), self.scrub.value
        number = bisect_right(places, here) if direction > 0 else bisect_left(places, here) - 1
        self.scrub.value = places[min(max(number, 0), len(places) - 1)]

    def __repr__(self) -> str:
        return f"play({headline(self.film.trace)})"
