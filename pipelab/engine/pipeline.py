"""What a user holds: it ships the stages to the ranks, sends them batches, and puts together what they tell."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from pipelab.costs import Costs
from pipelab.engine import batch, checkpoint, keywords
from pipelab.engine.batchnorm import check_layers
from pipelab.engine.cut import cut
from pipelab.engine.deal import deal
from pipelab.engine.fit import check_mesh, check_options, check_ranks, check_updates, usual_device
from pipelab.engine.loss import whole
from pipelab.engine.options import Clock, LossFunction, OptimizerFactory, Options, Remat, SchedulerFactory
from pipelab.engine.recipe import recipes, sources
from pipelab.engine.remote import Remote
from pipelab.engine.result import StepResult, check_finite, put_together
from pipelab.engine.tensor_parallel import SplitPlan, resolve
from pipelab.engine.tying import find_ties
from pipelab.errors import CheckpointError, EngineError
from pipelab.mesh import Mesh
from pipelab.ranks import Ranks
from pipelab.schedule import Schedule

_THROUGH_HOSTS = "GPUs whose messages go through the hosts' memory, by gloo"


class Pipeline:
    """A model that trains on several ranks, stage by stage, in the order of a schedule.

    `model` is an `nn.Sequential`; the ranks get copies of its layers, and `state_dict()` brings the values back.
    `loss_fn(output, target)` returns the mean over the samples, or (sum, count). `optimizer(parameters)` makes a rank's
    optimizer; without it there are only gradients. `ranks` are as many as the schedule has, or as the mesh.

    - `mesh`: replicas (dp) of the pipeline (pp), its layers split (tp): `Mesh(dp=2, pp=2, tp=2)` on 8 ranks. The batch
      is dealt to the replicas first. Results are still those of one model: whole tensors, the whole batch's loss.
    - `data_parallel`: the optimizer's state is on every replica, "replicate", or each parameter's on one, "shard".
    - `tensor_parallel`: how Linear layers are split over tp, by patterns of their names: "colwise", "rowwise", or
      ("colwise", parts) for matrices side by side (see `pipelab.engine.tensor_parallel`). Our GPT's are known.
    - `partition`: a slice or a number of layers a stage; by default the stages are balanced by their parameters.
    - `remat`: what is computed again before the backward, to keep less: "none", the whole "stage", each "layer",
      or a number of layers.
    - `pace`: costs in seconds that make the ranks emulated accelerators, with `clock` "anchored" or "plain" (see
      `pipelab.engine.pace`).
    - `batchnorm`: every micro-batch is normalised by its own statistics; the running ones are updated by each
      "microbatch", where replicas take those of dp 0, or once a step by the whole "minibatch", as in a run that is not
      split.
    - `max_norm`: the largest norm that all gradients together may have; longer ones are scaled down.
    - `precision`: "fp32", or "bf16" for torch's autocast in every forward: products, and what is sent, in bfloat16;
      on GPUs also "fp16", where a step whose gradients overflow is `skipped` and the next one has half the loss scale.
    - `device`: "cpu", or "cuda", which is usual for ranks of backend "nccl": every rank has a GPU, and NCCL carries the
      messages. With "gloo" and "cuda" ranks may share GPUs, and messages go through the hosts' memory.
    - `scheduler(optimizer)` makes a learning-rate scheduler, which goes on with every update.
    - `nan`: of a loss that is no finite number, or before an update of such a gradient, "raise" an EngineError and
      update nothing, or "ignore" it. To "raise", gradients that wait for an update are kept beside those of the step.
    - `weights`: where the schedule updates on the way (U), which version of its weights an action uses: "stashing",
      "vertical_sync", "two_buffered" or "latest", the rules of `pipelab.weight_versions`.
    - `measure_memory`: a step tells its peak, and what is held after every action; it costs a tenth of its time.

    A schedule with updates (U) has a stream of micro-batches for a step: each update takes the mean over its
    micro-batches, on each rank when the schedule says so, and nobody waits but replicas of a rank for each other.
    Between two steps the pipeline drains. What is not finite ends the pipeline then, unless it is ignored, because
    earlier updates cannot be taken back.

    A parameter that layers on several ranks share has the sum of their gradients, and stays the same on all of them.
    Dropout depends on `torch.initial_seed()`, step, layer and micro-batch, counted through all replicas: it is the same
    in every schedule and split, and with dp replicas of m micro-batches that of dp * m. Between a colwise and a rowwise
    matrix of one layer each rank drops features of its own.
    Raises PipelabError for what cannot run, before anything is sent to the ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        schedule: Schedule,
        *,
        loss_fn: LossFunction,
        optimizer: OptimizerFactory | None = None,
        scheduler: SchedulerFactory | None = None,
        ranks: Ranks,
        partition: Sequence[slice] | Sequence[int] | None = None,
        mesh: Mesh | None = None,
        data_parallel: str = "replicate",
        tensor_parallel: SplitPlan | None = None,
        remat: Remat = "none",
        pace: Costs | None = None,
        batchnorm: str = "microbatch",
        max_norm: float | None = None,
        precision: str = "fp32",
        device: str | None = None,
        nan: str = "raise",
        weights: str = "stashing",
        clock: Clock = "anchored",
        measure_memory: bool = False,
    ) -> None:
        options = Options(
            loss_fn=loss_fn,
            optimizer=optimizer,
            scheduler=scheduler,
            remat=remat,
            pace=pace,
            clock=clock,
            batchnorm=batchnorm,
            max_norm=max_norm,
            precision=precision,
            device=device or usual_device(ranks),
            nan=nan,
            weights=weights,
            data_parallel=data_parallel,
            measure_memory=measure_memory,
            seed=torch.initial_seed() & (2**63 - 1),
        )
        mesh = check_ranks(schedule, ranks, mesh)
        check_options(options, schedule)
        pieces = cut(model, schedule.num_stages, partition)
        ties = find_ties(pieces, schedule.placement)
        styles = resolve(model, tensor_parallel, mesh.tp)
        check_mesh(mesh, ties, styles)
        check_updates(options, schedule, ties)
        if batchnorm == "minibatch":
            check_layers(model)
        self.schedule = schedule
        self.mesh = mesh
        self.ranks = ranks
        self._pace, self._nan = pace, nan
        self._note = _THROUGH_HOSTS if options.device == "cuda" and ranks.backend == "gloo" else ""
        self._sources = sources(schedule)
        self._shapes = {name: shape for piece in pieces for name, shape in _shapes(piece.layers).items()}
        self._names = [frozenset(_names(piece.layers)) for piece in pieces]  # by stage
        self._ties = [tie.names for tie in ties]
        self._taken = frozenset().union(*(keywords.taken_by(layer) for piece in pieces for layer in piece.layers))
        of_rank = recipes(schedule, pieces, ties, mesh, styles, options)
        self._remote = Remote(ranks, [of_rank[mesh.coordinates(rank).pp] for rank in self._all])

    def step(
        self, inputs: Any, targets: Any, *, kwargs: Mapping[str, Any] | None = None, update: bool = True
    ) -> StepResult:
        """Train on one batch: forward and backward of every micro-batch, then the optimizer.

        `inputs` and `targets` are tensors with a row a sample, or tuples, lists or dicts of such; other values in them
        go to every micro-batch. Without targets (None) loss_fn gets None. `kwargs` reach every layer whose forward
        names them after its first parameter; they are cut in the same way. The gradient is that of the whole batch,
        whatever its size. With `update=False` it stays, and the next step's is added to it, as `backward()` does in
        torch.
        Raises SizeError for fewer samples than micro-batches; EngineError for a loss or gradient that is no finite
        number, unless such are ignored: parameters, and gradients that wait for an update, are then as before, and the
        pipeline goes on; RankError with the rank's own error where a rank fails: then the pipeline is over, and has to
        be built again.
        """
        self._remote.check_open()
        if self.schedule.has_updates and not update:
            raise EngineError(f"update=False, but schedule {self.schedule.name!r} updates on the way")
        hands = self._deal(inputs, targets, kwargs)
        reports = self._remote.call("step", [(*each, update) for each in hands])
        result = put_together(self.schedule, self._sources, self._pace, self.mesh, reports)
        if self._note:
            result = replace(result, trace=replace(result.trace, note=self._note))
        if self._nan == "raise":
            check_finite(result.loss, reports, self._last(dp=0))
        return result

    def evaluate(self, inputs: Any, targets: Any, *, kwargs: Mapping[str, Any] | None = None) -> float:
        """The loss of the whole batch in eval mode, without gradients; afterwards all is as before."""
        self._remote.check_open()
        losses = self._remote.call("evaluate", self._deal(inputs, targets, kwargs, all_filled=False))
        return whole([losses[self._last(dp)] for dp in range(self.mesh.dp)])

    def predict(self, inputs: Any, *, kwargs: Mapping[str, Any] | None = None) -> Any:
        """The model's output for `inputs` in eval mode, without gradients; afterwards all is as before."""
        self._remote.check_open()
        hands = self._deal(inputs, None, kwargs, all_filled=False)
        outputs = self._remote.call("predict", [(parts, extras, len(shares)) for parts, _, extras, shares in hands])
        return batch.join([part for dp in range(self.mesh.dp) for part in outputs[self._last(dp)]])

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradient of every parameter, by its name in the model: of the last step, or of all since an update."""
        return self._gather("gradients")

    def state_dict(self) -> dict[str, Any]:
        """Parameters and buffers as they are now, as `model.state_dict()` would return them."""
        return self._gather("state")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take parameters and buffers from `state`; raises EngineError unless it has the model's names and shapes."""
        self._remote.check_open()
        if reasons := checkpoint.check_state(state, self._shapes):
            raise EngineError("\n  ".join(["the state_dict is not of this model, and nothing was loaded:", *reasons]))
        values = dict(state)
        for names in self._ties:
            values |= dict.fromkeys(names, state[names[-1]])  # the last one stays in the model, too
        self._remote.call(
            "load_state", [({name: values[name] for name in names & values.keys()},) for names in self._held]
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint: parameters, buffers, the optimizer's state, and what dropout depends on.

        Its names are those of the model, whatever the split. Whatever happens, `path` is the old file or the whole new
        one. Raises CheckpointError where it cannot be written, or where gradients still wait for an update.
        """
        parts = self._remote.call("training_state")
        if any(part["waiting"] for part in parts):
            raise CheckpointError("gradients of step(..., update=False) wait for an update: save after that one")
        checkpoint.write(path, {"model": self.state_dict(), "training": checkpoint.merge(parts, self._ties)})

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: nn.Module, schedule: Schedule, *, ranks: Ranks, **options: Any
    ) -> Pipeline:
        """A new Pipeline that goes on from a checkpoint, with any schedule, partition and number of ranks.

        `options` are those of `Pipeline(...)`. The next step is the one that would have come after `save`, with the
        same dropout. Without an optimizer, here or there, only parameters and buffers are taken.
        Raises CheckpointError for a file that is damaged or of another model, and changes nothing then.
        """
        content = checkpoint.read(path)
        reasons = checkpoint.check_state(content["model"], _shapes(model))
        if not reasons:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(content["training"]["seed"])
                pipe = cls(model, schedule, ranks=ranks, **options)
            parts = [(checkpoint.part_of(content["training"], names),) for names in pipe._held]
            found = pipe._remote.call("load_training_state", parts)
            reasons = list(dict.fromkeys(reason for part in found for reason in part))
            if not reasons:
                pipe.load_state_dict(content["model"])
                return pipe
            pipe.close()
        raise CheckpointError("\n  ".join([f"{path} does not fit, and nothing was loaded:", *reasons]))

    def close(self) -> None:
        """Let the ranks forget the stages. The ranks stay, for another pipeline."""
        self._remote.close()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f"over, because {self._remote.over}" if self._remote.over else "ready"
        plan = self.schedule
        mesh = f" ({self.mesh})" if self.mesh.num_ranks > plan.num_ranks else ""
        return f"<Pipeline of {plan.num_stages} stages on {self.mesh.num_ranks} ranks{mesh}, {plan.name}: {state}>"

    # --- to the ranks and back ----------------------------------------------------------------------------------------

    @property
    def _all(self) -> range:
        return range(self.mesh.num_ranks)

    @property
    def _held(self) -> list[frozenset[str]]:
        """For each rank the names of what its layers have."""
        at = [self.mesh.coordinates(rank).pp for rank in self._all]
        return [frozenset().union(*(self._names[stage] for stage in self.schedule.stages_on(pp))) for pp in at]

    def _last(self, dp: int) -> int:
        """The rank that knows outputs and loss of replica `dp`."""
        return self.mesh.rank(dp=dp, pp=self.schedule.placement[-1])

    def _deal(self, *content: Any, all_filled: bool = True) -> list[tuple[Any, ...]]:
        """For each rank what it needs of inputs, targets and keywords, and the shares of the micro-batches."""
        count = self.schedule.num_microbatches
        hands = deal(*content, replicas=self.mesh.dp, microbatches=count, taken=self._taken, all_filled=all_filled)
        places = map(self.mesh.coordinates, self._all)
        return [hands[at.dp].at(at.pp, self.schedule.placement) for at in places]

    def _gather(self, method: str) -> dict[str, Any]:
        """The ranks' dicts as one, in the order of the model's layers."""
        found = {name: value for part in self._remote.call(method) for name, value in part.items()}
        for names in self._ties:
            found |= dict.fromkeys(names, found[names[0]])  # one tensor, as in the model
        return {name: found[name] for name in self._shapes if name in found}


def _shapes(layers: nn.Module) -> checkpoint.Shapes:
    """Of all that a `state_dict` has."""
    return {name: value.shape if isinstance(value, Tensor) else None for name, value in layers.state_dict().items()}


def _names(layers: nn.Module) -> set[str]:
    """Of all that a `state_dict` has, and of the parameters, which a hook may have given other names there."""
    return {*layers.state_dict(), *(name for name, _ in layers.named_parameters(remove_duplicate=False))}
