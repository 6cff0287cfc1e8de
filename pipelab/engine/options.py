"""How a pipeline is to run, checked before anything is sent to the ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import torch
from torch import nn

from pipelab.costs import Costs
from pipelab.errors import EngineError
from pipelab.versions import RULES

Clock = Literal["anchored", "plain"]
FP16_DEVICES = ("cuda",)
Remat = str | int  # "none", "stage", "layer", or a number of layers
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Options:
    """The choices that `Pipeline` explains. Raises EngineError for one that does not exist."""

    loss_fn: LossFunction
    optimizer: OptimizerFactory | None = None
    scheduler: SchedulerFactory | None = None
    remat: Remat = "none"
    pace: Costs | None = None
    clock: Clock = "anchored"
    batchnorm: str = "microbatch"
    max_norm: float | None = None
    precision: str = "fp32"
    device: str = "cpu"
    nan: str = "raise"
    weights: str = "stashing"
    data_parallel: str = "replicate"
    measure_memory: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not callable(self.loss_fn):
            raise EngineError(f"loss_fn must be a function of output and target, got {self.loss_fn!r}")
        if isinstance(self.loss_fn, nn.Module) and any(True for _ in self.loss_fn.parameters()):
            raise EngineError("loss_fn has parameters, which nobody would train; put what has them into the last layer")
        if self.optimizer is not None and not callable(self.optimizer):
            raise EngineError(
                "optimizer must be a function that makes one from the parameters of a rank, as in "
                f"lambda parameters: torch.optim.SGD(parameters, lr=0.1); got a {type(self.optimizer).__qualname__}"
            )
        if self.scheduler is not None and not (callable(self.scheduler) and self.optimizer):
            raise EngineError(
                "scheduler must be a function that makes a learning-rate scheduler from an optimizer, as in "
                "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10), and needs an optimizer; "
                f"got a {type(self.scheduler).__qualname__} and {'an' if self.optimizer else 'no'} optimizer"
            )
        made = _try_out("optimizer", self.optimizer, [nn.Parameter(torch.zeros(1))]) if self.optimizer else None
        if made is not None and self.scheduler:
            _try_out("scheduler", self.scheduler, made)
        counted = isinstance(self.remat, int) and not isinstance(self.remat, bool) and self.remat >= 1
        if not counted and self.remat not in ("none", "stage", "layer"):
            raise EngineError(
                f"remat must be 'none', 'stage', 'layer' or a number of layers from 1 on, got {self.remat!r}"
            )
        if self.pace is not None and not isinstance(self.pace, Costs):
            raise EngineError(f"pace must be Costs in seconds, as in Costs(F=0.01, B=0.02), got {self.pace!r}")
        _one_of("clock", self.clock, ("anchored", "plain"))
        _one_of("batchnorm", self.batchnorm, ("microbatch", "minibatch"))
        _one_of("precision", self.precision, ("fp32", "bf16", "fp16"))
        _one_of("device", self.device, ("cpu", "cuda"))
        if self.precision == "fp16" and self.device not in FP16_DEVICES:
            raise EngineError(
                "precision='fp16' is for GPUs (device='cuda'); on the CPU take 'bf16', which needs no scale"
            )
        _one_of("data_parallel", self.data_parallel, ("replicate", "shard"))
        _one_of("nan", self.nan, ("raise", "ignore"))
        _one_of("weights", self.weights, RULES)
        norm = self.max_norm
        if norm is not None and not (isinstance(norm, int | float) and isfinite(norm) and norm > 0):
            raise EngineError(f"max_norm must be a positive number, or None for no limit, got {norm!r}")


_WANTS = {
    "optimizer": (
        "a function that works out the loss anew, as that of LBFGS does, but a pipeline has one gradient a step: take "
        "one whose step wants nothing, as SGD's"
    ),
    "scheduler": (
        "a number to watch, as that of ReduceLROnPlateau does, but the engine calls it after every update, on ranks "
        "that do not know the loss: take one that counts steps, as StepLR does"
    ),
}


def _try_out(name: str, make: Callable[[Any], Any], of: Any) -> Any:
    """What `make` makes, to see whether it has a step that wants no argument; raises EngineError unless it has.

    None where it wants the model's own parameters: then it fails on a rank, if it fails.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = make(of)
    except Exception:
        return None
    step = getattr(made, "step", None)
    if not callable(step):
        raise EngineError(f"{name} must be a function that returns one, with a step; it returned {made!r}")
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(step).parameters.values()
    if any(p.default is p.empty for p in parameters if p.kind not in open_ended):
        raise EngineError(f"the {name}'s step wants {_WANTS[name]}")
    return made


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise EngineError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")
