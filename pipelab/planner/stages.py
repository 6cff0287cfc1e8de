"""A model cut into stages, and what every stage costs one GPU for one sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pipelab.partition import Partition, partition_layers
from pipelab.planner.hardware import Hardware
from pipelab.planner.model import Layer, Model


@dataclass(frozen=True)
class Stage:
    """Sums over the layers of one stage; bytes and seconds are for one sample, `fixed_s` for one micro-batch."""

    parameters: float
    shared: float  # of these, also in the first layer of the model
    forward_s: float
    backward_s: float
    fixed_s: float
    kept_bytes: float
    input_bytes: float
    inputs_bytes: float  # the inputs of all its layers
    largest_kept_bytes: float  # of one layer
    largest_parameters: float
    output_bytes: float

    @classmethod
    def of(cls, layers: Sequence[Layer]) -> Stage:
        """The stage of these layers."""
        return cls(
            parameters=sum(layer.parameters for layer in layers),
            shared=sum(layer.shared for layer in layers),
            forward_s=sum(layer.forward_s for layer in layers),
            backward_s=sum(layer.backward_s for layer in layers),
            fixed_s=sum(layer.fixed_s for layer in layers),
            kept_bytes=sum(layer.kept_bytes for layer in layers),
            input_bytes=layers[0].input_bytes,
            inputs_bytes=sum(layer.input_bytes for layer in layers),
            largest_kept_bytes=max(layer.kept_bytes for layer in layers),
            largest_parameters=max(layer.parameters for layer in layers),
            output_bytes=layers[-1].output_bytes,
        )


@lru_cache(maxsize=4096)
def stages(model: Model, hardware: Hardware, tp: int, num_stages: int) -> tuple[Stage, ...]:
    """The model on GPUs of groups of `tp`, cut so that the slowest stage is as fast as it can be."""
    row = model.row(tp, hardware)
    return tuple(Stage.of(row[part]) for part in _cut(model, num_stages))


@lru_cache(maxsize=256)
def _cut(model: Model, num_stages: int) -> Partition:
    return partition_layers(model.weights, num_stages)
