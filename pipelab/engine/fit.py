"""Do they fit together, schedule, ranks, mesh and options? Asked before anything is sent to the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pipelab.engine.options import Options
from pipelab.engine.tying import Tie
from pipelab.errors import EngineError, SizeError
from pipelab.mesh import Mesh
from pipelab.ranks import Ranks
from pipelab.schedule import Schedule
from pipelab.versions import update_groups


def check_ranks(schedule: Schedule, ranks: Ranks, mesh: Mesh | None) -> Mesh:
    """The mesh, by default that of the schedule alone. Raises SizeError unless all three have the same ranks."""
    if not isinstance(schedule, Schedule):
        raise EngineError(f"schedule must be a Schedule, as gpipe(4, 8) makes one, got {schedule!r}")
    if not isinstance(ranks, Ranks):
        raise EngineError(f"ranks must be Ranks, as in Ranks({schedule.num_ranks}), got {ranks!r}")
    if mesh is not None and not isinstance(mesh, Mesh):
        raise EngineError(f"mesh must be a Mesh, as in Mesh(dp=2, pp={schedule.num_ranks}, tp=2), got {mesh!r}")
    if mesh is not None and mesh.pp != schedule.num_ranks:
        raise SizeError(
            f"schedule {schedule.name!r} is for {schedule.num_ranks} ranks, but each pipeline of the mesh {mesh} has "
            f"{mesh.pp}: take pp={schedule.num_ranks}, or a schedule for {mesh.pp}"
        )
    if mesh is not None and ranks.num_ranks != mesh.num_ranks:
        raise SizeError(
            f"the mesh {mesh} has {mesh.num_ranks} ranks, but there are {ranks.num_ranks}: take "
            f"Ranks({mesh.num_ranks}), or another mesh"
        )
    if mesh is None and ranks.num_ranks != schedule.num_ranks:
        raise SizeError(
            f"schedule {schedule.name!r} is for {schedule.num_ranks} ranks, but there are {ranks.num_ranks}: "
            f"take Ranks({schedule.num_ranks}), or a schedule for {ranks.num_ranks}"
        )
    return mesh or Mesh(pp=schedule.num_ranks)


def usual_device(ranks: Ranks) -> str:
    """Where ranks of this backend compute."""
    return "cuda" if getattr(ranks, "backend", "") == "nccl" else "cpu"


def check_options(options: Options, schedule: Schedule) -> None:
    """Raise EngineError for a GPU that is not there; CostError where pace is for others."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise EngineError("device='cuda' was asked for, but torch finds no GPU here: leave it out, for the CPU")
    if options.pace is not None:
        options.pace.per_stage(schedule.num_stages)
        options.pace.bytes_per_stage(schedule.num_stages)


def check_mesh(mesh: Mesh, ties: Sequence[Tie], split: Mapping[str, object]) -> None:
    """Raise EngineError, with all reasons, for what a mesh cannot do; `split` are the names of split layers."""
    reasons = []
    for tie in ties:
        if any(name.rpartition(".")[0] in split for name in tie.names):
            reasons.append(f"{' and '.join(tie.names)} are one parameter, which tensor_parallel cannot split")
    if reasons:
        raise EngineError("\n  ".join([f"this cannot run on the mesh {mesh}:", *reasons]))


def check_updates(options: Options, schedule: Schedule, ties: Sequence[Tie]) -> None:
    """Raise EngineError, with all reasons, where the engine cannot update on the way as `schedule` does (U)."""
    if not schedule.has_updates:
        if options.weights != "stashing":
            raise EngineError(
                f"weights={options.weights!r} is a rule for schedules with weight updates among their actions, as "
                f"pipedream(2, 4) has; {schedule.name!r} updates once, after all of them: leave it out"
            )
        return
    reasons = []
    if options.optimizer is None:
        reasons.append("there is no optimizer to make them: give one")
    if schedule.stages_per_rank > 1:
        reasons.append("a rank holds several stages: take one stage a rank")
    taken: dict[int, set[tuple[int, ...]]] = {stage: set() for stage in range(schedule.num_stages)}
    for update, microbatches in update_groups(schedule).items():
        taken[update.stage].add(tuple(sorted(microbatches)))
    if any(groups != taken[0] for groups in taken.values()):
        reasons.append("its stages do not update after the same micro-batches, so nobody knows what to divide by")
    if options.max_norm is not None:
        reasons.append("max_norm needs the gradients of all ranks, for which no rank waits here: leave it out")
    if options.batchnorm == "minibatch":
        reasons.append("batchnorm='minibatch' needs a mini-batch that has one version of the weights: leave it out")
    if options.precision == "fp16":
        reasons.append("fp16 leaves out an update for gradients that overflow on any rank: precision='bf16', or 'fp32'")
    for tie in ties:
        if len(tie.by_rank) > 1:
            reasons.append(f"{' and '.join(tie.names)} are one parameter on several ranks, which update it apart")
    if options.weights == "latest" and options.remat != "none":
        reasons.append("weights='latest' is about saved activations, and remat saves none: remat='none'")
    if options.weights == "latest" and options.precision == "bf16":
        reasons.append("weights='latest' reads weights where they lie, and bf16 forwards save copies: precision='fp32'")
    if reasons:
        raise EngineError(
            "\n  ".join(
                [f"schedule {schedule.name!r} has weight updates among its actions (kind U), and cannot run:", *reasons]
            )
        )
