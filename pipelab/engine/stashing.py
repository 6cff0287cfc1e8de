"""One rank's weights where they are updated on the way (U): older versions are kept as long as an action needs them.

Autograd's graph of a forward remembers where the weights lie, not what they were. So the weights stay where they are,
and before an action the version that it uses is put there:

    0F0     0U0        0F1      0B0              the parameters' memory, action by action
    [ v0 ]  [ v1 ]     [ v1 ]   [ v0 ]
             v0 kept             v1 and v0 change places       [1]

An optimizer writes into the weights, which a backward over an older forward would not allow: autograd compares counters
of writes. Here the counters stand still [2], because what the backward reads has been put there on purpose. Without
stashing nothing is put back: the backward then reads new weights beside old activations, and computes the gradient of
no function.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from pipelab.action import Action, Kind
from pipelab.engine.tensor_parallel import local
from pipelab.engine.update import Update, numbers
from pipelab.errors import EngineError


class Stash:
    """The versions of one rank's weights during a step, counted from 0 at its start.

    `versions` tells for the rank's actions which version they use; `update` has the parameters and their optimizer.
    With `check_finite` an update with a gradient that is no finite number raises EngineError.
    """

    def __init__(self, versions: Mapping[Action, int], update: Update, *, check_finite: bool) -> None:
        self._planned = versions
        self._update = update
        self._parameters = update.parameters
        self._check_finite = check_finite
        self.begin()

    def begin(self) -> None:
        """A step begins: what the parameters are now is version 0."""
        self.newest = self.loaded = 0
        self.peak = 1  # the most versions at once
        self._kept: dict[int, list[Tensor]] = {}  # all but the loaded one
        self._uses = Counter(self._planned.values())  # that are still to come, by version
        self._fresh = True  # whether the next gradient is the first of its update

    def take(self, action: Action) -> None:
        """Put the version that `action` uses into the parameters."""
        self._load(self._planned[action])
        if self._fresh and action.kind is not Kind.F:
            self._fresh = False
            for parameter in self._parameters:
                parameter.grad = None

    def done(self, action: Action) -> None:
        """`action` has run: its version, which is let go once nobody needs it, has a use less to come."""
        self._uses[self._planned[action]] -= 1

    def make(self, action: Action) -> None:
        """U: the optimizer makes the next version from the newest one and the gradients since the last update.

        With those of all replicas: this rank's part of each comes to the same U after the same actions, and waits there
        for its like alone, which nobody keeps waiting in turn (see `pipelab.engine.groups`).
        """
        self._load(self.newest)
        self._update.add_up()
        found = [numbers(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        if self._check_finite and not all(gradient.isfinite().all() for gradient in found):
            raise EngineError(
                f"{action}: a gradient is not finite, and this update was not made. Those before it in this step were, "
                "so go on from a checkpoint. Look at the batch and the learning rate; nan='ignore' trains on"
            )
        if self._uses[self.newest]:
            self._kept[self.newest] = [_memory(parameter).clone() for parameter in self._parameters]
        if self._parameters:
            with _unsafe_preserve_version_counter(tuple(self._parameters)):  # [2]
                self._update.step()
        self._fresh = True
        self.newest += 1
        self.loaded = self.newest
        self.peak = max(self.peak, 1 + len(self._kept))

    def finish(self) -> None:
        """The step is over: the newest version is put into the parameters."""
        self._load(self.newest)

    def _needed(self, version: int) -> bool:
        return version == self.newest or self._uses[version] > 0

    def _load(self, version: int) -> None:
        if version == self.loaded:
            return
        kept = self._kept.pop(version)
        for parameter, other in zip(self._parameters, kept, strict=True):
            here = _memory(parameter)
            before = here.clone()
            here.copy_(other)
            other.copy_(before)  # [1]
        if self._needed(self.loaded):
            self._kept[self.loaded] = kept
        self.loaded = version


def _memory(parameter: Tensor) -> Tensor:
    """What of it lies on this rank, as a tensor of its own over the same memory: writes into it are not counted."""
    return local(parameter.detach()).data
