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


def check_device(device: str, ranks: Ranks, schedule: Schedule) -> None:
    """Raise EngineError for a GPU that is not there, or that a mesh cannot use."""
    if device == "cuda" and not torch.cuda.is_available():
        raise EngineError("device='cuda' was asked for, but torch finds no GPU here: leave it out, for the CPU")
    if device == "cuda" and ranks.num_ranks != schedule.num_ranks:
        raise EngineError("replicas and split layers run on the CPU: leave device='cuda' out, or the mesh")


def check_mesh(
    mesh: Mesh, options: Options, schedule: Schedule, ties: Sequence[Tie], split: Mapping[str, object]
) -> None:
    """Raise EngineError, with all reasons, for what a mesh cannot do; `split` are the names of split layers."""
    reasons = []
    several = mesh.num_ranks > mesh.pp
    if several and schedule.has_updates:
        reasons.append(
            f"schedule {schedule.name!r} updates weights on the way (U), where replicas and slices do not meet"
        )
    if mesh.dp > 1 and options.batchnorm == "minibatch":
        reasons.append("batchnorm='minibatch' knows the samples of one replica only: take batchnorm='microbatch'")
    for tie in ties:
        if any(name.rpartition(".")[0] in split for name in tie.names):
            reasons.append(f"{' and '.join(tie.names)} are one parameter, which tensor_parallel cannot split")
    if reasons:
        raise EngineError("\n  ".join([f"this cannot run on the mesh {mesh}:", *reasons]))
