"""Constraints in, configurations out: every candidate is either predicted, or rejected with a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipelab.costs import Link
from pipelab.errors import SizeError, positive_integer
from pipelab.planner.choice import Choice, judge, size
from pipelab.planner.hardware import Hardware
from pipelab.planner.model import Measured, Model, Transformer
from pipelab.planner.presets import PRESETS
from pipelab.planner.question import Choices, Question
from pipelab.planner.rejected import Rejected, candidates
from pipelab.planner.relaxations import relaxations
from pipelab.planner.result import Plan

_LARGEST_SIMULATION = 400_000  # actions


def plan(
    model: Any,
    gpus: int | Hardware,
    *,
    batch: int,
    memory: float | None = None,
    link: Link | None = None,
    max_bubble: float = 1.0,
    example: Any = None,
    simulate: int = 10,
    **choices: int | str | Sequence[int] | Sequence[str] | None,
) -> Plan:
    """Every way to train `model` with `batch` samples a step on `gpus` GPUs, best first, and why the others are none.

    `model`: a Transformer, a preset's name ("gpt3-175b"), a Profile of `pl.profile_layers`, or an nn.Sequential, which
    is profiled with `example` (a batch). `gpus`: a number, on a cluster like that of `Hardware`, or a Hardware.
    `memory`: bytes that a rank may use. `link`: between nodes. `max_bubble`: part of the makespan. The `simulate` best
    are predicted by the simulator instead of a closed form.
    `choices` fix an axis to a value or several: dp, tp, pp, microbatch, rounds, schedule, stages_per_rank, remat,
    sharding; see `Choices`. `rounds`, flushed pipelines before an update, is 1 unless given: more never help 1F1B.
    Raises SizeError or CostError for what is no number; where nothing is feasible, `.best` tells what to relax.
    """
    hardware = gpus if isinstance(gpus, Hardware) else Hardware(gpus)
    if memory is not None:
        hardware = replace(hardware, memory_bytes=memory)
    if link is not None:
        hardware = replace(hardware, between=link)
    question = Question(_numbers(model, example), hardware, batch, max_bubble, Choices.of(choices))
    feasible: list[Choice] = []
    rejected: list[Rejected] = []
    for candidate in candidates(question):
        judged = candidate if isinstance(candidate, Rejected) else judge(candidate, question)
        if isinstance(judged, Rejected):
            rejected.append(judged)
        else:
            feasible.append(judged)
    feasible.sort(key=_order)
    for place, choice in enumerate(feasible[: positive_integer("simulate", simulate, minimum=0)]):
        if size(choice.candidate) <= _LARGEST_SIMULATION:
            feasible[place] = choice.simulated()
    feasible.sort(key=_order)
    ways_out = () if feasible else relaxations(question, rejected)
    return Plan(question, tuple(feasible), tuple(rejected), ways_out)


def _order(choice: Choice) -> tuple[float, float, int]:
    return choice.step_s, choice.memory_bytes, choice.candidate.rounds


def _numbers(model: Any, example: Any) -> Model:
    if isinstance(model, Transformer | Measured):
        return model
    if isinstance(model, str):
        if model not in PRESETS:
            raise SizeError(f"no preset is called {model!r}; there are {', '.join(PRESETS)}")
        return PRESETS[model]
    from pipelab.profiling import Profile, profile_layers  # torch, only where something is measured

    if isinstance(model, Profile):
        if example is None:
            raise SizeError("a Profile does not say how many samples it was made with: give Measured(profile, samples)")
        return Measured(model, len(example))
    if example is None:
        raise SizeError(f"to profile a {type(model).__name__}, plan needs example=, a batch like those of training")
    rows = len(example[0] if isinstance(example, tuple | list) else example)
    return Measured(profile_layers(model, example), rows, name=type(model).__name__)
