"""Training by a schedule in one process: what a pipeline computes, without ranks and messages.

The actions run one after the other, and each is given exactly the version of its stage's weights that the rule says
(`pipelab.versions`). Every version is a set of tensors of its own, so nothing here is shared with how the engine does
it, which writes versions into one place: the two check each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from pipelab.action import Action, Kind
from pipelab.engine.cut import cut
from pipelab.engine.options import OptimizerFactory
from pipelab.errors import EngineError, SizeError
from pipelab.schedule import Schedule
from pipelab.simulate import in_order_of_start
from pipelab.versions import update_groups, weight_versions, with_updates

LossFunction = Callable[[Tensor, Tensor], Tensor]
Weights = dict[str, Tensor]


def replay(
    model: nn.Module,
    schedule: Schedule,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    loss_fn: LossFunction,
    optimizer: OptimizerFactory,
    rule: str = "stashing",
    partition: Sequence[slice] | Sequence[int] | None = None,
) -> list[float]:
    """Train `model` in place, each batch a stream of micro-batches in the order of `schedule`; every batch's loss.

    `batches` are (inputs, targets), a row a sample; `loss_fn` returns the mean over them. `optimizer(parameters)` makes
    one for every stage; an update takes the mean over its samples. A schedule without updates makes one, after all.
    Between two batches the pipeline is empty. `rule` is one of those of `weight_versions`. A loss is the mean over the
    samples, each with the weights that it met. Layers pass one tensor on; dropout draws other numbers than on ranks.
    Raises ScheduleError where the rule has no answer, EngineError for a backward that is split, a model that is no
    `nn.Sequential` and a loss that is no number, SizeError for fewer samples than micro-batches or targets.
    """
    if schedule.splits_backward:
        raise EngineError(f"a replay runs whole backwards (B), and {schedule.name!r} splits them into I and W")
    schedule = schedule if update_groups(schedule) else with_updates(schedule)
    versions, groups = weight_versions(schedule, rule), update_groups(schedule)
    pieces = cut(model, schedule.num_stages, partition)
    by_stage = [{a: version for a, version in versions.items() if a.stage == n} for n in range(len(pieces))]
    mixed = rule == "latest"
    stages = [_Stage(piece.layers, optimizer, by_stage[n], mixed=mixed) for n, piece in enumerate(pieces)]
    order = in_order_of_start(schedule)
    return [_stream(stages, order, groups, schedule.num_microbatches, *batch, loss_fn) for batch in batches]


def _stream(
    stages: Sequence[_Stage],
    order: Sequence[Action],
    groups: dict[Action, tuple[int, ...]],
    count: int,
    inputs: Tensor,
    targets: Tensor,
    loss_fn: LossFunction,
) -> float:
    """One batch; its loss."""
    if len(inputs) < count:
        raise SizeError(f"{len(inputs)} samples cannot fill {count} micro-batches")
    if len(inputs) != len(targets):
        raise SizeError(f"{len(inputs)} inputs came with {len(targets)} targets: every sample needs one")
    xs, ys = inputs.tensor_split(count), targets.tensor_split(count)
    last, loss = len(stages) - 1, 0.0
    arrived: dict[Action, Any] = {Action(0, Kind.F, k): x for k, x in enumerate(xs)}  # by the action that reads it
    for stage in stages:
        stage.begin()
    for action in order:
        number, kind, k = action
        stage = stages[number]
        if kind is Kind.U:
            taken = groups[action]
            stage.update(taken, [len(xs[k]) / sum(len(xs[j]) for j in taken) for k in taken])
        elif kind is Kind.B:
            arrived[Action(number - 1, Kind.B, k)] = stage.backward(action, arrived.pop(action))
        elif number < last:
            arrived[Action(number + 1, Kind.F, k)] = stage.forward(action, arrived.pop(action))
        else:
            found = stage.forward(action, arrived.pop(action), partial(_loss, loss_fn, ys[k]))
            arrived[Action(last, Kind.B, k)] = torch.ones_like(found)
            loss += found.item() * len(xs[k]) / len(inputs)
    return loss


def _loss(loss_fn: LossFunction, target: Tensor, output: Tensor) -> Tensor:
    found = loss_fn(output, target)
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise EngineError(f"in a replay, loss_fn returns the mean over its samples, one number, got {found!r}")
    return found


class _Stage:
    """One stage's layers, the versions of their weights, and what F leaves for B and B for U.

    `mixed`: a backward reads the weights of its own version, not those with which its forward was done.
    """

    def __init__(
        self, layers: nn.Sequential, optimizer: OptimizerFactory, versions: dict[Action, int], *, mixed: bool
    ) -> None:
        self.layers, self.versions, self.mixed = layers, versions, mixed
        self.parameters = {name: p for name, p in layers.named_parameters() if p.requires_grad}
        self.optimizer = optimizer(self.parameters.values()) if self.parameters else None

    def begin(self) -> None:
        """A batch begins: what the parameters are now is version 0."""
        self.newest = 0
        self.weights = {0: self._copy()}  # by version, as long as they are needed
        self.uses = Counter(self.versions.values())
        self.read: Weights = {}
        self.graphs: dict[int, tuple[Tensor, Tensor, Weights]] = {}
        self.gradients: dict[int, Sequence[Tensor | None]] = {}

    def forward(self, action: Action, x: Tensor, finish: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """F with the weights of the action's version; `finish` makes the loss of the output."""
        weights = self._use(action)
        x = x.detach().requires_grad_(x.is_floating_point())
        with self._read_again(weights) if self.mixed else nullcontext():
            made: Tensor = functional_call(self.layers, weights, (x,))
            made = made if finish is None else finish(made)
        self.graphs[action.microbatch] = x, made, weights
        return made.detach()

    def backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        """B: the gradient of the input; the weights' gradients wait for U."""
        x, made, weights = self.graphs.pop(action.microbatch)
        self.read = self._use(action)
        ends = [*weights.values(), *([x] if x.requires_grad else [])]
        found = torch.autograd.grad(made, ends, gradient, allow_unused=True)
        self.gradients[action.microbatch] = found[: len(weights)]
        return found[len(weights)] if x.requires_grad else None

    def update(self, taken: Sequence[int], shares: Sequence[float]) -> None:
        """U: the optimizer makes the next version from the newest and the weighted mean of the gradients."""
        for parameter, *found in zip(self.parameters.values(), *(self.gradients.pop(k) for k in taken), strict=True):
            parts = [share * gradient for share, gradient in zip(shares, found, strict=True) if gradient is not None]
            parameter.grad = torch.stack(parts).sum(0) if parts else None
        if self.optimizer:
            self.optimizer.step()
        if not self.uses[self.newest]:
            del self.weights[self.newest]
        self.newest += 1
        self.weights[self.newest] = self._copy()

    def _use(self, action: Action) -> Weights:
        version = self.versions[action]
        self.uses[version] -= 1
        return self.weights[version] if self.uses[version] or version == self.newest else self.weights.pop(version)

    def _copy(self) -> Weights:
        return {name: p.detach().clone().requires_grad_() for name, p in self.parameters.items()}

    def _read_again(self, weights: Weights) -> AbstractContextManager[Any]:
        """Inside, what autograd saves of `weights`, whole or a view, is read from `self.read` when it is needed."""
        names = {weight.untyped_storage().data_ptr(): name for name, weight in weights.items()}

        def save(tensor: Tensor) -> Any:
            name = names.get(tensor.untyped_storage().data_ptr())
            return tensor if name is None else (name, tensor.size(), tensor.stride(), tensor.storage_offset())

        def load(saved: Any) -> Tensor:
            if isinstance(saved, Tensor):
                return saved
            name, *place = saved
            return self.read[name].detach().as_strided(*place)

        return saved_tensors_hooks(save, load)
