"""The process groups of a mesh: along each axis the ranks that this one talks to."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipelab.mesh import Mesh
from pipelab.ranks import local_state


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
