"""What a reader moves: the explorer and the player. The only room that knows ipywidgets."""

from __future__ import annotations

from pipelab.widgets.explore import Explorer, explore
from pipelab.widgets.play import Player, play
from pipelab.widgets.svg import gantt_svg

__all__ = ["Explorer", "Player", "explore", "gantt_svg", "play"]
