"""The process groups of a mesh: along each axis the ranks that this one talks to.

On GPUs with NCCL each group has gloo too, for what is not on a GPU. Several groups are then at work at once, each in an
order of its own, and none waits for another in a circle. Messages alone do not (see `pipelab.engine.nccl`). All
replicas and slices go through one program, so a collective is a step that they take together. At the end of a program
all messages are taken, and replicas wait for that before they meet.

An update on the way (U) waits too, until all that its rank has sent is received. This is no consequence of lower()'s
proof, because over NCCL a message is received where it is taken, which may be later than the program's receive.
PipeDream, 2BW and `with_updates` of GPipe, 1F1B, interleaved, ZB-H1 and ZB-V were gone through under that rule, on up
to 6 ranks, and none hangs; an order of one's own with U might, with replicas on GPUs.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from pipelab.mesh import Mesh
from pipelab.ranks import GROUP_TIMEOUT, local_state


class Groups:
    """This rank's place in `mesh`, and its group along each axis, for tensors on devices of `kind`.

    Within a group a rank's number is its coordinate: in `pipeline` it is the one that schedule and program know.
    """

    def __init__(self, mesh: Mesh, kind: str) -> None:
        self.mesh = mesh
        self.at = mesh.coordinates(dist.get_rank())
        self.direct = kind == "cuda" and "nccl" in str(dist.get_backend_config())  # from GPU to GPU
        self.pipeline: Any = _mine(mesh, "pp") if mesh.pp < mesh.num_ranks else dist.group.WORLD
        self.replicas: Any = _mine(mesh, "dp") if mesh.dp > 1 else None
        self.slices: DeviceMesh | None = None  # of every layer, where there are several: the form that DTensor takes
        if mesh.tp > 1:
            self.slices = DeviceMesh.from_group(_mine(mesh, "tp"), kind)
        # of the pipeline again, for messages to later and to earlier ranks
        self.ways = (_mine(mesh, "pp", "nccl"), _mine(mesh, "pp", "nccl")) if self.direct else None


def join(mesh: Mesh, kind: str) -> Groups:
    """The groups of `mesh`, made once for all pipelines on the same ranks. All ranks must call it."""
    known = local_state().setdefault("pipelab.engine groups", {})
    if (mesh, kind) not in known:
        known[mesh, kind] = Groups(mesh, kind)
    groups: Groups = known[mesh, kind]
    return groups


def _mine(mesh: Mesh, axis: str, backend: str | None = None) -> Any:
    """This rank's group along `axis`; by default it can do what the group of all ranks can."""
    groups = [list(group) for group in mesh.groups(axis)]
    made = dist.new_subgroups_by_enumeration(groups, GROUP_TIMEOUT, backend)  # type: ignore[no-untyped-call]
    return made[0]
