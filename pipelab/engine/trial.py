"""A trial: one real step of any schedule with a small model, checked against the same step without a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from pipelab import models
from pipelab.action import Kind
from pipelab.costs import Costs, Link
from pipelab.engine.pipeline import Pipeline
from pipelab.engine.result import StepResult
from pipelab.errors import EngineError, SizeError
from pipelab.ranks import Ranks
from pipelab.schedule import Schedule
from pipelab.simulate import simulate
from pipelab.trace import Trace

MOST_RANKS = 16  # processes that one press of a button may start
_SECONDS, _SHORTEST_S, _LONGEST_S = 1.5, 0.006, 20.0  # of a paced step, and of its mean action
_EQUAL = 1e-4  # relative, in float32: sums of the same numbers in another order


@dataclass(frozen=True)
class Trial:
    """What a trial showed: the step, its prediction in seconds, and how far its gradients are from plain training's.

    `largest_difference` is that of any entry, relative to the largest entry of its gradient.
    """

    result: StepResult
    predicted: Trace
    largest_difference: float

    @property
    def gradients_equal(self) -> bool:
        """Whether the gradients are those of plain training, up to the rounding of float32."""
        return self.largest_difference <= _EQUAL


def trial(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    remat: bool = False,
    layers_per_stage: int = 1,
    width: int = 64,
    samples: int = 4,
    paced: bool = True,
) -> Trial:
    """Run one step of `schedule` on as many processes as it has ranks: a perceptron on random numbers.

    The model has `layers_per_stage` Linear layers a stage, each from `width` to `width`, with ReLUs between them; a
    micro-batch has `samples` rows. `paced`: the ranks are emulated accelerators whose times are in proportion to
    `costs` (default: F = I = W = 1), so that the step takes a second or two; else they work as fast as this machine
    can, and the prediction is made from their own times. With `remat` every stage keeps only its input.
    Raises a PipelabError for what cannot run, before any process starts.
    """
    if schedule.num_ranks > MOST_RANKS:
        raise SizeError(
            f"a trial starts a process a rank, {MOST_RANKS} at most; this schedule has {schedule.num_ranks} ranks"
        )
    if schedule.has_updates:
        raise EngineError(
            f"schedule {schedule.name!r} has weight updates among its actions (kind U), so its gradients are not those "
            "of plain training, which a trial compares: train it with Pipeline(...), and compare with pipelab.replay"
        )
    pace = _in_seconds(schedule, Costs() if costs is None else costs, remat) if paced else None
    layers = schedule.num_stages * layers_per_stage
    model = _perceptron(layers, width)
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples * schedule.num_microbatches, width, generator=random)
    targets = torch.randint(width, (len(inputs),), generator=random)
    sizes = [2 * layers_per_stage] * schedule.num_stages
    sizes[-1] -= 1  # no ReLU behind the last layer
    with Ranks(schedule.num_ranks, backend="gloo") as ranks:
        pipe = Pipeline(
            model,
            schedule,
            loss_fn=F.cross_entropy,
            ranks=ranks,
            partition=sizes,
            pace=pace,
            remat="stage" if remat else "none",
        )
        result = pipe.step(inputs, targets)
        gradients = pipe.gradients()
    torch.autograd.backward(F.cross_entropy(model(inputs), targets))
    predicted = simulate(schedule, pace or Costs.from_trace(result.trace), remat="early" if remat else False)
    return Trial(result, predicted, _largest_difference(model, gradients))


def _perceptron(layers: int, width: int) -> nn.Sequential:
    """Layers of equal width, started so that values neither grow nor vanish in a deep one (He et al. 2015)."""
    model = models.mlp([width] * (layers + 1))
    random = torch.Generator().manual_seed(0)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight, generator=random)
    return model


def _largest_difference(model: nn.Module, gradients: dict[str, torch.Tensor | None]) -> float:
    largest = 0.0
    for name, parameter in model.named_parameters():
        ours, plain = gradients[name], parameter.grad
        assert ours is not None
        assert plain is not None
        largest = max(largest, float((ours - plain).abs().max() / plain.abs().max().clamp(min=1e-30)))
    return largest


def _in_seconds(schedule: Schedule, costs: Costs, remat: bool) -> Costs:
    """`costs` in real seconds: as many a unit as make a step, and its mean action, long enough to be seen."""
    predicted = simulate(schedule, costs, remat="early" if remat else False)
    busy = sum(map(predicted.busy, range(schedule.num_ranks)))
    if not busy:
        raise SizeError("a trial needs actions that take time, and F, I and W are all 0")
    unit_s = max(_SECONDS / predicted.makespan, _SHORTEST_S * len(predicted.spans) / busy)
    if unit_s * predicted.makespan > _LONGEST_S:
        raise SizeError(
            f"a trial of these {schedule.num_actions} actions would take {unit_s * predicted.makespan:.0f} seconds, "
            f"and {_LONGEST_S:.0f} is the most: take fewer micro-batches"
        )
    times = costs.per_stage(schedule.num_stages)
    inputs, weights, forwards = ([unit_s * t for t in times[kind]] for kind in (Kind.I, Kind.W, Kind.F))
    comm = costs.comm
    comm = Link(comm.latency_s * unit_s, comm.bytes_per_s / unit_s) if isinstance(comm, Link) else comm * unit_s
    return Costs(F=forwards, I=inputs, W=weights, comm=comm, boundary_bytes=costs.boundary_bytes)
