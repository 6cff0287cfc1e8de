"""The published schedules, one file each, and the table that the command line and the widgets offer.

A new one is one new file and one line here: docs/add-a-schedule.md.
"""

from __future__ import annotations

from collections.abc import Callable

from pipelab.schedule import Schedule
from pipelab.schedules.gpipe import gpipe
from pipelab.schedules.naive import naive
from pipelab.schedules.one_f_one_b import one_f_one_b

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "naive": naive,
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
}
