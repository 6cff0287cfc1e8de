"""What a reader moves: the explorer. The only room that knows ipywidgets."""

from __future__ import annotations

from pipelab.widgets.explore import Explorer, explore
from pipelab.widgets.svg import gantt_svg

__all__ = ["Explorer", "explore", "gantt_svg"]
