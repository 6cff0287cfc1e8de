"""Where a rank computes: on the CPU, or on a GPU, whose work is ordered now and done later.

All that the engine asks of either is here: bring values there and back, note a moment, keep random numbers apart.
A moment on a GPU is an event in the order of its work; when it was, is known once the step is over. So what is timed
are marks, and `seconds` makes times of them, on the ranks' common clock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pipelab.ranks import now

Mark = Any  # a float on the CPU, a torch.cuda.Event on a GPU


class Device:
    """The CPU, where all is done at once. Everything that differs on a GPU is a method that `Cuda` replaces."""

    kind = "cpu"
    where = torch.device("cpu")
    block_bytes = 1  # to which an allocation is rounded up

    def take_in(self, layers: nn.ModuleList) -> nn.ModuleList:
        """The layers, with their parameters and buffers on this device."""
        return layers

    def put(self, content: Any) -> Any:
        """Tuples, lists and dicts with their tensors on this device."""
        return content

    def take_back(self, content: Any) -> Any:
        """The same with the tensors on the CPU, for another process."""
        return content

    def begin(self, *, paced: bool = False) -> None:
        """The clock of a step starts. On emulated accelerators every mark waits for the layers' work before it."""

    def mark(self) -> Mark:
        """This moment."""
        return now()

    def seconds(self, mark: Mark) -> float:
        """When a mark was. On a GPU this waits for it."""
        return float(mark)

    def wait(self) -> None:
        """Until all that was ordered is done. A message over NCCL that was sent is done when it was received."""

    def wait_for_layers(self) -> None:
        """Until the layers are through, whatever else is under way."""

    def new_stream(self) -> Any:
        """An order of work of its own, beside that of the layers."""
        return None

    def inside(self, stream: Any) -> AbstractContextManager[Any]:
        """What is ordered inside is ordered there."""
        return nullcontext()

    def hand_over(self, tensors: Sequence[Tensor], *, to: Any = None, out_of: Any = None) -> None:
        """From the layers `to` a stream, or `out_of` one to the layers: who gets the tensors waits until they are."""

    def seed(self) -> None:
        """Let the random numbers of this device begin anew, by the seed that the CPU's have."""

    def random_state_kept(self) -> AbstractContextManager[None]:
        """After it, torch's random numbers go on as if nothing had been drawn inside."""
        return torch.random.fork_rng(devices=[])

    def random_state(self) -> Any:
        """Where torch's random numbers are, the CPU's and those of this device, for `go_back_to`."""
        return torch.get_rng_state()

    def go_back_to(self, random_state: Any) -> None:
        """Let torch's random numbers go on from there."""
        torch.set_rng_state(random_state)

    def autocast(self, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
        """Inside, torch's autocast computes products in `dtype`; None changes nothing."""
        return nullcontext() if dtype is None else torch.autocast(self.kind, dtype)


CPU = Device()


class Cuda(Device):
    """A GPU: the one whose number on its host is this process's there, or one that several of them share."""

    kind = "cuda"
    block_bytes = 512

    def __init__(self) -> None:
        self.where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(self.where)
        self._paced = False
        self._zero, self._zero_s = _event(), 0.0

    def take_in(self, layers: nn.ModuleList) -> nn.ModuleList:
        return layers.to(self.where)

    def put(self, content: Any) -> Any:
        return _moved(content, lambda tensor: tensor.to(self.where))

    def take_back(self, content: Any) -> Any:
        return _moved(content, Tensor.cpu)

    def begin(self, *, paced: bool = False) -> None:
        self._paced = paced
        self._zero.record()
        self._zero.synchronize()
        self._zero_s = now()

    def mark(self) -> Mark:
        if self._paced:
            self.wait_for_layers()
            return now()
        event = _event()
        event.record()
        return event

    def seconds(self, mark: Mark) -> float:
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return self._zero_s + float(self._zero.elapsed_time(mark)) / 1000

    def wait(self) -> None:
        torch.cuda.synchronize(self.where)

    def wait_for_layers(self) -> None:
        torch.cuda.current_stream(self.where).synchronize()

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.where)  # type: ignore[no-untyped-call]

    def inside(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def hand_over(self, tensors: Sequence[Tensor], *, to: Any = None, out_of: Any = None) -> None:
        layers = torch.cuda.current_stream(self.where)
        giver, taker = (layers, to) if out_of is None else (out_of, layers)
        taker.wait_stream(giver)
        for tensor in tensors:
            tensor.record_stream(taker)  # its memory is not used again before the taker is through with it

    def seed(self) -> None:
        torch.cuda.manual_seed(torch.initial_seed())

    def random_state_kept(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng(devices=[self.where])

    def random_state(self) -> Any:
        return super().random_state(), torch.cuda.get_rng_state(self.where)

    def go_back_to(self, random_state: Any) -> None:
        on_cpu, here = random_state
        super().go_back_to(on_cpu)
        torch.cuda.set_rng_state(here, self.where)


def device_of(kind: str) -> Device:
    """The device of this rank: "cpu" or "cuda"."""
    return Cuda() if kind == "cuda" else CPU


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _moved(content: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """Tuples, named tuples, lists and dicts again, with every tensor moved."""
    if isinstance(content, Tensor):
        return move(content)
    if isinstance(content, dict):
        return {key: _moved(value, move) for key, value in content.items()}
    if isinstance(content, tuple) and hasattr(content, "_fields"):
        return type(content)(*[_moved(value, move) for value in content])
    if isinstance(content, tuple | list):
        return type(content)([_moved(value, move) for value in content])
    return content
