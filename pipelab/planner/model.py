"""What a model costs, as a row of layers: by formula from a transformer's five numbers, or measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pipelab.errors import CostError, SizeError, amount, positive_integer
from pipelab.planner.hardware import Hardware, all_reduce_s

if TYPE_CHECKING:
    from pipelab.profiling import LayerProfile


@dataclass(frozen=True)
class Layer:
    """One layer's costs on one GPU of a tensor-parallel group; seconds and bytes are for one sample.

    `fixed_s` comes once a micro-batch and direction, whatever its size. `shared` of the `parameters` are those of the
    first layer, so a rank that holds both keeps them once. `input_bytes` is what recomputation starts from.
    """

    parameters: float
    forward_s: float
    backward_s: float
    kept_bytes: float
    input_bytes: float
    output_bytes: float
    fixed_s: float = 0.0
    shared: float = 0.0


class Model(Protocol):
    """What the planner asks of a model."""

    @property
    def weights(self) -> tuple[float, ...]:
        """One number a layer, in proportion to its time: what the layers are cut into stages by."""

    @property
    def state(self) -> tuple[float, float, float]:
        """Bytes a parameter of the weight, its gradient and the optimizer's state."""

    @property
    def forward_flops(self) -> float:
        """Floating-point operations of one sample's forward."""

    def __hash__(self) -> int: ...

    def row(self, tp: int, hardware: Hardware) -> tuple[Layer, ...]:
        """The layers as one GPU of `tp` sees them."""

    def cannot_split(self, tp: int) -> str:
        """Why the layers cannot be split over `tp` GPUs, or ""."""


@dataclass(frozen=True)
class Transformer:
    """The numbers of a decoder-only transformer, from which its costs follow.

    A layer has 12 h^2 + 13 h parameters, the embedding (vocabulary + sequence) h; a forward takes 24 s h^2 + 4 s^2 h
    operations a layer and 2 s h vocabulary for the scores (Narayanan et al. 2021, arXiv 2104.04473, section 2 and
    appendix). A layer keeps s h (34 + 5 a s / h) bytes a sample in half precision, and without 5 a s / h where the
    attention is fused (Korthikanti et al. 2022, arXiv 2205.05198); tensor parallelism divides 24 of the 34 and the rest
    of it, and all of it with `sequence_parallel`. The scores keep 4 bytes a word and token.

    `tied`: embedding and scores share one matrix. `state`: bytes a parameter of weight, gradient and optimizer,
    2 + 2 + 12 for mixed-precision Adam (arXiv 1910.02054). `bytes_per_value`: 2, or 4 where activations are float32.
    Raises SizeError for a number that is no count, and a hidden size that the heads do not divide; CostError for a
    `state` that is not three numbers of bytes.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    tied: bool = True
    learned_positions: bool = True
    fused_attention: bool = False
    sequence_parallel: bool = False
    bytes_per_value: int = 2
    state: tuple[float, float, float] = (2, 2, 12)
    name: str = "transformer"
    source: str = ""

    def __post_init__(self) -> None:
        for count in ("layers", "hidden", "heads", "sequence", "vocabulary", "bytes_per_value"):
            positive_integer(count, getattr(self, count))
        if self.hidden % self.heads:
            raise SizeError(f"hidden must be a multiple of heads: {self.hidden} is not one of {self.heads}")
        _check_state(self.state)

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        words = self.vocabulary * self.hidden
        return self.layers * self._layer_parameters + self._position_parameters + words * (1 if self.tied else 2)

    @property
    def forward_flops(self) -> int:
        """Operations of one sample's forward; the backward takes twice as many."""
        return int(sum(self.weights))

    @property
    def weights(self) -> tuple[float, ...]:
        """Operations of each layer's forward for one sample: embedding, blocks, scores."""
        s, h = self.sequence, self.hidden
        return (0, *[24 * s * h * h + 4 * s * s * h] * self.layers, 2 * s * h * self.vocabulary)

    def cannot_split(self, tp: int) -> str:
        """A reason where a head would be cut, else ""."""
        if self.heads % tp:
            return f"tp {tp} does not divide the {self.heads} heads, and a head is not cut"
        return ""

    def kept_bytes(self, tp: int = 1) -> float:
        """What one layer keeps of one sample until its backward, on each of `tp` GPUs."""
        s, h = self.sequence, self.hidden
        scores = 0.0 if self.fused_attention else 5 * self.heads * s / h
        whole = (34 + scores) / tp if self.sequence_parallel else 10 + (24 + scores) / tp
        return s * h * whole * self.bytes_per_value / 2

    def row(self, tp: int, hardware: Hardware) -> tuple[Layer, ...]:
        """Embedding, blocks, scores on one of `tp` GPUs, with the all-reduces of tensor parallelism in their times."""
        s, h = self.sequence, self.hidden
        rate = hardware.flops_per_s * hardware.efficiency * tp
        stream = float(s * h * self.bytes_per_value)
        once, fixed = all_reduce_s(stream, tp, hardware.link(tp))
        _, per_layer, scores = self.weights[0], self.weights[1], self.weights[-1]
        words = self.vocabulary * h / tp
        inside = stream / tp if self.sequence_parallel else stream
        embedding = Layer(words + self._position_parameters, 0.0, 0.0, 0.0, 8.0 * s, stream)
        block = Layer(
            parameters=self._layer_parameters / tp,
            forward_s=per_layer / rate + 2 * once,  # behind the attention and behind the MLP
            backward_s=2 * per_layer / rate + 2 * once,
            kept_bytes=self.kept_bytes(tp),
            input_bytes=inside,
            output_bytes=stream,
            fixed_s=2 * fixed,
        )
        head = Layer(
            parameters=words,
            forward_s=scores / rate,
            backward_s=2 * scores / rate,
            kept_bytes=inside + 4.0 * s * self.vocabulary / tp,
            input_bytes=inside,
            output_bytes=0.0,
            shared=words if self.tied else 0.0,
        )
        return (embedding, *[block] * self.layers, head)

    @property
    def _layer_parameters(self) -> int:
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def _position_parameters(self) -> int:
        return self.sequence * self.hidden if self.learned_positions else 0


