"""What lives on a rank for a pipeline: stages, worker, loss and update. The pipeline calls it from the notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from pipelab.action import Kind
from pipelab.engine.batchnorm import MinibatchStatistics
from pipelab.engine.checkpoint import load_optimizer_state, optimizer_state
from pipelab.engine.collectives import AllReduced, ring_bytes
from pipelab.engine.deferred import Deferral
from pipelab.engine.device import device_of
from pipelab.engine.holder import Holder
from pipelab.engine.live_bytes import LiveBytes
from pipelab.engine.loss import Loss, Part
from pipelab.engine.message import Value, unwrap
from pipelab.engine.nccl import open_channel
from pipelab.engine.pace import Pace
from pipelab.engine.recipe import Recipe, Report
from pipelab.engine.scaling import LossScale
from pipelab.engine.segment import computing_in
from pipelab.engine.stage import Stage
from pipelab.engine.stashing import Stash
from pipelab.engine.update import Update
from pipelab.engine.worker import Worker
from pipelab.errors import EngineError
from pipelab.lower import Receive, Send
from pipelab.ranks import doing, local_state

_FEEDING = ("step", "predict", "evaluate")  # layers see what comes with these; a state is copied into parameters


class Resident(Holder):
    """One rank's part of a pipeline: what it does with the layers that it holds."""

    def __init__(self, recipe: Recipe) -> None:
        options = recipe.options
        self._recipe, self._options = recipe, options
        self.device = device_of(options.device)
        super().__init__(recipe, self.device)
        groups, parameters = self._groups, list(self._modules.parameters())
        self._scale = LossScale() if options.precision == "fp16" else None
        self._update = Update(
            parameters,
            groups=groups,
            replicas=self._replicas,
            slices=self._slices,
            optimizer=options.optimizer,
            scheduler=options.scheduler,
            max_norm=options.max_norm,
            skip_nan=options.nan == "raise",
            scale=self._scale,
            root=recipe.last_rank,
            shared=self._shared,
        )
        minibatch = options.batchnorm == "minibatch"
        self._statistics = MinibatchStatistics(self._modules, recipe.num_microbatches) if minibatch else None
        splits = any(instruction.action.kind is Kind.I for instruction in recipe.program)
        usual = options.precision == "fp32" and groups.slices is None
        deferral = Deferral(self._modules) if splits and usual else None
        last = recipe.num_stages - 1
        self._loss = Loss(options.loss_fn) if last in recipe.layers else None
        if self._loss:
            self._loss.scale = self._scale
        stages = {
            stage: Stage(
                list(layers),
                first,
                remat=options.remat,
                seed=options.seed,
                finish=self._loss if stage == last else None,
                deferral=deferral,
                precision=options.precision,
                device=self.device,
                microbatches_before=groups.at.dp * recipe.num_microbatches,
            )
            for stage, (first, layers) in recipe.layers.items()
        }
        peers = {instruction.peer for instruction in recipe.program if isinstance(instruction, Send | Receive)}
        channel = open_channel(recipe.num_microbatches, groups, self.device, peers)
        self._worker = Worker(stages, recipe.sources, channel, self._loss)
        self._worker.device = self.device
        check = options.nan == "raise"
        self._stash = Stash(recipe.versions, self._update, check_finite=check) if recipe.update_groups else None
        self._steps = 0

    def step(
        self,
        inputs: Sequence[Value],
        targets: Sequence[Value],
        keywords: Sequence[Value],
        shares: Sequence[float],
        update: bool,
    ) -> Report:
        """F and backward of every micro-batch, then the update, where the schedule has made none on the way."""
        options, worker = self._options, self._worker
        where, block = self.device.where, self.device.block_bytes
        worker.training, worker.inputs = True, inputs
        worker.pace = Pace(options.pace, self._recipe.num_stages, options.clock) if options.pace else None
        worker.weights = self._stash
        for stage in worker.stages.values():
            stage.begin(self._steps, keywords)
        if self._loss:
            self._loss.begin([unwrap(target) for target in targets], shares, self._shares_of_updates(shares))
        self._update.begin()
        if self._stash:
            self._stash.begin()
        if self._statistics:
            self._statistics.begin()
        with (
            self.device.random_state_kept(),
            AllReduced() if self._slices.several else nullcontext() as summed,
            LiveBytes(device=where, round_to=block) if options.measure_memory else nullcontext() as memory,
        ):
            worker.memory = memory
            worker.run(self._recipe.program)
        self._replicas.wait_for_messages()
        if not all(stage.empty for stage in worker.stages.values()):
            raise EngineError("something of a micro-batch is left on a stage after the step: a fault of pipelab")
        self._forget_batch()
        doing("the update")
        if self._statistics:
            self._statistics.finish(self._replicas)
        self._replicas.share_buffers(self._modules)
        loss = self._loss.part if self._loss else None
        norm = None
        if self._stash:
            self._stash.finish()
        else:
            norm = self._update.finish(loss[1] if loss else None, update, loss=loss[0] if loss else None)
        self._steps += 1
        return Report(
            timings=worker.timings,
            arrivals=worker.arrivals,
            loss=loss,
            gradient_norm=norm,
            peak_bytes=memory.peak if memory else None,
            held_bytes=worker.held,
            sent_bytes={
                "dp": self._replicas.take_bytes(),
                "pp": worker.channel.take_sent_bytes() + sum(shared.take_sent_bytes() for shared in self._shared),
                "tp": round(ring_bytes("all_reduce", summed.bytes, self._recipe.mesh.tp)) if summed else 0,
            },
            step=self._steps - 1,
            finite=self._update.finite or self._scale is not None,
            skipped=self._update.skipped,
            held_versions=self._stash.peak if self._stash else 1,
        )

    def _shares_of_updates(self, shares: Sequence[float]) -> Sequence[float] | None:
        """For each micro-batch its share of the samples of the update that takes it, where there are such."""
        groups, found = self._recipe.update_groups, list(shares)
        if not groups:
            return None
        mine = [math.fsum(shares[microbatch] for microbatch in group) for group in groups]
        wholes = self._replicas.total(torch.tensor(mine, dtype=torch.float64)).tolist()
        for group, whole in zip(groups, wholes, strict=True):
            for microbatch in group:
                found[microbatch] = shares[microbatch] / whole
        return found

    def predict(self, inputs: Sequence[Value], keywords: Sequence[Value], count: int) -> list[Value]:
        """Outputs of the first `count` micro-batches, on the last stage's rank: in eval mode, without gradients."""
        worker = self._worker
        worker.training, worker.inputs, worker.pace, worker.memory = False, inputs, None, None
        for stage in worker.stages.values():
            stage.begin(self._steps, keywords)
        worker.weights = None
        program = [i for i in self._recipe.program if i.action.kind is Kind.F and i.action.microbatch < count]
        modes = {module: module.training for module in self._modules.modules()}
        self._modules.eval()
        try:
            with torch.no_grad():
                made = worker.run(program)
        finally:
            for module, mode in modes.items():
                module.training = mode
        self._forget_batch()
        worker.channel.take_sent_bytes()
        return [made[action] for action in sorted(made)]

    def evaluate(
        self,
        inputs: Sequence[Value],
        targets: Sequence[Value],
        keywords: Sequence[Value],
        shares: Sequence[float],
    ) -> Part | None:
        """The loss of the outputs, on the last stage's rank."""
        outputs = self.predict(inputs, keywords, len(shares))
        if self._loss is None:
            return None
        self._loss.begin([unwrap(target) for target in targets], shares)
        with torch.no_grad(), computing_in(self._options.precision, self.device):
            for microbatch, output in enumerate(outputs):
                self._loss(unwrap(output), microbatch)
        return self._loss.part

    def training_state(self) -> dict[str, Any]:
        """What the next step depends on besides parameters and buffers."""
        optimizer = self._update.optimizer
        kept = optimizer and optimizer_state(optimizer, dict(self._named_parameters()), self._slices)
        tells = self._slices.first and (self._replicas.first or self._replicas.sharded)
        return {
            "seed": self._options.seed,
            "steps": self._steps,
            "waiting": self._update.waiting,
            "scale": self._scale and self._scale.state(),
            "scheduler": self._update.scheduler and self._update.scheduler.state_dict(),
            "optimizer": kept if tells else None,
        }

    def load_training_state(self, state: Mapping[str, Any]) -> list[str]:
        """Go on from there; the reasons why that is not possible, and then nothing has changed."""
        optimizer, saved, reasons = self._update.optimizer, state["optimizer"], []
        if optimizer is not None and saved is not None:
            reasons = load_optimizer_state(optimizer, dict(self._named_parameters()), saved, self._slices)
        if not reasons:
            self._steps = state["steps"]
            if self._scale and state.get("scale"):
                self._scale.load_state(state["scale"])
            if self._update.scheduler and state["scheduler"]:
                self._update.scheduler.load_state_dict(state["scheduler"])
        return reasons

    def _forget_batch(self) -> None:
        self._worker.inputs = ()
        for stage in self._worker.stages.values():
            stage.begin(self._steps)


def settle(key: int, recipe: Recipe, gone: Sequence[int]) -> None:
    """Make this rank's part of pipeline `key`, and let those of pipelines that are gone go."""
    leave(gone)
    local_state()[_place(key)] = Resident(recipe)


def leave(keys: Sequence[int]) -> None:
    """Let this rank's part of each of these pipelines go."""
    for key in keys:
        local_state().pop(_place(key), None)


def call(key: int, method: str, *arguments: Any) -> Any:
    """Call a method of this rank's part of pipeline `key`."""
    part: Resident = local_state()[_place(key)]
    if method in _FEEDING:
        arguments = part.device.put(arguments)
    return part.device.take_back(getattr(part, method)(*arguments))


def _place(key: int) -> tuple[str, int]:
    return "pipelab.engine", key
