"""What each layer of a model costs, measured on one example: the numbers that a partition is made from.

Each layer runs alone, forward and backward, on a copy of itself and with one torch thread, as on a device that has
nothing else to do. The model keeps its weights, gradients, running statistics and mode, and torch its random numbers.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from pipelab.errors import PartitionError, positive_integer


@dataclass(frozen=True)
class LayerProfile:
    """One layer's figures for the example that was given. Seconds are medians; everything else is exact.

    parameters        numbers in its weights; a weight shared with an earlier layer counts there
    parameter_bytes   the bytes of those
    output_bytes      what a cut behind it sends forward; the gradient that comes back is as large
    saved_bytes       what autograd keeps for its backward: no weights, and nothing that an earlier layer keeps already
    forward_flops     2 for each multiply-add of a matrix product, a convolution or an attention score, masked or not;
                      other operations count as 0
    """

    name: str
    parameters: int
    parameter_bytes: int
    output_bytes: int
    saved_bytes: int
    forward_flops: int
    forward_s: float
    backward_s: float

    @property
    def seconds(self) -> float:
        """Forward and backward together."""
        return self.forward_s + self.backward_s


class Profile(tuple[LayerProfile, ...]):
    """One `LayerProfile` for each layer, in order. Printed, it is a table with the sums below."""

    def __str__(self) -> str:
        rows = _table(self)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            [cell.ljust(width) if column == 1 else cell.rjust(width) for column, (cell, width) in enumerate(cells)]
            for cells in (zip(row, widths, strict=True) for row in rows)
        )
        return "\n".join("  ".join(line).rstrip() for line in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *body = _table(self)
        rows = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
        rows += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in body]
        return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _table(layers: Profile) -> list[list[str]]:
    """Head, one row a layer, and the sums; outputs have no sum, since only those at a cut are sent."""
    head = ["", "layer", "parameters", "output KiB", "saved KiB", "forward MFLOP", "forward ms", "backward ms"]
    rows = [[str(place), layer.name, *_cells([layer])] for place, layer in enumerate(layers)]
    parameters, _, *sums = _cells(layers)
    return [head, *rows, ["", "all", parameters, "", *sums]]


def _cells(layers: Iterable[LayerProfile]) -> list[str]:
    def total(field: str, unit: float) -> str:
        return f"{sum(getattr(layer, field) for layer in layers) / unit:,.2f}"

    layers = tuple(layers)
    memory = [total("output_bytes", 1024), total("saved_bytes", 1024)]
    work = [total("forward_flops", 1e6), total("forward_s", 1e-3), total("backward_s", 1e-3)]
    return [f"{sum(layer.parameters for layer in layers):,}", *memory, *work]


def profile_layers(model: nn.Sequential, example: Any, repeat: int = 5) -> Profile:
    """Parameters, bytes, FLOPs and seconds of every layer of `model`, for one micro-batch like `example`.

    `example` is what the first layer takes, a tensor or a nest of them. Seconds are medians of `repeat` runs in
    training mode, after one that is dropped; far below a millisecond they show torch's overhead more than the work.
    `partition_layers([layer.seconds for layer in profile_layers(model, example)], 4)` is the cut by measured time.

    Raises PartitionError where `model` is no `nn.Sequential`, is empty, or a layer cannot take the value that reaches
    it; SizeError where `repeat` is no positive integer.
    """
    repeat = positive_integer("repeat", repeat)
    if not isinstance(model, nn.Sequential):
        raise PartitionError(
            f"only an nn.Sequential has layers to profile, and {type(model).__name__} is none: "
            "write the model as a row of layers, each taking what the one before gave"
        )
    if not len(model):
        raise PartitionError("there is no layer to profile: the nn.Sequential is empty")
    kept, value, layers = _Kept(), example, []
    weights: dict[int, nn.Parameter] = {}
    with _one_quiet_thread(_device(model, example)) as synchronize, torch.enable_grad():
        for place, (key, layer) in enumerate(zip(model._modules, model, strict=True)):
            name = type(layer).__name__ if key.isdigit() else key
            own = {id(weight): weight for weight in layer.parameters() if id(weight) not in weights}
            weights.update(own)
            bench = _Bench(copy.deepcopy(layer).train(), value, first=place == 0, synchronize=synchronize)
            try:
                saved, value = bench.saved_bytes(kept)
            except Exception as error:
                raise PartitionError(f"layer {place} ({name}) cannot take {_shapes(value)}: {error}") from error
            flops = bench.forward_flops()
            times = [bench.seconds() for _ in range(repeat + 1)][1:]
            forward_s, backward_s = (statistics.median(column) for column in zip(*times, strict=True))
            layers.append(
                LayerProfile(
                    name=name,
                    parameters=sum(weight.numel() for weight in own.values()),
                    parameter_bytes=_bytes(own.values()),
                    output_bytes=_bytes(_tensors(value)),
                    saved_bytes=saved,
                    forward_flops=flops,
                    forward_s=forward_s,
                    backward_s=backward_s,
                )
            )
    return Profile(layers)


class _Kept:
    """The storages that autograd keeps, each counted at the first layer that keeps it.

    A layer is fed a copy of the layer before's output, so that one that works in place spoils nothing; `same` says that
    the copy stands for the original. Everything is held, so that no address is used twice.
    """

    def __init__(self) -> None:
        self._stands_for: dict[int, int] = {}
        self._held: list[torch.UntypedStorage] = []
        self._counted: set[int] = set()

    def same(self, copied: Tensor, original: Tensor) -> None:
        address = original.untyped_storage()._cdata
        self._stands_for[copied.untyped_storage()._cdata] = self._stands_for.get(address, address)
        self._held += [copied.untyped_storage(), original.untyped_storage()]

    def add(self, tensor: Tensor) -> int:
        """Bytes that this one adds: all of its storage, or 0 where that is counted already."""
        storage = tensor.untyped_storage()
        address = self._stands_for.get(storage._cdata, storage._cdata)
        if address in self._counted:
            return 0
        self._counted.add(address)
        self._held.append(storage)
        return storage.nbytes()


class _Bench:
    """One layer's copy and the value that reaches it; every run starts from a fresh copy of that value."""

    def __init__(self, layer: nn.Module, value: Any, *, first: bool, synchronize: Callable[[], None]) -> None:
        self.layer, self.value, self.synchronize = layer, value, synchronize
        self.needs_input_gradient = not first  # nobody waits for the gradient of the data

    def inputs(self) -> tuple[list[Tensor], Any]:
        """The leaves whose gradient is wanted, and the copies of them that the layer may write into."""
        leaves: list[Tensor] = []

        def fresh(item: Any) -> Any:
            if not isinstance(item, Tensor):
                return item
            leaf = item.detach()
            if self.needs_input_gradient and (leaf.is_floating_point() or leaf.is_complex()):
                leaves.append(leaf.requires_grad_())
            return leaf.clone()

        return leaves, tree_map(fresh, self.value)

    def saved_bytes(self, kept: _Kept) -> tuple[int, Any]:
        """What autograd keeps in addition to `kept`, and the output, detached."""
        _, inputs = self.inputs()
        for copied, original in zip(_tensors(inputs), _tensors(self.value), strict=True):
            kept.same(copied, original)
        state = {tensor.untyped_storage()._cdata for tensor in (*self.layer.parameters(), *self.layer.buffers())}
        added = []

        def pack(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata not in state:
                added.append(kept.add(tensor))
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = self.layer(inputs)
        return sum(added), tree_map(lambda item: item.detach() if isinstance(item, Tensor) else item, output)

    def forward_flops(self) -> int:
        _, inputs = self.inputs()
        # Torch counts only some of the fused attention kernels; written out as matrix products all of them count.
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            self.layer(inputs)
        return int(counter.get_total_flops())

    def seconds(self) -> tuple[float, float]:
        """One forward and one backward; 0 for a backward that has nothing to do."""
        leaves, inputs = self.inputs()
        self.synchronize()
        start = time.perf_counter()
        output = self.layer(inputs)
        self.synchronize()
        forward_s = time.perf_counter() - start

        wanted = leaves + [weight for weight in self.layer.parameters() if weight.requires_grad]
        outputs = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        if not (wanted and outputs):
            return forward_s, 0.0
        gradients = [torch.ones_like(tensor) for tensor in outputs]
        self.synchronize()
        start = time.perf_counter()
        torch.autograd.grad(outputs, wanted, gradients, allow_unused=True)  # unlike backward(), fills no .grad
        self.synchronize()
        return forward_s, time.perf_counter() - start


@contextmanager
def _one_quiet_thread(device: torch.device) -> Iterator[Callable[[], None]]:
    """One torch thread, and random numbers that are put back; gives the function that waits for the device."""
    threads, on_gpu = torch.get_num_threads(), device.type == "cuda"
    try:
        torch.set_num_threads(1)
        with torch.random.fork_rng(devices=[device] if on_gpu else []):
            yield (lambda: torch.cuda.synchronize(device)) if on_gpu else (lambda: None)
    finally:
        torch.set_num_threads(threads)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _device(model: nn.Module, example: Any) -> torch.device:
    return next((tensor.device for tensor in (*_tensors(example), *model.parameters())), torch.device("cpu"))


def _shapes(value: Any) -> str:
    described = [f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}" for tensor in _tensors(value)]
    return ", ".join(described) or f"a {type(value).__name__} without tensors"
