"""The explorer: move a control, see the schedule change. Controls and picture; what they mean stands in explore_model.

Only what ipywidgets 7.7 has, for hosted notebooks, and the picture is text (SVG), so a move takes milliseconds. The
browser sends its next change when the last one is answered, and skips those in between: fast moves do not queue up.
"""

from __future__ import annotations

from dataclasses import asdict
from html import escape
from typing import Any

import ipywidgets as W

from pipelab.schedules import SCHEDULES
from pipelab.trace import Trace
from pipelab.widgets.explore_model import Settings, View, has_virtual_stages, look
from pipelab.widgets.stored import Stored
from pipelab.widgets.svg import gantt_svg

_LABEL = {"description_width": "10em"}
_WIDE = {"width": "30em", "max_width": "98%"}


def explore(**settings: Any) -> Explorer:
    """Controls for schedule, ranks, micro-batches, stages per rank, F, I, W and delay, above the Gantt that they make.

    Each may be given a first value, as in `explore(schedule="gpipe", num_ranks=8)`: the fields of `Settings`.
    Raises a PipelabError for a value that cannot be, TypeError for a name that is none. Make it a cell's last line.
    """
    return Explorer(Settings(**settings))


class Explorer(Stored, W.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """The widget that `explore` makes: `settings` is what its controls say, `view` what it shows."""

    def __init__(self, settings: Settings) -> None:
        self.controls: dict[str, Any] = {
            "schedule": W.Dropdown(
                options=list(SCHEDULES), value=settings.schedule, description="schedule", style=_LABEL, layout=_WIDE
            ),
            "num_ranks": _count("ranks", settings.num_ranks, 16),
            "num_microbatches": _count("micro-batches", settings.num_microbatches, 64),
            "stages_per_rank": _count("stages per rank", settings.stages_per_rank, 4),
            "F": _time("F forward", settings.F),
            "I": _time("I input gradient", settings.I),
            "W": _time("W weight gradient", settings.W),
            "delay": _time("delay of a hop", settings.delay),
        }
        self.picture, self.words = W.HTML(), W.HTML()
        self.picture.add_class("pl-picture")
        self.words.add_class("pl-words")
        self.view = View(None, ())
        left, right = list(self.controls.values())[:4], list(self.controls.values())[4:]
        panel = W.Box([W.VBox(left), W.VBox(right)], layout={"flex_flow": "row wrap"})
        super().__init__([panel, self.picture, self.words])
        for control in self.controls.values():
            control.observe(self._show, names="value")
        self._show()

    @property
    def settings(self) -> Settings:
        """What the controls say now."""
        return Settings(**{name: control.value for name, control in self.controls.items()})

    def _show(self, _: Any = None) -> None:
        settings = self.settings
        self.view = look(settings)
        self.controls["stages_per_rank"].disabled = not has_virtual_stages(settings.schedule)
        self.picture.value = "" if self.view.trace is None else gantt_svg(self.view.trace, pattern=f"i{self.model_id}")
        self.words.value = "".join(
            f'<p style="line-height: 1.6">{escape(sentence)}</p>' for sentence in self.view.sentences
        )

    @property
    def still(self) -> Trace | None:  # type: ignore[override]
        """What the notebook's file keeps a picture of."""
        return self.view.trace

    def __repr__(self) -> str:
        return f"explore({', '.join(f'{name}={value!r}' for name, value in asdict(self.settings).items())})"


def _count(label: str, value: int, most: int) -> Any:
    return W.IntSlider(value=value, min=1, max=max(most, value), description=label, style=_LABEL, layout=_WIDE)


def _time(label: str, value: float) -> Any:
    return W.FloatSlider(
        value=value, min=0, max=max(4.0, value), step=0.1, description=label, style=_LABEL, layout=_WIDE
    )
