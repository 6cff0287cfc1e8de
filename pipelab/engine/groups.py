"""The process groups of a mesh: along each axis the ranks that this one talks to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipelab.action import Kind
from pipelab.engine.options import Options
from pipelab.engine.tying import Tie
from pipelab.errors import EngineError
from pipelab.mesh import Mesh
from pipelab.ranks import local_state
from pipelab.schedule import Schedule


class Groups:
    """This rank's place in `mesh`, and its group along each axis.

    Within a group a rank's number is its coordinate: in `pipeline` it is the one that schedule and program know.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.at = mesh.coordinates(dist.get_rank())
        self.pipeline: Any = dist.group.WORLD
        self.replicas: Any = None
        self.slices: DeviceMesh | None = None  # of every layer, where there are several: the form that DTensor takes
        if mesh.pp < mesh.num_ranks:
            whole = init_device_mesh("cpu", mesh.shape, mesh_dim_names=mesh.order)
            self.pipeline = whole.get_group("pp")
            self.replicas = whole.get_group("dp") if mesh.dp > 1 else None
            self.slices = whole["tp"] if mesh.tp > 1 else None


def join(mesh: Mesh) -> Groups:
    """The groups of `mesh`, made once for all pipelines on the same ranks. All ranks must call it."""
    known = local_state().setdefault("pipelab.engine groups", {})
    if mesh not in known:
        known[mesh] = Groups(mesh)
    groups: Groups = known[mesh]
    return groups


def check_mesh(
    mesh: Mesh, options: Options, schedule: Schedule, ties: Sequence[Tie], split: Mapping[str, object]
) -> None:
    """Raise EngineError, with all reasons, for what a mesh cannot do; `split` are the names of split layers."""
    reasons = []
    several = mesh.num_ranks > mesh.pp
    if several and any(action.kind is Kind.U for order in schedule.ranks for action in order):
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
