"""A stage of a pipeline: its layers in one segment, or in several where less than all of it is recomputed at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from pipelab.engine.deferred import Deferral
from pipelab.engine.device import CPU, Device
from pipelab.engine.keywords import for_layers
from pipelab.engine.message import Value
from pipelab.engine.options import Remat
from pipelab.engine.segment import Gradients, Segment


class Stage:
    """Layers `first`, `first + 1`, ... of the whole model, with F, B, I and W for one micro-batch at a time.

    `remat` is what is computed a second time, and together: "none", the whole "stage", each "layer", or a number of
    layers. `finish`, on the last stage, turns the model's output for a micro-batch into the loss. With a `deferral`,
    Linear layers may put their part of W off.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        first: int = 0,
        *,
        remat: Remat = "none",
        seed: int = 0,
        finish: Callable[[Any, int], Any] | None = None,
        deferral: Deferral | None = None,
        precision: str = "fp32",
        device: Device = CPU,
        microbatches_before: int = 0,
    ) -> None:
        self.remat = remat != "none"
        numbered = list(enumerate(layers, start=first))
        length = {"none": len(numbered), "stage": len(numbered), "layer": 1}.get(str(remat)) or int(remat)
        starts = range(0, len(numbered), length)
        self.segments = [
            Segment(
                numbered[start : start + length],
                remat=self.remat,
                seed=seed,
                finish=finish if start == starts[-1] else None,
                deferral=deferral,
                precision=precision,
                device=device,
                microbatches_before=microbatches_before,
            )
            for start in starts
        ]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of all its layers."""
        return [p for segment in self.segments for _, layer in segment.layers for p in layer.parameters()]

    def begin(self, step: int, keywords: Sequence[Value] = ()) -> None:
        """A new step: its number decides on the random numbers, `keywords` are those of every micro-batch."""
        for segment in self.segments:
            segment.step = step
            segment.keywords = for_layers([layer for _, layer in segment.layers], keywords)

    def forward(self, microbatch: int, value: Value) -> Value:
        """F: the stage's output."""
        for segment in self.segments:
            value = segment.forward(microbatch, value)
        return value

    @property
    def in_one_piece(self) -> bool:
        """Whether a second forward is one piece before B or I, and not several pieces within it."""
        return len(self.segments) == 1

    def recompute(self, microbatch: int) -> None:
        """The second forward, where it is in one piece; otherwise each piece runs just before its own backward."""
        if self.in_one_piece:
            self.segments[0].recompute(microbatch)

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        """B: gradients of the output's tensors in, of the input's tensors out; None where there is none."""
        for segment in reversed(self.segments):
            gradients = segment.backward(microbatch, gradients)
        return gradients

    def backward_input(self, microbatch: int, gradients: Gradients) -> Gradients:
        """I: as B, without the weights."""
        for segment in reversed(self.segments):
            gradients = segment.backward_input(microbatch, gradients)
        return gradients

    def backward_weight(self, microbatch: int) -> None:
        """W: the weights' gradients that I left out."""
        for segment in reversed(self.segments):
            segment.backward_weight(microbatch)

    def predict(self, microbatch: int, value: Any) -> Any:
        """The layers alone, in the mode they are in, without loss and graph."""
        for segment in self.segments:
            value = segment.predict(microbatch, value)
        return value

    @property
    def empty(self) -> bool:
        """Whether nothing of any micro-batch is kept: so it must be after a step."""
        return all(segment.empty for segment in self.segments)
