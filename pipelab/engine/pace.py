"""Emulated accelerators: every action takes the time that its costs say, in real seconds.

Tensors, messages and gradients are real. Only the clock is emulated: a rank works, then sleeps until the action's
deadline. Deadlines are virtual time, and a message carries its value's [1]:

    start    = when the rank was free, or the value came, whichever is later      [2]
    deadline = start + the action's time                                          [3]

With anchored clocks no deadline looks at the real time, so what the machine loses here it catches up there: orders and
dependencies show as on ideal hardware, and the transport is hidden. With plain clocks nothing starts before it really
can, so a slow link shows, and so does a busy machine [4].
"""

from __future__ import annotations

import time
from collections import defaultdict

from pipelab.action import Action
from pipelab.costs import Costs, Wire
from pipelab.engine.options import Clock
from pipelab.ranks import now

_LONG_AGO = float("-inf")


class Pace:
    """The clock of one rank during one step, in seconds of the ranks' common clock."""

    def __init__(self, costs: Costs, num_stages: int, clock: Clock) -> None:
        self._duration = costs.per_stage(num_stages)
        self._bytes = costs.message_bytes(num_stages)
        self._plain = clock == "plain"
        self._free = _LONG_AGO
        self._wires: dict[int, Wire] = defaultdict(lambda: Wire(costs.link))

    def value_comes(self, stamp: float) -> None:
        """The next action reads a value that another rank has stamped with the time when it comes."""
        self._free = max(self._free, stamp)  # [2]

    def arrival(self, sent: float, taken: float, stamp: float) -> float:
        """When a message came, as the trace shows it: on the emulated wire, and not before it really was there.

        Anchored clocks hide the transport, so it was there once it was sent; with plain ones, when it was taken.
        """
        return max(stamp, taken if self._plain else sent)

    def begin(self) -> None:
        """The next action starts: wait for its value, where that is still on an emulated wire."""
        _sleep_until(self._free)
        if self._plain or self._free == _LONG_AGO:  # [4], or the pipeline's first action, which sets the clock for all
            self._free = max(self._free, now())

    def end(self, action: Action) -> float:
        """Sleep until the deadline of `action`, and return that."""
        self._free += self._duration[action.kind][action.stage]  # [3]
        _sleep_until(self._free)
        return self._free

    def stamp(self, action: Action, peer: int) -> float:
        """When what `action` has just made comes to rank `peer`."""  # [1]
        return self._wires[peer].send(self._free, self._bytes[action.kind][action.stage])


def _sleep_until(moment: float) -> None:
    remaining = moment - now()
    if remaining > 0:
        time.sleep(remaining)
