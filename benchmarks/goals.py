"""How a benchmark tells a goal and what became of it: one line a goal, which `tools/bench.py` gathers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

MARK = "goal:"


def goal(what: str, found: Sequence[float] | float, *, at_most: float, unit: str = "") -> str:
    """The line for a goal: the median of what was found, its range, the limit, and whether it was kept.

    It is "missed" when the median, written with as many digits as the line shows, is over the limit.
    """
    runs = [found] if isinstance(found, float | int) else list(found)
    median = statistics.median(runs)
    spread = f" ({min(runs):.4g} to {max(runs):.4g}, {len(runs)} runs)" if len(runs) > 1 else ""
    verdict = "met" if float(f"{median:.4g}") <= at_most else "missed"
    unit = f" {unit}" if unit else ""
    return f"{MARK} {what} | at most {at_most:g}{unit} | {median:.4g}{unit}{spread} | {verdict}"
