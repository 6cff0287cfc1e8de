"""What a reader moves: the explorer, the player and the builder. The only room that knows ipywidgets."""

from __future__ import annotations

from pipelab.widgets.build import Builder, build
from pipelab.widgets.explore import Explorer, explore
from pipelab.widgets.play import Player, play
from pipelab.widgets.svg import gantt_svg

__all__ = ["Builder", "Explorer", "Player", "build", "explore", "gantt_svg", "play"]
