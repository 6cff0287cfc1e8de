"""Running statistics of a whole mini-batch, although BatchNorm sees one micro-batch at a time.

    F of micro-batch 0   F of micro-batch 1   ...   end of the step
    ──► tally ──► BatchNorm ──►                     running statistics ◄── tallies
          [1]        [2]                                   [3]

Every micro-batch is still normalised by its own mean and variance [2], so outputs and gradients are those of
`batchnorm="microbatch"`: to normalise by the whole batch the first micro-batch would have to wait for the last. What is
put off is the update of the running statistics, the idea of torchgpipe's deferred batch normalization (Kim et al.
2020): once a step, from all samples of the step, as a layer does that sees them at once [3].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pipelab.engine.data_parallel import Replicas
from pipelab.errors import EngineError


class Tally(nn.Module):
    """How many values of each channel there were in a step, their mean, and the sum of their squared deviations.

    All of it is kept in buffers, which rematerialization puts back, as those of any layer: a second forward counts
    nothing twice. They are not in the `state_dict`.
    """

    calls: Tensor
    count: Tensor
    mean: Tensor
    deviations: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, size in (("calls", ()), ("count", ()), ("mean", (channels,)), ("deviations", (channels,))):
            self.register_buffer(name, torch.zeros(size, dtype=torch.float64), persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> None:
        """Add what a layer was given: (samples, channels, ...)."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        variance, mean = torch.var_mean(x, dim=[d for d in range(x.dim()) if d != 1], correction=0)
        count = x.numel() // x.shape[1]
        difference, before = mean - self.mean, self.count.clone()
        self.calls += 1
        self.count += count
        # two groups as one: Chan, Golub and LeVeque 1983, equations 2.1
        self.mean += difference * (count / self.count)
        self.deviations += variance * count + difference.square() * (before * count / self.count)

    @torch.no_grad()
    def merge(self, replicas: Replicas) -> None:
        """Take in what this layer was given on the other replicas. All of them must call it."""
        found = replicas.total(torch.cat([self.calls[None], self.count[None], self.count * self.mean]))
        mean = found[2:] / found[1].clamp(min=1)
        self.deviations.copy_(replicas.total(self.deviations + self.count * (self.mean - mean).square()))
        for buffer, value in ((self.calls, found[0]), (self.count, found[1]), (self.mean, mean)):
            buffer.copy_(value)

    def clear(self) -> None:
        """Begin anew."""
        for buffer in self.buffers():
            buffer.zero_()


class MinibatchStatistics:
    """The BatchNorm layers of one rank, whose running statistics are updated once a step."""

    def __init__(self, modules: nn.Module, num_microbatches: int) -> None:
        self._layers: list[Any] = [layer for layer in modules.modules() if _keeps_statistics(layer)]
        self._num_microbatches = num_microbatches
        for layer in self._layers:
            layer.add_module("tally", Tally(layer.num_features))
            layer.register_forward_pre_hook(_tally, with_kwargs=True)  # [1]

    def begin(self) -> None:
        """A step begins: the layers leave their running statistics alone."""
        for layer in self._layers:
            layer.tally.clear()
            layer.track_running_stats = False  # [2]

    @torch.no_grad()
    def finish(self, replicas: Replicas) -> None:
        """The step is over, on all replicas.

        Raises EngineError for a layer used twice, whose samples would be taken for one batch.
        """
        for layer in self._layers:
            tally = layer.tally
            layer.track_running_stats = True
            if tally.calls > self._num_microbatches:
                raise EngineError(
                    f"a {type(layer).__qualname__} of {layer.num_features} channels was used {int(tally.calls)} times "
                    f"for {self._num_microbatches} micro-batches, and every use has a mini-batch of its own: give "
                    "each use a layer of its own, or take batchnorm='microbatch'"
                )
            if replicas.count > 1:
                tally.merge(replicas)
            if tally.calls:
                layer.num_batches_tracked += 1
                share = 1 / layer.num_batches_tracked if layer.momentum is None else layer.momentum
                layer.running_mean += share * (tally.mean - layer.running_mean)  # [3]
                layer.running_var += share * (tally.deviations / (tally.count - 1) - layer.running_var)


def check_layers(model: nn.Module) -> None:
    """Raise EngineError for a BatchNorm layer whose statistics cannot be put off."""
    for name, layer in model.named_modules():
        if _keeps_statistics(layer) and type(layer).forward is not _BatchNorm.forward:
            raise EngineError(
                f"batchnorm='minibatch' is for torch's BatchNorm layers, and {name} is a {type(layer).__qualname__} "
                "with a forward of its own: take batchnorm='microbatch'"
            )


def _keeps_statistics(layer: Any) -> bool:
    return isinstance(layer, _BatchNorm) and layer.track_running_stats and layer.running_mean is not None


def _tally(layer: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    if layer.training:
        layer.tally(args[0] if args else kwargs["input"])
