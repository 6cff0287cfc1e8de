"""The published schedules, one file each, and the table that the command line and the widgets offer.

A new one is one new file, its name here and in the front door: docs/add-a-schedule.md.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

from pipelab.schedule import Schedule
from pipelab.schedules.breadth_first import breadth_first
from pipelab.schedules.dualpipe_v import dualpipe_v
from pipelab.schedules.gpipe import gpipe
from pipelab.schedules.interleaved import interleaved
from pipelab.schedules.naive import naive
from pipelab.schedules.one_f_one_b import one_f_one_b
from pipelab.schedules.pipedream import pipedream
from pipelab.schedules.pipedream_2bw import pipedream_2bw
from pipelab.schedules.search import search
from pipelab.schedules.v_half import v_half
from pipelab.schedules.v_min import v_min
from pipelab.schedules.zb_h1 import zb_h1
from pipelab.schedules.zb_h2 import zb_h2
from pipelab.schedules.zb_v import zb_v

__all__ = ["SCHEDULES", "search", "takes_stages"]

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "interleaved": interleaved,
    "breadth_first": breadth_first,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe_v": dualpipe_v,
    "pipedream": pipedream,
    "pipedream_2bw": pipedream_2bw,
}


def takes_stages(name: str) -> bool:
    """Whether the builder of that name leaves open how many stages a rank has: then it takes `stages_per_rank`."""
    return "stages_per_rank" in signature(SCHEDULES[name]).parameters
