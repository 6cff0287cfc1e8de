"""How long a step takes: the pipeline's makespan, round after round, then the replicas' gradients.

The makespan comes from the first of these that can tell, and every choice says which it was:

    closed form    pipelab.theory, every stage taken as heavy as the heaviest
    bound          the same, each action lengthened by the hop behind it: the step takes no longer
    simulated      pipelab.simulate, with the times of every stage and the link as it is
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from pipelab.costs import Costs
from pipelab.planner.candidate import Candidate, build
from pipelab.planner.hardware import Hardware, gather_s, gradients_s, hop
from pipelab.planner.model import Model
from pipelab.planner.stages import Stage, stages
from pipelab.simulate import simulate
from pipelab.theory import makespan as makespan_formulas
from pipelab.trace import Trace


class Duration(NamedTuple):
    """Seconds of a step; `bubble` is the part of the makespan in which the busiest rank is idle."""

    step_s: float
    bubble: float
    source: str


def estimate(candidate: Candidate, model: Model, hardware: Hardware) -> Duration:
    """The step by closed form, or, where none holds, simulated with equal stages."""
    c = candidate
    forward, backward = _heaviest(c, model, hardware)
    delay = _delay(c, model, hardware)
    span, source = makespan(c.schedule, c.pp, c.num_microbatches, c.stages_per_rank, forward, backward, delay)
    busy = c.num_microbatches * (forward + backward)
    return Duration(_step(c, model, hardware, span), 1 - busy / span if span else 0.0, source)


def trace_of(candidate: Candidate, model: Model, hardware: Hardware) -> Trace:
    """One round of the candidate's schedule, simulated with every stage's own times."""
    return simulate(candidate.build(), costs_of(candidate, model, hardware))


def simulated(candidate: Candidate, model: Model, hardware: Hardware) -> Duration:
    """The step, with the makespan of the trace."""
    c = candidate
    costs = costs_of(c, model, hardware)
    span, busiest = _span(c.schedule, c.pp, c.num_microbatches, c.stages_per_rank, costs)
    return Duration(_step(c, model, hardware, span), 1 - busiest / span if span else 0.0, "simulated")


def costs_of(candidate: Candidate, model: Model, hardware: Hardware) -> Costs:
    """Seconds of every stage for one micro-batch, recomputation within the backward, and the link between ranks."""
    c = candidate
    cut = stages(model, hardware, c.tp, c.num_stages)
    times = [_seconds(c, model, hardware, stage) for stage in cut]
    return Costs(
        F=[forward for forward, _ in times],
        B=[backward for _, backward in times],
        comm=hop(c.tp, c.dp, c.pp, hardware),
        boundary_bytes=[c.microbatch * stage.output_bytes for stage in cut],
    )


@lru_cache(maxsize=65536)
def makespan(schedule: str, p: int, m: int, v: int, forward: float, backward: float, delay: float) -> tuple[float, str]:
    """Seconds of one round with equal stages, the times of a whole rank given; and where they come from."""
    half = backward / 2
    letters = {"p": p, "m": m, "v": v, "B": backward}
    if schedule in makespan_formulas:
        formula = makespan_formulas[schedule].compiled()
        short = delay <= min(forward, half) / v  # a longer hop would make ranks wait in another pattern
        span = formula(F=forward, I=half, W=half, c=delay, **letters) if short else None
        if span is not None:
            return span, "closed form"
        longer = {**letters, "B": backward + v * delay}
        span = formula(F=forward + v * delay, I=half + v * delay, W=half, c=0.0, **longer)
        if span is not None:
            return span, "bound"
    costs = Costs(F=forward / v, I=half / v, W=half / v, comm=delay)
    return simulate(build(schedule, p, m, v), costs).makespan, "simulated"


@lru_cache(maxsize=1024)
def _span(schedule: str, p: int, m: int, v: int, costs: Costs) -> tuple[float, float]:
    """Makespan, and the time for which the busiest rank works; once for candidates that differ in memory only."""
    trace = simulate(build(schedule, p, m, v), costs)
    return trace.makespan, max(map(trace.busy, range(p)))


def _seconds(c: Candidate, model: Model, hardware: Hardware, stage: Stage) -> tuple[float, float]:
    """Forward and backward of one micro-batch; a recomputed forward is part of the backward."""
    forward = c.microbatch * stage.forward_s + stage.fixed_s
    backward = c.microbatch * stage.backward_s + stage.fixed_s + (forward if c.remat != "none" else 0.0)
    if c.sharding == "zero_3":
        weight, gradient, _ = model.state
        gather = gather_s(stage.parameters, weight, c.dp, c.tp, hardware)
        forward += gather
        backward += gather + gather_s(stage.parameters, gradient, c.dp, c.tp, hardware)
    return forward, backward


def _heaviest(c: Candidate, model: Model, hardware: Hardware) -> tuple[float, float]:
    """Forward and backward of a whole rank whose stages are all as heavy as the heaviest."""
    cut = set(stages(model, hardware, c.tp, c.num_stages))
    times = [_seconds(c, model, hardware, stage) for stage in cut]
    v = c.stages_per_rank
    return v * max(forward for forward, _ in times), v * max(backward for _, backward in times)


def _delay(c: Candidate, model: Model, hardware: Hardware) -> float:
    if c.pp == 1:
        return 0.0
    link = hop(c.tp, c.dp, c.pp, hardware)
    largest = max(stage.output_bytes for stage in stages(model, hardware, c.tp, c.num_stages))
    return link.seconds(c.microbatch * largest)


def _step(c: Candidate, model: Model, hardware: Hardware, span: float) -> float:
    return c.rounds * span + _update_s(c, model, hardware)


def _update_s(c: Candidate, model: Model, hardware: Hardware) -> float:
    """The gradients of the rank that has most; fully sharded, they went with every micro-batch."""
    if c.sharding == "zero_3" or c.dp == 1:
        return 0.0
    ranks = [0.0] * c.pp
    for rank, stage in zip(c.placement, stages(model, hardware, c.tp, c.num_stages), strict=True):
        ranks[rank] += stage.parameters
    return gradients_s(max(ranks), model.state[1], c.dp, c.tp, hardware)
