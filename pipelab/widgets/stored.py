"""What a notebook's file keeps of a widget, for readers without a kernel: a picture and a line of text."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

from pipelab.trace import Trace


class Stored:
    """Put before a widget class: the picture of `self.still`, where it is not None, and `repr(self)` are stored too."""

    still: Trace | None
    model_id: str

    _ipython_display_ = None  # ipywidgets 7 has one, which would leave the picture out

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        from pipelab.gantt import gantt_png

        live = {"version_major": 2, "version_minor": 0, "model_id": self.model_id}
        stored = {"application/vnd.jupyter.widget-view+json": live, "text/plain": repr(self)}
        if self.still is None:
            return stored
        return {**stored, "image/png": b64encode(gantt_png(self.still)).decode()}
