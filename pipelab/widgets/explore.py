"""The explorer: move a control, see the schedule change. Controls and pictures; what they mean stands in explore_model.

Only what ipywidgets 7.7 has, for hosted notebooks, and the picture is text (SVG), so a move takes milliseconds. The
browser sends its next change when the last one is answered, and skips those in between: fast moves do not queue up.
"""

from __future__ import annotations

from dataclasses import asdict
from html import escape
from typing import Any

import ipywidgets as W

from pipelab.errors import ScheduleError
from pipelab.trace import Trace
from pipelab.widgets.explore_model import (
    CHOICES,
    SAMPLES,
    WIDTH,
    Settings,
    View,
    has_virtual_stages,
    layers_per_stage,
    look,
)
from pipelab.widgets.explore_modes import MODES, architecture, data, performance, state
from pipelab.widgets.play_model import Film
from pipelab.widgets.play_svg import cursor_svg
from pipelab.widgets.run_it import RUNNING, run_it
from pipelab.widgets.stored import Stored
from pipelab.widgets.svg import SCROLLS, Grid, gantt_svg

_LABEL = {"description_width": "12em"}
_WIDE = {"width": "32em", "max_width": "98%"}
_TICKS = 200  # of the time slider
_ALWAYS_TOLD = 8  # settings that repr tells even at their defaults: the sizes and times


def explore(*, mode: str = "performance", **settings: Any) -> Explorer:
    """A schedule and its controls, in four modes: performance, architecture, data, state. Make it a cell's last line.

    Controls: schedule, ranks, micro-batches, stages per rank, F, I, W, delay, memory limit, recomputation. Each may be
    given a first value, as in `explore(schedule="gpipe", num_ranks=8)`: the fields of `Settings`.
    Raises a PipelabError for a value that cannot be, TypeError for a name that is none.
    """
    return Explorer(Settings(**settings), mode)


