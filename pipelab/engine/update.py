"""What becomes of a rank's gradients after the last backward: divided, clipped by one norm for all ranks, and used."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipelab.engine.options import OptimizerFactory, SchedulerFactory
from pipelab.engine.tying import Shared
from pipelab.errors import EngineError


class Update:
    """The parameters of one rank and the optimizer that updates them, the same on every rank at the same time.

    A step without an update leaves its gradients, and the next step's are added to them, as `backward()` does in torch.
    `root` is the rank that computes the loss; of `shared` parameters other ranks have copies.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
        max_norm: float | None = None,
        skip_nan: bool = False,
        root: int = 0,
        shared: Sequence[Shared] = (),
    ) -> None:
        self.parameters = parameters
        self.optimizer = optimizer(parameters) if optimizer and parameters else None
        self.scheduler = scheduler(self.optimizer) if scheduler and self.optimizer else None
        self._max_norm = max_norm
        self._skip_nan = skip_nan and optimizer is not None
        self.finite = True  # whether all gradients of this rank were numbers in the last update
        self._root = root
        self._shared = shared
        self._counts: bool | None = None  # whether the loss comes with counts: not known before the first step
        self._used = True  # whether the gradients that are there have been used
        self._earlier: dict[nn.Parameter, Tensor] = {}

    def begin(self) -> None:
        """A step begins: used gradients go, and go aside if this step's must be divided or added up without them."""
        if self._used:
            aside: Sequence[nn.Parameter] = ()
        else:
            aside = self.parameters if self._counts else [shared.parameter for shared in self._shared]
        self._earlier = {p: p.grad for p in aside if p.grad is not None}
        for parameter in self.parameters if self._used else aside:
            parameter.grad = None

    @property
    def waiting(self) -> bool:
        """Whether there are gradients that no update has used yet."""
        return not self._used

    def finish(self, count: float | None, update: bool, *, loss: float | None = None) -> float | None:
        """Add up what is shared, divide by the count that `root` knows, clip, and update where asked.

        With `skip_nan` nothing is updated where any rank has a gradient that is no number, or infinite.
        `loss` is known to the rank that computes it. Returns the norm where gradients are clipped.
        """
        for shared in self._shared:
            shared.add_up()
        self._divide(count)
        for parameter, gradient in self._earlier.items():
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        self._earlier = {}
        skip = update and self._skip_nan and not self._all_finite(loss)
        norm = self._clip(self._max_norm) if update and self._max_norm is not None else None
        if update and self.optimizer and not skip:
            self.step()
        self._used = update
        return norm

    def step(self) -> None:
        """Let the optimizer use the gradients as they are, and the scheduler go on."""
        if self.optimizer:
            self.optimizer.step()
            if self.scheduler:
                self.scheduler.step()

    def _divide(self, count: float | None) -> None:
        if self._counts is False:
            if count is not None:
                raise EngineError("loss_fn returned a mean in the first step, and now (sum, count): return one kind")
            return
        known = torch.tensor([-1.0 if count is None else count], dtype=torch.float64)
        dist.broadcast(known, self._root)
        total = known.item()
        if self._counts is None:
            self._counts = total >= 0
        elif total < 0:
            raise EngineError("loss_fn returned (sum, count) in the first step, and now a mean: return one kind")
        if self._counts:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(total)

    def _all_finite(self, loss: float | None) -> bool:
        """Whether the loss and the gradients of all ranks are numbers. Every rank must ask."""
        largest = [torch.linalg.vector_norm(p.grad, math.inf) for p in self.parameters if p.grad is not None]
        self.finite = all(value.isfinite() for value in largest)
        everywhere = torch.tensor([self.finite and (loss is None or math.isfinite(loss))], dtype=torch.uint8)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        return bool(everywhere)

    def _clip(self, max_norm: float) -> float:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`, as torch's `clip_grad_norm_`."""
        elsewhere = {shared.parameter for shared in self._shared if not shared.counts_here}
        gradients = {parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}
        norms = [
            torch.linalg.vector_norm(gradient, dtype=torch.float64)
            for parameter, gradient in gradients.items()
            if parameter not in elsewhere
        ]
        square = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)
        dist.all_reduce(square)
        norm = square.sqrt().item()
        scale = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else max_norm / norm
        for gradient in gradients.values():
            gradient.mul_(scale)
        return norm