@dataclass(frozen=True)
class Measured:
    """A model whose layers were profiled with a micro-batch of `samples`; the times are those of the profiled device.

    Everything but the parameters is taken to grow with the samples. `state` is 4 + 4 + 8: float32 and Adam.
    """

    profile: tuple[LayerProfile, ...]
    samples: int
    state: tuple[float, float, float] = (4, 4, 8)
    name: str = "measured model"

    def __post_init__(self) -> None:
        positive_integer("samples", self.samples)
        _check_state(self.state)

    @property
    def weights(self) -> tuple[float, ...]:
        """Measured seconds of each layer."""
        return tuple(layer.seconds for layer in self.profile)

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        return sum(layer.parameters for layer in self.profile)

    @property
    def forward_flops(self) -> float:
        """Counted operations of one sample's forward."""
        return sum(layer.forward_flops for layer in self.profile) / self.samples

    def cannot_split(self, tp: int) -> str:
        """A reason for every `tp` but 1."""
        return "" if tp == 1 else f"tp {tp} would split layers that were measured whole; take tp 1, or a Transformer"

    def row(self, tp: int, hardware: Hardware) -> tuple[Layer, ...]:
        """The layers as they were measured, whatever the hardware."""
        outputs = [layer.output_bytes for layer in self.profile]
        return tuple(self._layers([0, *outputs[:-1]]))

    def _layers(self, inputs: Iterable[int]) -> Iterable[Layer]:
        for layer, arriving in zip(self.profile, inputs, strict=True):
            times = (layer.forward_s, layer.backward_s, layer.saved_bytes, arriving, layer.output_bytes)
            yield Layer(layer.parameters, *(value / self.samples for value in times))


def _check_state(state: tuple[float, float, float]) -> None:
    if not isinstance(state, tuple) or len(state) != 3:
        raise CostError(f"state is (weight, gradient, optimizer) in bytes a parameter, got {state!r}")
    for name, size in zip(("weight", "gradient", "optimizer"), state, strict=True):
        amount(f"bytes a parameter of the {name}", size)
