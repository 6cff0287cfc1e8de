"""One weight on several ranks, as where the embedding's matrix is the output layer's too.

    rank 0   embedding ── gradient ──┐  ▲            each rank has a copy of the weight, with a gradient of its own use
                                     ▼  │            the first of them adds up all, in rank order             [1]
    rank 3   head ────── gradient ─► sum ┴─► sum     and all get the same sum, so the copies stay the same    [2]

Equal copies with equal gradients and equal optimizers stay equal to the bit: no values have to be sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipelab.engine.cut import Piece
from pipelab.errors import EngineError

_TAG = 2**30  # beyond those of all actions


class Tie(NamedTuple):
    """One parameter: all the names that it has in the whole model, in order, and one of its names by rank."""

    names: Sequence[str]
    by_rank: Mapping[int, str]


def find_ties(pieces: Sequence[Piece], placement: Sequence[int]) -> list[Tie]:
    """The parameters that have several names, on one rank or on several.

    Raises EngineError for a buffer on several ranks: two layers that write into it cannot be kept the same.
    """
    seen: dict[int, list[tuple[int, str]]] = {}
    buffers: dict[int, tuple[int, str]] = {}
    for rank, piece in zip(placement, pieces, strict=True):
        for name, parameter in piece.layers.named_parameters(remove_duplicate=False):
            seen.setdefault(id(parameter), []).append((rank, name))
        for name, buffer in piece.layers.named_buffers(remove_duplicate=False):
            other, first = buffers.setdefault(id(buffer), (rank, name))
            if other != rank:
                raise EngineError(
                    f"{first} on rank {other} and {name} on rank {rank} are one and the same buffer, which the engine "
                    "cannot share between ranks: give a partition that puts both on one rank, or a copy to each"
                )
    return [Tie([name for _, name in places], dict(sorted(places))) for places in seen.values() if len(places) > 1]


class Shared:
    """A parameter of this rank that others of its `pipeline`, a group, have too; `ranks` are all of them, in order."""

    def __init__(self, parameter: nn.Parameter, ranks: Sequence[int], pipeline: Any) -> None:
        self.parameter, self._ranks, self._pipeline = parameter, ranks, pipeline
        self._sent_bytes = 0

    @property
    def counts_here(self) -> bool:
        """Whether this rank is the one that counts the parameter, where every parameter counts once."""
        return self._ranks[0] == dist.get_rank(self._pipeline)

    def take_sent_bytes(self) -> int:
        """Bytes of gradients sent since this was asked last."""
        sent, self._sent_bytes = self._sent_bytes, 0
        return sent

    def add_up(self) -> None:
        """Make the gradient the sum of those of all ranks; None where all are None. All `ranks` must call it."""
        first, *others = self._ranks
        if self.counts_here:
            for rank in others:
                other = self._receive(rank)  # [1]
                mine = self.parameter.grad
                self.parameter.grad = other if mine is None else mine if other is None else mine + other
            for rank in others:
                self._send(rank)  # [2]
        else:
            self._send(first)
            self.parameter.grad = self._receive(first)

    def _send(self, rank: int) -> None:
        gradient = self.parameter.grad
        dist.send(torch.tensor([gradient is not None]), group=self._pipeline, group_dst=rank, tag=_TAG)
        if gradient is not None:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            self._sent_bytes += dense.nbytes
            dist.send(dense.contiguous().cpu(), group=self._pipeline, group_dst=rank, tag=_TAG)

    def _receive(self, rank: int) -> Tensor | None:
        there = torch.empty(1, dtype=torch.bool)
        dist.recv(there, group=self._pipeline, group_src=rank, tag=_TAG)
        if not there:
            return None
        gradient = torch.empty(self.parameter.shape, dtype=self.parameter.dtype)
        dist.recv(gradient, group=self._pipeline, group_src=rank, tag=_TAG)
        return gradient.to(self.parameter.device)
