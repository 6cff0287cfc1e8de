"""Plain training in one process, micro-batch by micro-batch: what a pipeline has to equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipelab.action import Kind
from pipelab.engine.cut import cut
from pipelab.engine.seeding import seed
from pipelab.schedule import Schedule

LossFunction = Callable[[Any, Any], Tensor]


def step(
    model: nn.Sequential,
    inputs: Tensor,
    targets: Tensor,
    loss_fn: LossFunction,
    schedule: Schedule,
    *,
    batchnorm: str = "microbatch",
    dropout: tuple[int, int] | None = None,
    precision: str = "fp32",
    partition: Sequence[int] | None = None,
) -> float:
    """Add the gradient of the mean loss to `.grad`, as `schedule` does, but without any pipeline; the mean loss.

    Every micro-batch is a pass through the whole model of its own. Only the order of the sums is the schedule's: that
    in which each stage works out its weight gradients. So a pipeline's numbers must be these, to the bit; a weight used
    by several stages is the exception, whose uses are added up here within a micro-batch.
    `dropout`: seed and number of the step, which with layer and micro-batch say what is dropped.
    """
    count = schedule.num_microbatches
    before = {parameter: parameter.grad for parameter in model.parameters()}
    gradients, total = [], 0.0
    with whole_statistics(model) if batchnorm == "minibatch" else nullcontext():
        for number, (x, y) in enumerate(zip(inputs.tensor_split(count), targets.tensor_split(count), strict=True)):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = loss_fn(forward(model, x.clone(), number, dropout), y)
            share = len(x) / len(inputs)
            loss.backward(torch.full_like(loss, share))
            gradients.append({parameter: parameter.grad for parameter in model.parameters()})
            total += loss.item() * share
    for parameter, gradient in before.items():
        parameter.grad = gradient
    done: set[nn.Parameter] = set()
    for stage, piece in enumerate(cut(model, schedule.num_stages, partition)):
        parameters = set(piece.layers.parameters()) - done
        done |= parameters
        for microbatch in weight_order(schedule, stage):
            for parameter in parameters:
                gradient = gradients[microbatch][parameter]
                if gradient is not None:
                    parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient
    return total


def forward(model: nn.Sequential, x: Any, microbatch: int, dropout: tuple[int, int] | None) -> Any:
    """The model's output, with the random numbers that a pipeline gives to every layer."""
    with torch.random.fork_rng(devices=[]):
        for number, layer in enumerate(model):
            if dropout is not None:
                seed(*dropout, number, microbatch)
            x = layer(x)
    return x


@contextmanager
def whole_statistics(model: nn.Module) -> Iterator[None]:
    """Inside, BatchNorm layers leave their statistics; afterwards they are told all that they were given, at once."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm1d)]
    before = [copy.deepcopy(layer.state_dict()) for layer in layers]
    given: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers}
    hooks = [layer.register_forward_pre_hook(lambda layer, args: given[layer].append(args[0])) for layer in layers]
    yield
    for layer, state, hook in zip(layers, before, hooks, strict=True):
        hook.remove()
        layer.load_state_dict(state)
        with torch.no_grad():
            layer(torch.cat(given[layer]))


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
