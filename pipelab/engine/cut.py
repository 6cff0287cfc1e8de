"""From a model to its stages: contiguous layers, under the names that they have in the whole model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from torch import nn

from pipelab.errors import EngineError, PartitionError
from pipelab.partition import Partition, partition_layers


class Piece(NamedTuple):
    """One stage's layers, and the number of the first of them in the whole model."""

    first: int
    layers: nn.Sequential


def cut(model: nn.Module, num_stages: int, partition: Sequence[slice] | Sequence[int] | None = None) -> list[Piece]:
    """`model`, cut into `num_stages` pieces. The layers are the model's own, not copies.

    `partition` has a slice of layers a stage, or a number of layers a stage. By default the largest number of
    parameters of a stage is as small as it can be; every layer counts as one parameter more than it has, so that those
    without any are spread too.
    Raises EngineError for a model that is no plain `nn.Sequential`, PartitionError for a partition that does not fit.
    """
    layers = _layers(model)
    if num_stages > len(layers):
        raise PartitionError(
            f"the schedule has {num_stages} stages, but the model only {len(layers)} layers, and every stage needs "
            f"one: take a schedule of at most {len(layers)} stages"
        )
    slices: Sequence[slice]
    if partition is None:
        weights = [1 + sum(parameter.numel() for parameter in layer.parameters()) for layer in layers.values()]
        slices = partition_layers(weights, num_stages)
    elif all(isinstance(part, slice) for part in partition):
        slices = tuple(partition)  # type: ignore[arg-type]
    else:
        slices = Partition.from_sizes([1] * len(layers), partition)  # type: ignore[arg-type]
    _check(slices, num_stages, len(layers))
    named = list(layers.items())
    return [Piece(part.start or 0, nn.Sequential(OrderedDict(named[part]))) for part in slices]


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of `model` by name, in order."""
    found = type(model).__qualname__
    if not isinstance(model, nn.Sequential):
        raise EngineError(
            f"the model must be an nn.Sequential, whose layers can be cut into stages; found a {found}. "
            "Write its forward as a row of layers: what one returns is what the next one is given"
        )
    if type(model).forward is not nn.Sequential.forward:
        raise EngineError(
            f"{found} has a forward of its own, so it is more than its layers in a row; put that into a layer"
        )
    if model._parameters or model._buffers:
        names = ", ".join([*model._parameters, *model._buffers])
        raise EngineError(
            f"the model has {names} of its own, outside all layers; put them into the layer that uses them"
        )
    if model._forward_hooks or model._forward_pre_hooks or model._backward_hooks or model._backward_pre_hooks:
        raise EngineError("the model has hooks of its own, and no rank has the whole model; register them on a layer")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise EngineError(f"{name} has no shape yet; run the model once before it is cut into stages")
        if tensor.device.type != "cpu":
            raise EngineError(f"{name} is on {tensor.device}; give the pipeline the model on the CPU")
    return dict(model._modules)  # named_children() leaves out a layer's second place


def _check(slices: Sequence[slice], num_stages: int, num_layers: int) -> None:
    if len(slices) != num_stages:
        raise PartitionError(f"the partition has {len(slices)} stages, but the schedule has {num_stages}")
    at = 0
    for stage, part in enumerate(slices):
        start, stop, step = part.indices(num_layers)
        if start != at or stop <= start or step != 1:
            raise PartitionError(
                f"the partition gives stage {stage} layers {part.start}:{part.stop}; "
                f"expected it to begin with layer {at} and to hold at least one layer"
            )
        at = stop
    if at != num_layers:
        raise PartitionError(f"the partition ends before layer {at}, but the model has {num_layers} layers")
