"""Replicas of a pipeline, each on its part of the batch: their gradients become one sum, once a step.

    replica 0   g ──┐                     "replicate": everyone gets the sum, and every optimizer does the same      [1]
    replica 1   g ──┴─► sum of all        "shard": each parameter has one owner, who alone has the sum and the
                                          optimizer's state for it, and sends the new value to the others            [2]

The sum is taken after the last backward of a step, or before an update on the way (U), so it does not matter in how
many pieces a backward came. "shard" is stage 1 of ZeRO (Rajbhandari et al. 2020), with whole parameters: right for any
optimizer. Both send the same: reduce and broadcast are the two halves of an all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipelab.engine.collectives import ring_bytes
from pipelab.engine.device import Device
from pipelab.engine.groups import Groups
from pipelab.engine.tensor_parallel import local


class Replicas:
    """The parameters of one rank, of which the same rank of every replica has a copy.

    `tied` ones have copies on other ranks of the pipeline too; all of those have the same owner, replica 0.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        groups: Groups,
        device: Device,
        *,
        sharded: bool = False,
        tied: Iterable[nn.Parameter] = (),
    ) -> None:
        self.count, self.sharded = groups.mesh.dp, sharded
        self.bytes = 0.0  # sent since somebody asked
        self._parameters, self._group, self._place = parameters, groups.replicas, groups.at.dp
        self._device, self._direct = device, groups.direct
        self._owner = _shared_out(parameters, set(tied), self.count if sharded else 1)

    @property
    def first(self) -> bool:
        """Whether this replica tells of what all replicas have."""
        return self._place == 0

    def owns(self, parameter: nn.Parameter) -> bool:
        """Whether it is this replica that answers for `parameter`: counts it in norms, and tells of it."""
        return self._owner[parameter] == self._place

    def updates(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer of this replica updates `parameter`."""
        return not self.sharded or self.owns(parameter)

    def wait_for_messages(self) -> None:
        """NCCL wants one group after the other: until all messages of this rank are through."""
        if self.count > 1:
            self._device.wait()

    @torch.no_grad()
    def add_up(self) -> None:
        """Make every gradient the sum over the replicas; under "shard" it is None where another owns it."""
        if self.count == 1:
            return
        self.wait_for_messages()  # those before an update on the way
        used = torch.tensor([p.grad is not None for p in self._parameters], dtype=torch.uint8)
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group)
        wanted = [p for p, anywhere in zip(self._parameters, used.tolist(), strict=True) if anywhere]
        for parameter in wanted:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        for owner, block, parts in self._blocks(wanted, [p.grad for p in wanted]):
            if self.sharded:
                self._send("reduce", block)
                dist.reduce(block, group=self._group, group_dst=owner)  # [2]
            else:
                self._send("all_reduce", block)
                dist.all_reduce(block, group=self._group)  # [1]
            _give_back(block, parts)
        for parameter in wanted:
            if not self.updates(parameter):
                parameter.grad = None

    @torch.no_grad()
    def spread(self) -> None:
        """Every replica takes the owner's new values, where the owner alone has updated."""
        if self.count == 1 or not self.sharded:
            return
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        for owner, block, parts in self._blocks(trained, [parameter.detach() for parameter in trained]):
            self._send("broadcast", block)
            dist.broadcast(block, group=self._group, group_src=owner)
            _give_back(block, parts)

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over the replicas of what each of them gives."""
        if self.count == 1:
            return numbers
        found = numbers.clone() if self._direct else self._device.take_back(numbers).clone()
        dist.all_reduce(found, group=self._group)
        return found.to(numbers.device)

    @torch.no_grad()
    def share_buffers(self, modules: nn.Module) -> None:
        """Every replica takes the buffers of the first, such as running statistics, each of which saw other samples."""
        buffers = list(modules.buffers())
        if self.count == 1 or not buffers:
            return
        for dtype in dict.fromkeys(buffer.dtype for buffer in buffers):
            parts = [buffer for buffer in buffers if buffer.dtype == dtype]
            block = self._block(parts)
            self._send("broadcast", block)
            dist.broadcast(block, group=self._group, group_src=0)
            _give_back(block, parts)

    def take_bytes(self) -> int:
        """Bytes sent since this was asked last."""
        sent, self.bytes = self.bytes, 0.0
        return round(sent)

    def _send(self, kind: str, block: Tensor) -> None:
        self.bytes += ring_bytes(kind, block.nbytes, self.count)

    def _blocks(
        self, parameters: Sequence[nn.Parameter], tensors: Sequence[Tensor | None]
    ) -> Iterator[tuple[int, Tensor, list[Tensor]]]:
        """What belongs to one owner and has one dtype, copied into one block of memory, so that it is one message."""
        blocks: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        for parameter, tensor in zip(parameters, tensors, strict=True):
            assert tensor is not None
            owner = self._owner[parameter]
            blocks.setdefault((owner, tensor.dtype), []).append(local(tensor))
        for (owner, _), parts in blocks.items():
            yield owner, self._block(parts), parts

    def _block(self, parts: Sequence[Tensor]) -> Tensor:
        """All of them in a row, where the group can take them: on the GPU with NCCL, else in the host's memory."""
        block = torch.cat([part.reshape(-1) for part in parts])
        found: Tensor = block if self._direct else self._device.take_back(block)
        return found


def _shared_out(parameters: Sequence[nn.Parameter], tied: set[nn.Parameter], owners: int) -> dict[nn.Parameter, int]:
    """The owner of each parameter: the largest first, each to the one that has least."""
    load = [0] * owners
    found = {}
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        owner = 0 if parameter in tied else load.index(min(load))
        found[parameter] = owner
        load[owner] += parameter.numel()
    return found


def _give_back(block: Tensor, parts: Sequence[Tensor]) -> None:
    start = 0
    for part in parts:
        part.copy_(block[start : start + part.numel()].view_as(part))
        start += part.numel()
