"""The loss of micro-batches, weighted so that it is the loss of the whole batch, and so is its gradient.

A mean over n_k of N samples counts n_k / N. With a loss that returns (sum, count), what the batch counts is known only
after the last micro-batch: then the sums are differentiated, and the gradients divided at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pipelab.engine.scaling import LossScale
from pipelab.errors import EngineError

Part = tuple[float, float | None]  # of a whole batch's loss: its share, or a sum and what that counts


class Loss:
    """`loss_fn(output, target)` on one micro-batch after the other; lives on the rank of the last stage."""

    def __init__(self, loss_fn: Callable[[Any, Any], Any]) -> None:
        self.loss_fn = loss_fn
        self.scale: LossScale | None = None  # by which gradients are multiplied, in float16
        self._targets: Sequence[Any] = ()
        self._shares: Sequence[float] = ()
        self._of_update: Sequence[float] | None = None
        self._parts: dict[int, tuple[Tensor, float | None]] = {}

    def begin(self, targets: Sequence[Any], shares: Sequence[float], of_update: Sequence[float] | None = None) -> None:
        """A new batch: for each micro-batch the targets, if there are any, and which share of all samples it has.

        Where weights are updated on the way, also which share of the samples `of_update`: of the one that takes it.
        """
        self._targets, self._shares, self._of_update, self._parts = targets, shares, of_update, {}

    def __call__(self, output: Any, microbatch: int) -> Tensor:
        """The loss of a micro-batch, a scalar. Raises EngineError where `loss_fn` returned something else."""
        loss, count = _checked(self.loss_fn(output, self._targets[microbatch] if self._targets else None))
        _, known = next(iter(self._parts.values()), (None, count))
        if (known is None) != (count is None):
            raise EngineError(
                "loss_fn returned (sum, count) for one micro-batch and a mean for another: return one kind"
            )
        if self._of_update is not None and count is not None:
            raise EngineError(
                "loss_fn returned (sum, count), but where weights are updated on the way nobody waits for the counts: "
                "return the mean over the samples"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise EngineError(
                "the loss does not depend on any parameter that requires a gradient, so nothing would be learnt"
            )
        self._parts.setdefault(microbatch, (loss.detach(), count))  # a second forward has nothing new to say
        return loss

    def gradient(self, microbatch: int) -> Tensor:
        """What the backward of a micro-batch starts from: its share, or 1 where counts divide later."""
        loss, count = self._parts[microbatch]
        shares = self._shares if self._of_update is None else self._of_update
        share = shares[microbatch] if count is None else 1.0
        return torch.full_like(loss, share if self.scale is None else share * self.scale.value)

    @property
    def count(self) -> float | None:
        """What all these micro-batches count, where `loss_fn` says so."""
        counts = [count for _, count in self._parts.values() if count is not None]
        return math.fsum(counts) if counts else None

    @property
    def part(self) -> Part:
        """What these micro-batches, maybe those of one replica, add to the loss of the whole batch."""
        losses = {microbatch: loss.item() for microbatch, (loss, _) in self._parts.items()}
        if self.count is not None:
            return math.fsum(losses.values()), self.count
        return math.fsum(loss * self._shares[microbatch] for microbatch, loss in losses.items()), None


def whole(parts: Sequence[Part]) -> float:
    """The loss of the whole batch, from the parts of all replicas. Raises EngineError where nothing counts."""
    counts = [count for _, count in parts if count is not None]
    total = math.fsum(loss for loss, _ in parts)
    return total / checked_count(math.fsum(counts)) if counts else total


def checked_count(count: float) -> float:
    """`count`, by which something will be divided. Raises EngineError unless it is positive."""
    if not count > 0:
        raise EngineError(f"loss_fn returned (sum, count), and the counts of the batch add up to {count:g}")
    return count


def _checked(result: Any) -> tuple[Tensor, float | None]:
    loss, count = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    wanted = "loss_fn must return a tensor with one number, the mean over the samples, or (sum, count); it returned"
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = f"a {loss.dtype} tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss))
        raise EngineError(f"{wanted} {found}")
    try:
        number = None if count is None else float(count)
    except (TypeError, ValueError) as error:
        raise EngineError(f"{wanted} a tensor and a {type(count).__qualname__}, which is no count") from error
    # a copy: the scalar that torch's mse_loss returns lies in memory for a number a sample, and is kept for the step
    scalar = loss.reshape(()) if loss.dim() else loss
    return scalar.clone(), number
