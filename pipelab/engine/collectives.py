"""How many bytes does a collective send? The same on every rank, by the ring that gloo and NCCL use for large tensors.

    n ranks, a tensor of b bytes, cut into n pieces that go round the ring:
    every piece is added up on n - 1 hops         reduce      (n - 1)/n b
    and, complete, handed on over n - 1 hops      broadcast   (n - 1)/n b       all-reduce: both

For a reduce to one rank, or a broadcast from one, it is the mean over the ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

ROUNDS = {"all_reduce": 2, "reduce": 1, "broadcast": 1}


def ring_bytes(kind: str, num_bytes: int, ranks: int) -> float:
    """Bytes that each of `ranks` sends for one collective on a tensor of `num_bytes`."""
    return ROUNDS[kind] * (ranks - 1) / ranks * num_bytes


class AllReduced(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside `with AllReduced() as seen:`, `seen.bytes` is the size of what DTensor has summed over the ranks."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: then its collectives, on plain tensors, pass here
        if func is torch.ops._c10d_functional.all_reduce.default:
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))
