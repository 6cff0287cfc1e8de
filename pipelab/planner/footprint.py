"""What a rank keeps: the weights' state, the activations of the micro-batches in flight, and what one action needs.

    state         parameters x (weight + gradient + optimizer); ZeRO-1 divides the last over the replicas, ZeRO-3 all
    activations   micro-batches in flight x what each leaves: everything, or with remat only inputs
    working       what comes and goes: a layer or a stage that is recomputed, a layer whose weights were gathered

How many are in flight is the schedule's own number, in micro-batches of a whole rank (pipelab.memory); an activation is
taken to be kept whole until W. Not counted: the inputs' data, buffers of the library, fragmentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from pipelab.memory import peak_activations
from pipelab.planner.candidate import Candidate, build
from pipelab.planner.hardware import Hardware
from pipelab.planner.model import Model
from pipelab.planner.stages import Stage, stages
from pipelab.simulate import simulate
from pipelab.theory import peak_activations as peak_formulas


@dataclass(frozen=True)
class Footprint:
    """Bytes on one GPU of one pipeline rank, at its fullest moment."""

    state: float
    activations: float
    working: float

    @property
    def total(self) -> float:
        """All of it, in bytes."""
        return self.state + self.activations + self.working


def footprints(candidate: Candidate, model: Model, hardware: Hardware) -> tuple[Footprint, ...]:
    """One for every rank of the pipeline."""
    c = candidate
    cut = stages(model, hardware, c.tp, c.num_stages)
    held: list[list[Stage]] = [[] for _ in range(c.pp)]
    for rank, stage in zip(c.placement, cut, strict=True):
        held[rank].append(stage)
    flying = in_flight(c.schedule, c.pp, c.num_microbatches, c.stages_per_rank)
    first = cut[0]
    return tuple(_footprint(c, model, mine, first, flying[rank]) for rank, mine in enumerate(held))


def _footprint(c: Candidate, model: Model, mine: list[Stage], first: Stage, flying: float) -> Footprint:
    shared = sum(stage.shared for stage in mine) if first in mine else 0.0
    parameters = sum(stage.parameters for stage in mine) - shared
    activations, working = _kept(c, mine, flying)
    if c.sharding == "zero_3":
        weight, gradient, _ = model.state
        working += (weight + gradient) * max(stage.largest_parameters for stage in mine)
    return Footprint(state_bytes(parameters, model.state, c.sharding, c.dp), activations, working)


def _kept(c: Candidate, mine: list[Stage], flying: float) -> tuple[float, float]:
    samples = flying * c.microbatch
    if c.remat == "layer":
        kept = sum(stage.inputs_bytes for stage in mine)
        return samples * kept, c.microbatch * max(stage.largest_kept_bytes for stage in mine)
    if c.remat == "stage":
        kept = sum(stage.input_bytes for stage in mine)
        return samples * kept, c.microbatch * max(stage.kept_bytes for stage in mine)
    return samples * sum(stage.kept_bytes for stage in mine), 0.0


def state_bytes(parameters: float, state: tuple[float, float, float], sharding: str, dp: int) -> float:
    """Weights, gradients and optimizer of `parameters` on one of `dp` replicas (arXiv 1910.02054)."""
    weight, gradient, optimizer = state
    if sharding == "zero_1":
        return parameters * (weight + gradient + optimizer / dp)
    return parameters * (weight + gradient + optimizer) / (dp if sharding == "zero_3" else 1)


@lru_cache(maxsize=4096)
def in_flight(schedule: str, pp: int, num_microbatches: int, stages_per_rank: int) -> tuple[float, ...]:
    """Micro-batches of a whole rank that each rank keeps at once: the closed form where it holds, else counted."""
    if schedule in peak_formulas:
        formula = peak_formulas[schedule].compiled()
        peaks = [formula(p=pp, m=num_microbatches, v=stages_per_rank, r=rank, w=1) for rank in range(pp)]
        known = [peak for peak in peaks if peak is not None]
        if len(known) == pp:
            return tuple(known)
    return peak_activations(simulate(build(schedule, pp, num_microbatches, stages_per_rank)))
