"""What notebook and rank tell each other: the recipe of a rank's part, once, and its report, after every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from pipelab.action import Action
from pipelab.dependencies import graph
from pipelab.engine.cut import Piece
from pipelab.engine.loss import Part
from pipelab.engine.options import Options
from pipelab.engine.tensor_parallel import Style
from pipelab.engine.tying import Tie
from pipelab.engine.worker import Arrival, Timing, posting_early
from pipelab.lower import Instruction, lower
from pipelab.mesh import Mesh
from pipelab.schedule import Schedule
from pipelab.versions import update_groups, weight_versions


@dataclass(frozen=True)
class Recipe:
    """What a rank needs to take part in a pipeline. Layers bear the names that they have in the whole model."""

    layers: Mapping[int, tuple[int, nn.Sequential]]  # by stage: the number of its first layer, and its layers
    program: Sequence[Instruction]
    sources: Mapping[Action, Action]
    num_stages: int
    num_microbatches: int
    last_rank: int  # the one with the last stage
    versions: Mapping[Action, int]  # of the weights that its actions use, where they are updated on the way
    update_groups: Sequence[Sequence[int]]  # and the micro-batches that each update takes
    ties: Sequence[Mapping[int, str]]  # parameters that other ranks have too: one of their names, by rank
    mesh: Mesh  # ranks of the pipeline, as above, are its pp coordinates
    styles: Mapping[str, Style]  # the layers that are split over tp, by name
    options: Options


@dataclass(frozen=True)
class Report:
    """What a rank tells of a step. `loss` is known on the last stage's rank only; bytes are those of tensors."""

    timings: Sequence[Timing]
    arrivals: Sequence[Arrival]
    loss: Part | None
    gradient_norm: float | None
    peak_bytes: int | None
    held_bytes: Sequence[int]  # after each of the timings, where memory is measured
    sent_bytes: Mapping[str, int]  # along each axis of the mesh
    step: int
    finite: bool  # whether the gradients of this rank were numbers, or in float16 the scale deals with it
    skipped: bool  # whether no rank has updated, because some gradient was not finite
    held_versions: int  # of the weights, at the most


def recipes(
    schedule: Schedule,
    pieces: Sequence[Piece],
    ties: Sequence[Tie],
    mesh: Mesh,
    styles: Mapping[str, Style],
    options: Options,
) -> list[Recipe]:
    """One for each rank of the schedule: all its replicas and slices have the same."""
    program, reads = lower(schedule), sources(schedule)
    versions = weight_versions(schedule, options.weights) if schedule.has_updates else {}
    groups = [taken for update, taken in update_groups(schedule).items() if schedule.is_last_stage(update.stage)]
    return [
        Recipe(
            layers={stage: (pieces[stage].first, pieces[stage].layers) for stage in schedule.stages_on(rank)},
            program=posting_early(program.ranks[rank]),
            sources={action: reads[action] for action in schedule.ranks[rank] if action in reads},
            num_stages=schedule.num_stages,
            num_microbatches=schedule.num_microbatches,
            last_rank=schedule.placement[-1],
            versions={action: versions[action] for action in schedule.ranks[rank] if action in versions},
            update_groups=groups,
            ties=[tie.by_rank for tie in ties if rank in tie.by_rank and len(tie.by_rank) > 1],
            mesh=mesh,
            styles=styles,
            options=options,
        )
        for rank in range(schedule.num_ranks)
    ]


def sources(schedule: Schedule) -> dict[Action, Action]:
    """For every action that reads from a neighbouring stage: the action there that makes the value."""
    g = graph(schedule)
    return {g.actions[i]: g.actions[source] for i, source in enumerate(g.neighbour) if source >= 0}
