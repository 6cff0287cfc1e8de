"""What becomes of a rank's gradients after the last backward: divided, clipped by one norm for all ranks, and used."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipelab.engine.data_parallel import Replicas
from pipelab.engine.groups import Groups
from pipelab.engine.loss import checked_count
from pipelab.engine.options import OptimizerFactory, SchedulerFactory
from pipelab.engine.scaling import LossScale
from pipelab.engine.tensor_parallel import Slices, local
from pipelab.engine.tying import Shared
from pipelab.errors import EngineError


class Update:
    """The parameters of one rank and the optimizer that updates them, the same on every rank at the same time.

    A step without an update leaves its gradients, and the next step's are added to them, as `backward()` does in torch.
    `root` is the rank of the pipeline that computes the loss; of `shared` parameters other ranks of it have copies.
    `replicas` and `slices` say what the other axes of the mesh have of the parameters.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        groups: Groups,
        replicas: Replicas,
        slices: Slices,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
        max_norm: float | None = None,
        skip_nan: bool = False,
        scale: LossScale | None = None,
        root: int = 0,
        shared: Sequence[Shared] = (),
    ) -> None:
        self.parameters = parameters
        mine = [parameter for parameter in parameters if replicas.updates(parameter)]
        self.optimizer = optimizer(mine) if optimizer and mine else None
        self.scheduler = scheduler(self.optimizer) if scheduler and self.optimizer else None
        self._groups, self._replicas, self._slices = groups, replicas, slices
        self._max_norm = max_norm
        self._scale = scale  # by which the gradients of a step come multiplied
        self._skip_nan = skip_nan
        self._updates = optimizer is not None  # on some rank, if not on this one
        self.skipped = False  # whether this step's update was left out, on all ranks
        self.finite = True  # whether all gradients of this rank were numbers in this step's update
        self._root = root
        self._shared = shared
        self._counts: bool | None = None  # whether the loss comes with counts: not known before the first step
        self._used = True  # whether the gradients that are there have been used
        self._earlier: dict[nn.Parameter, Tensor] = {}

    def begin(self) -> None:
        """A step begins: used gradients go, and go aside if this step's must be divided or added up without them."""
        self.finite, self.skipped = True, False
        if self._used:
            aside: Sequence[nn.Parameter] = ()
        elif self._counts or self._replicas.count > 1 or self._scale or self._skip_nan:
            aside = self.parameters
        else:
            aside = [shared.parameter for shared in self._shared]
        self._earlier = {p: p.grad for p in aside if p.grad is not None}
        for parameter in self.parameters if self._used else aside:
            parameter.grad = None

    @property
    def waiting(self) -> bool:
        """Whether there are gradients that no update has used yet."""
        return not self._used

    def finish(self, count: float | None, update: bool, *, loss: float | None = None) -> float | None:
        """Add up what is shared, divide by the count that `root` knows, clip, and update where asked.

        With `skip_nan`, or in float16, nothing is updated where any rank has a gradient that is no number, or infinite,
        and gradients that waited for an update wait on as they were; in float16 they go. `loss` is known to the rank
        that computes it. Returns the norm where gradients are clipped.
        """
        self.add_up()
        self._divide(count)
        self._unscale()
        asked = update if self._scale else self._skip_nan and (self._updates or self.waiting or not update)
        finite = not asked or self._all_finite(loss)
        if not finite and self.waiting and self._scale is None:
            for parameter in self.parameters:
                parameter.grad = self._earlier.get(parameter)
            self._earlier, self.skipped = {}, update
            return None
        for parameter, gradient in self._earlier.items():
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        self._earlier = {}
        if update and self._scale:
            self._scale.judge(finite)
        self.skipped = update and not finite
        norm = self._clip(self._max_norm) if update and self._max_norm is not None else None
        if update and finite:
            self.step()
        self._used = update or not finite
        return norm

    def add_up(self) -> None:
        """Make every gradient the sum over all that have the parameter."""
        self._replicas.add_up()
        for shared in self._shared:
            shared.add_up()

    def step(self) -> None:
        """Let the optimizer use the gradients as they are, and the scheduler go on; then all have the new values."""
        if self.optimizer:
            self.optimizer.step()
            if self.scheduler:
                self.scheduler.step()
        self._replicas.spread()

    def _divide(self, count: float | None) -> None:
        if self._counts is False:
            if count is not None:
                raise EngineError("loss_fn returned a mean in the first step, and now (sum, count): return one kind")
            return
        total = self._agreed(count)
        if self._counts is None:
            self._counts = total is not None
        elif total is None:
            raise EngineError("loss_fn returned (sum, count) in the first step, and now a mean: return one kind")
        if total is not None:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.div_(total)

    def _unscale(self) -> None:
        if self._scale:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(1 / self._scale.value)

    def _agreed(self, count: float | None) -> float | None:
        """What the batches of all replicas count, told by `root` to the whole pipeline; None for a mean."""
        known = torch.tensor([count or 0.0, count is not None], dtype=torch.float64)
        if self._groups.at.pp == self._root:
            known = self._replicas.total(known)
            counting = round(known[1].item())
            if counting not in (0, self._replicas.count):
                raise EngineError(
                    f"loss_fn returned (sum, count) on {counting} of {self._replicas.count} replicas, and a mean on "
                    "the others: return one kind"
                )
            if counting:
                checked_count(known[0].item())
        dist.broadcast(known, group=self._groups.pipeline, group_src=self._root)
        return known[0].item() if known[1] else None

    def _all_finite(self, loss: float | None) -> bool:
        """Whether the loss and the gradients of all ranks are numbers. Every rank must ask."""
        found = [numbers(parameter.grad) for parameter in self.parameters if parameter.grad is not None]
        largest = [torch.linalg.vector_norm(each, math.inf) for each in found if each.numel()]
        self.finite = all(value.isfinite() for value in largest)
        everywhere = torch.tensor([self.finite and (loss is None or math.isfinite(loss))], dtype=torch.uint8)
        dist.all_reduce(everywhere, dist.ReduceOp.MIN)
        return bool(everywhere)

    def _clip(self, max_norm: float) -> float:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`, as torch's `clip_grad_norm_`."""
        elsewhere = {shared.parameter for shared in self._shared if not shared.counts_here}
        gradients = {parameter: local(parameter.grad) for parameter in self.parameters if parameter.grad is not None}
        norms = [
            torch.linalg.vector_norm(numbers(gradient), dtype=torch.float64)
            for parameter, gradient in gradients.items()
            if parameter not in elsewhere and self._replicas.owns(parameter) and self._slices.speaks_for(parameter)
        ]
        square = torch.stack(norms).square().sum().cpu() if norms else torch.zeros((), dtype=torch.float64)
        dist.all_reduce(square)
        norm = square.sqrt().item()
        scale = min(1.0, max_norm / (norm + 1e-6)) if math.isfinite(norm) else max_norm / norm
        for gradient in gradients.values():
            gradient.mul_(scale)
        return norm


def numbers(gradient: Tensor) -> Tensor:
    """What of `gradient` lies on this rank, as a plain tensor: of a sparse one the rows that it has."""
    here = local(gradient)
    return here.coalesce().values() if here.is_sparse else here
