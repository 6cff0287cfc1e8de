"""One clock for all ranks, also where they run on several hosts, whose own clocks started at other times.

A rank on another host than rank 0 asks it for the time, again and again. Of an answer it knows when it asked (a), when
it had the answer (b), and what the time there was in between (t): so the clocks differ by t - (a + b) / 2, give or take
(b - a) / 2. The fastest of the last answers is the most exact [1]; older ones are forgotten, because clocks drift [2].
"""

from __future__ import annotations

import time
from collections import deque

_KEPT = 16  # answers
_offset_s = 0.0


def now() -> float:
    """Seconds of the monotonic clock of rank 0's host; of this machine's own outside torchrun."""
    return time.monotonic() + _offset_s


class Follower:
    """Sets `now` by the answers of rank 0."""

    def __init__(self) -> None:
        self._answers: deque[tuple[float, float]] = deque(maxlen=_KEPT)  # [2]

    def heard(self, asked: float, there: float, answered: float) -> None:
        """`asked` and `answered` in seconds of this machine's monotonic clock, `there` of rank 0's."""
        global _offset_s
        self._answers.append((answered - asked, there - (asked + answered) / 2))
        _offset_s = min(self._answers)[1]  # [1]
