"""The loss scale of float16, whose smallest numbers are too large for many gradients.

The loss is multiplied before the backward and the gradients are divided after it. Where one of them overflows, no rank
updates and the scale is halved; after many steps without that it is doubled (Micikevicius et al. 2018, section 3.2).
torch's GradScaler does the same for one process. Here all ranks have to come to the same scale: each counts the same
verdicts, that of all ranks together, so nothing has to be sent.
"""

from __future__ import annotations

FIRST = 2.0**16
GROWS_AFTER = 2000  # steps; both as in torch


class LossScale:
    """The scale of one rank, the same on all."""

    def __init__(self, first: float = FIRST, grows_after: int = GROWS_AFTER) -> None:
        self.value = first
        self._good = 0
        self._grows_after = grows_after

    def judge(self, finite: bool) -> None:
        """An update was due, and the gradients of all ranks were finite or not."""
        self._good = self._good + 1 if finite else 0
        if not finite:
            self.value /= 2
        elif self._good == self._grows_after:
            self.value, self._good = 2 * self.value, 0

    def state(self) -> tuple[float, int]:
        """For a checkpoint."""
        return self.value, self._good

    def load_state(self, state: tuple[float, int]) -> None:
        """Go on from there."""
        self.value, self._good = state
