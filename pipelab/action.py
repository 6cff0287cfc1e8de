"""One entry of a schedule: which stage does what for which micro-batch, written `2F0`.

The letters are torch's, so a schedule of ours is also a schedule of torch.distributed.pipelining:

    F  forward                     B  full backward, the same work as I and W together
    I  input-gradient half of B    W  weight-gradient half of B
    U  weight update               (only where a schedule is about updates)
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from pipelab.errors import ScheduleError


class Kind(str, Enum):
    """What an action does."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  the field's letter
    W = "W"
    U = "U"

    # C-level hash and text: schedules hold millions of actions, and they are dictionary keys
    __hash__ = str.__hash__
    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]


_TEXT = re.compile(r"([0-9]{1,9})([FBIWU])([0-9]{1,9})")


class Action(NamedTuple):
    """Stage `stage` does `kind` for micro-batch `microbatch`; all counts start at 0."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def __repr__(self) -> str:
        return str(self)

    @classmethod
    def from_text(cls, text: str) -> Action:
        """The action that `text` names, as in `2F0`; raises ScheduleError on anything else."""
        match = _TEXT.fullmatch(str(text).strip())
        if match is None:
            raise ScheduleError(
                f"{str(text).strip()!r} is no action: write stage, one of F, B, I, W, U, and micro-batch, as in 2F0"
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))