class Explorer(Stored, W.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """The widget that `explore` makes: `settings` is what its controls say, `view` what it shows in which `mode`."""

    def __init__(self, settings: Settings, mode: str = "performance") -> None:
        if mode not in MODES:
            raise ScheduleError(f"there is no mode {mode!r}; choose one of {', '.join(MODES)}")
        self.controls: dict[str, Any] = {
            "schedule": W.Dropdown(
                options=list(CHOICES), value=settings.schedule, description="schedule", style=_LABEL, layout=_WIDE
            ),
            "num_ranks": _count("ranks", settings.num_ranks, 16),
            "num_microbatches": _count("micro-batches", settings.num_microbatches, 64),
            "stages_per_rank": _count("stages per rank", settings.stages_per_rank, 4),
            "memory_limit": _time("memory limit (0: none)", settings.memory_limit, most=16.0, step=0.5),
            "F": _time("F forward", settings.F),
            "I": _time("I input gradient", settings.I),
            "W": _time("W weight gradient", settings.W),
            "delay": _time("delay of a hop", settings.delay),
            "remat": W.Checkbox(value=settings.remat, description="recompute forwards", style=_LABEL, layout=_WIDE),
        }
        self.mode = W.ToggleButtons(
            options=list(MODES),
            value=mode,
            description="show",
            style={"button_width": "auto"},
            layout={"width": "auto"},
        )
        self.compare = W.Checkbox(value=False, description="compare with other schedules", indent=False)
        self.time = W.IntSlider(
            min=0, max=_TICKS, value=_TICKS // 3, description="time", readout=False, style=_LABEL, layout=_WIDE
        )
        self.run = W.Button(description="run it", icon="play", layout={"width": "auto"})
        self.picture, self.cursor, self.words = W.HTML(), W.HTML(), W.HTML()
        self.panel, self.ran = W.HTML(layout=SCROLLS), W.HTML(layout=SCROLLS)
        for name in ("picture", "cursor", "panel", "words", "ran"):
            getattr(self, name).add_class(f"pl-{name}")
        for layer in (self.picture, self.cursor):
            layer.layout.grid_area = "all"
        self.view = View(None, ())
        self._film: Film | None = None
        left, right = list(self.controls.values())[:5], list(self.controls.values())[5:]
        row = {"flex_flow": "row wrap"}
        panel = W.Box([W.VBox(left), W.VBox(right)], layout=row)
        looks = W.Box([self.mode, self.compare, self.time], layout={**row, "align_items": "center"})
        layers = W.GridBox([self.picture, self.cursor], layout={"grid_template_areas": '"all"', **SCROLLS})
        super().__init__([panel, looks, layers, self.panel, self.words, W.Box([self.run]), self.ran])
        self.add_class("pl-explore")
        for control in self.controls.values():
            control.observe(self._change, names="value")
        for control in (self.mode, self.compare):
            control.observe(self._show, names="value")
        self.time.observe(self._move, names="value")
        self.run.on_click(self._run)
        self._change()

    @property
    def settings(self) -> Settings:
        """What the controls say now."""
        return Settings(**{name: control.value for name, control in self.controls.items()})

    def _change(self, _: Any = None) -> None:
        """Another schedule, size or time: all is new, and what ran is no longer what is shown."""
        settings = self.settings
        self.view, self._film, self.ran.value = look(settings), None, ""
        self.controls["stages_per_rank"].disabled = not has_virtual_stages(settings.schedule)
        self.run.disabled = self.view.trace is None
        self._show()

    def _show(self, _: Any = None) -> None:
        """The mode's picture, numbers and sentences."""
        mode, trace = self.mode.value, self.view.trace
        moves = mode in ("data", "state")
        self.time.layout.display = "" if moves else "none"
        self.compare.layout.display = "" if mode == "performance" else "none"
        self.cursor.value = ""
        if trace is None:
            self.picture.value, self.panel.value = "", ""
            self._say(self.view.sentences)
        elif mode == "architecture":
            self.picture.value, sentences = architecture(trace.schedule)
            self.panel.value = ""
            self._say(sentences)
        else:
            self.picture.value = gantt_svg(trace, pattern=f"i{self.picture.model_id}")
            if moves:
                self._move()
            else:
                self._say(self.view.sentences)
                self.panel.value = performance(self.settings, trace, compare=self.compare.value)

    def _move(self, _: Any = None) -> None:
        """Another time: the cursor, and what is where."""
        trace = self.view.trace
        if trace is None or self.mode.value not in ("data", "state"):
            return
        self._film = self._film or Film(trace)
        time = trace.start + trace.makespan * self.time.value / _TICKS
        self.cursor.value = cursor_svg(Grid.of(trace), self._film.at(time))
        self.panel.value, sentences = (data if self.mode.value == "data" else state)(self._film, time)
        self._say(sentences)

    def _run(self, _: Any) -> None:
        trace, settings = self.view.trace, self.settings
        if trace is None:
            return
        self.ran.value, self.run.disabled = RUNNING, True
        try:
            self.ran.value = run_it(
                trace.schedule,
                settings.costs.split(trace.schedule.stages_per_rank),
                remat=settings.remat,
                pattern=f"i{self.ran.model_id}",
                layers_per_stage=layers_per_stage(trace.schedule),
                width=WIDTH,
                samples=SAMPLES,
            )
        finally:
            self.run.disabled = False

    def _say(self, sentences: tuple[str, ...]) -> None:
        self.words.value = "".join(f'<p style="line-height: 1.6">{escape(sentence)}</p>' for sentence in sentences)

    @property
    def still(self) -> Trace | None:  # type: ignore[override]
        """What the notebook's file keeps a picture of."""
        return self.view.trace

    def __repr__(self) -> str:
        plain = asdict(Settings())
        told = [
            f"{name}={value!r}"
            for place, (name, value) in enumerate(asdict(self.settings).items())
            if place < _ALWAYS_TOLD or value != plain[name]
        ]
        return f"explore({', '.join(told)})"


def _count(label: str, value: int, most: int) -> Any:
    return W.IntSlider(value=value, min=1, max=max(most, value), description=label, style=_LABEL, layout=_WIDE)


def _time(label: str, value: float, *, most: float = 4.0, step: float = 0.1) -> Any:
    return W.FloatSlider(
        value=value, min=0, max=max(most, value), step=step, description=label, style=_LABEL, layout=_WIDE
    )
