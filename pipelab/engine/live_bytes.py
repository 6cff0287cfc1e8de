"""How much memory do the tensors of a step need? Counted from the tensors themselves, so that every run says the same.

The process's own figure is no answer on a CPU: the allocator keeps what was freed, so after the first step it no longer
moves. Here every operation of torch passes by [1]; what it made is a tensor over a new storage [2], added once however
many tensors look at it [3], and taken off again when the last of them, autograd's included, lets go of it [4].
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from pipelab.errors import positive_integer


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside `with LiveBytes() as memory:`, `memory.live` and `memory.peak` are the bytes of tensors made there.

    What was there before (parameters, the batch) does not count, gradients and activations do; a tensor that outlives
    the block goes on counting until it is freed. Backward counts too. Only operations of the thread that entered the
    block are seen, with those of the backward passes that it starts.
    Not seen: work space inside one operation, tensors that are not strided (sparse ones), and a storage that is resized
    directly, not through a tensor. It costs about 10 microseconds an operation: little beside a wide layer, more than
    the work itself in a tiny one, so times taken inside are not the model's.

    With `device` only tensors there are counted ("cuda": what is staged on the CPU is left out); `round_to` rounds each
    storage up to the block size of an allocator: 512 bytes is CUDA's.
    """

    def __init__(self, *, device: str | torch.device | None = None, round_to: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = None if device is None else torch.device(device)
        self._round_to = positive_integer("round_to", round_to)
        self._live = 0
        self._peak = 0
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}  # by the storage's address
        self._lock = threading.RLock()  # the last reference can be dropped by any thread

    @property
    def live(self) -> int:
        """Bytes alive now."""
        return self._live

    @property
    def peak(self) -> int:
        """The most bytes alive at once, since the beginning or the last `reset_peak`."""
        return self._peak

    def without(self, tensors: Iterable[Tensor]) -> int:
        """Bytes alive now, those of `tensors` left out."""
        storages = {storage._cdata for storage in _storages(list(tensors))}
        with self._lock:
            return self._live - sum(self._known[address][1] for address in storages if address in self._known)

    def reset_peak(self) -> None:
        """Measure the peak anew, from what is alive now."""
        with self._lock:
            self._peak = self._live

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))  # [1]
        for storage in _storages(result):
            if storage._cdata in self._known or func is _LIFT_FRESH or not _among(storage, args, kwargs):  # [2]
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if self._device is not None and not _covers(self._device, storage.device):
            return
        address, size = storage._cdata, -(-storage.nbytes() // self._round_to) * self._round_to

        def forget(reference: weakref.ref[torch.UntypedStorage]) -> None:  # [4]
            with self._lock:
                self._live -= self._known.pop(address)[1]

        with self._lock:
            reference, counted = self._known.get(address, (None, 0))  # [3]
            self._known[address] = (reference or weakref.ref(storage, forget), size)
            self._live += size - counted
            self._peak = max(self._peak, self._live)


_LIFT_FRESH = torch.ops.aten.lift_fresh.default  # torch.tensor(...): its argument is the new tensor itself


def _among(storage: torch.UntypedStorage, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Whether an argument lies in this storage: then the operation made a view of it or wrote into it."""
    given = _storages((args, list((kwargs or {}).values())))
    return any(storage._cdata == other._cdata for other in given)


def _storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors in nested lists and tuples; of a wrapper such as DTensor, those of its parts."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _storages(item)
    elif isinstance(value, Tensor):
        tensor: Any = value
        if is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            yield from _storages([getattr(tensor, name) for name in names])
        elif tensor.layout is torch.strided:
            yield tensor.untyped_storage()


def _covers(wanted: torch.device, found: torch.device) -> bool:
    return wanted.type == found.type and wanted.index in (None, found.index)
