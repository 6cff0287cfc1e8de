"""Plain training in one process, micro-batch by micro-batch: what a pipeline has to equal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipelab.action import Kind
from pipelab.engine.cut import cut
from pipelab.schedule import Schedule

LossFunction = Callable[[Any, Any], Tensor]


def step(model: nn.Sequential, inputs: Tensor, targets: Tensor, loss_fn: LossFunction, schedule: Schedule) -> float:
    """Add the gradient of the mean loss to `.grad`, as `schedule` does, but without any pipeline; the mean loss.

    Every micro-batch is a pass through the whole model of its own. Only the order of the sums is the schedule's: that
    in which each stage works out its weight gradients. So a pipeline's numbers must be these, to the bit.
    """
    count = schedule.num_microbatches
    before = {parameter: parameter.grad for parameter in model.parameters()}
    gradients, total = [], 0.0
    for x, y in zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True):
        model.zero_grad()
        loss = loss_fn(model(x.clone()), y)
        share = len(x) / len(inputs)
        loss.backward(torch.full_like(loss, share))
        gradients.append({parameter: parameter.grad for parameter in model.parameters()})
        total += loss.item() * share
    for parameter, gradient in before.items():
        parameter.grad = gradient
    for stage, piece in enumerate(cut(model, schedule.num_stages)):
        for microbatch in weight_order(schedule, stage):
            for parameter in piece.layers.parameters():
                gradient = gradients[microbatch][parameter]
                if gradient is not None:
                    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
    return total


def weight_order(schedule: Schedule, stage: int) -> list[int]:
    """The micro-batches in the order in which `stage` works out its weights' gradients."""
    order = schedule.ranks[schedule.placement[stage]]
    return [a.microbatch for a in order if a.stage == stage and a.kind in (Kind.B, Kind.W)]


def same_to_the_bit(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether two `state_dict`s have the same names in the same order, and equal values."""
    return list(ours) == list(theirs) and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def largest_difference(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference of any entry, relative to the largest entry of its tensor."""
    assert list(ours) == list(theirs)
    largest = 0.0
    for name, wanted in theirs.items():
        off = (ours[name].double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-30)
        largest = max(largest, off.item())
    return largest
