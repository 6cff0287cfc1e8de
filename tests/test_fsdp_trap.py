"""The trap that `data_parallel="shard"` stays out of: sharded parameters, and a backward in two halves.

FSDP2 by default puts a layer's shards back in place of its whole weights after the forward, but for the outermost
module. A zero-bubble schedule asks for the weights' gradients later, W after I, by the parameters that the layer has
then: the shards, which are in no graph. Nothing fails, the loss is right, and the gradients are not. With
`reshard_after_forward=False` the whole weights stay, and all is right. Seen with torch 2.13; schedule and FSDP2 are
torch's own.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from plain_training import largest_difference
from torch import Tensor, nn

import pipelab as pl

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(60)


def network() -> nn.Sequential:
    """Four stages of two layers each."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(16, 8, generator=random), torch.randn(16, 8, generator=random)


def whole_gradients() -> dict[str, Tensor]:
    plain, (inputs, targets) = network(), batch()
    F.mse_loss(plain(inputs), targets).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}


def train_with_fsdp(
    model: nn.Sequential, batch: tuple[Tensor, Tensor], **how: Any
) -> tuple[dict[str, Any], list[float]]:
    """One zero-bubble step on this rank of 2 pipelines of 2 ranks with 2 stages each, all layers under FSDP2.

    The gradients of this rank's layers, whole, and on the last stage's ranks the losses of the micro-batches.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pp, dp, cpu = mesh.get_local_rank("pp"), mesh.get_local_rank("dp"), torch.device("cpu")
    stages = []
    for place in (pp, pp + 2):
        for module in (model[place][0], model[place][2], model[place]):  # the layers, and the stage around them
            fully_shard(module, mesh=mesh["dp"], **how)
        stages.append(PipelineStage(model[place], place, 4, cpu, group=mesh.get_group("pp")))
    schedule = ScheduleInterleavedZeroBubble(stages, n_microbatches=4, loss_fn=F.mse_loss)
    inputs, targets = (part.chunk(2)[dp] for part in batch)
    losses: list[Any] = []
    schedule.step(*([inputs] if pp == 0 else []), **({"target": targets, "losses": losses} if pp == 1 else {}))
    dist.barrier()
    found = {}
    for place in (pp, pp + 2):
        for name, parameter in model[place].named_parameters():
            grad: Any = parameter.grad
            found[f"{place}.{name}"] = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return found, [loss.item() for loss in losses]


def run(ranks: pl.Ranks, **how: Any) -> tuple[dict[str, Any], float]:
    model, sample = network(), batch()
    per_rank = ranks.run(lambda: train_with_fsdp(copy.deepcopy(model), sample, **how))
    gradients = {name: grad for found, _ in per_rank for name, grad in found.items()}
    losses = [loss for _, some in per_rank for loss in some]
    return {name: gradients[name] for name, _ in model.named_parameters()}, sum(losses) / len(losses)


@pytest.mark.filterwarnings("ignore")
def test_fsdp_defaults_give_wrong_gradients_in_silence_with_zero_bubble(ranks_of: Callable[[int], pl.Ranks]) -> None:
    wanted, (inputs, targets) = whole_gradients(), batch()
    loss = F.mse_loss(network()(inputs), targets).item()

    wrong, its_loss = run(ranks_of(4))
    assert its_loss == pytest.approx(loss, rel=1e-6)  # nothing to see
    off = [
        name for name, grad in wanted.items() if wrong[name] is None or not torch.allclose(wrong[name], grad, rtol=0.1)
    ]
    print({name: None if grad is None else grad.norm() / wanted[name].norm() for name, grad in wrong.items()})
    assert off

    right, _ = run(ranks_of(4), reshard_after_forward=False)
    assert largest_difference(right, wanted) < 1e-5


def split_backwards_under_fsdp(
    model: nn.Sequential, batch: tuple[Tensor, Tensor]
) -> tuple[dict[str, Tensor], tuple[int, int]]:
    """All layers as one stage of ours on each of two ranks: every F, I and W, and then one reduce-scatter.

    The whole gradients, and the bytes of this rank's weights: shards, and beside them whole ones during the step.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Partial, Shard

    from pipelab.engine.deferred import Deferral
    from pipelab.engine.message import unwrap, wrap
    from pipelab.engine.stage import Stage

    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    shards: Any = dict(model.named_parameters())
    model.unshard()
    whole = dict(model.named_parameters())
    stage = Stage(list(model), deferral=Deferral(model))
    stage.begin(0)
    inputs, targets = (part.chunk(2)[mesh.get_local_rank()].chunk(4) for part in batch)
    for number, x in enumerate(inputs):
        output = unwrap(stage.forward(number, wrap(x.clone())._replace(wants_gradient=(True,))))
        stage.backward_input(number, [2 * (output - targets[number]) / batch[1].numel()])
    for number in range(4):
        stage.backward_weight(number)
    found = {}
    for name, parameter in whole.items():
        mine = DTensor.from_local(parameter.grad, mesh, [Partial()]).redistribute(placements=[Shard(0)])
        assert mine.to_local().shape == shards[name].to_local().shape
        found[name] = mine.full_tensor()
    model.reshard()
    assert all(parameter is shards[name] for name, parameter in model.named_parameters())
    return found, (sum(p.to_local().nbytes for p in shards.values()), sum(p.nbytes for p in whole.values()))


def test_fsdp_is_right_around_our_stages_and_holds_its_shards_beside_whole_weights(
    ranks_of: Callable[[int], pl.Ranks],
) -> None:
    """What docs/decisions.md says of FSDP2 without resharding: nothing is wrong with it, and nothing gained by it."""
    model, sample = network(), batch()
    for gradients, (shards, whole) in ranks_of(2).run(lambda: split_backwards_under_fsdp(model, sample)):
        assert largest_difference(gradients, whole_gradients()) < 1e-5
        assert whole == sum(parameter.nbytes for parameter in model.parameters())
        assert shards == whole / 2


@pytest.mark.parametrize("data_parallel", ["replicate", "shard"])
def test_our_replicas_have_right_gradients_with_the_same_schedule(
    data_parallel: str, ranks_of: Callable[[int], pl.Ranks]
) -> None:
    inputs, targets = batch()
    order = pl.zb_v(2, 4)
    with pl.Pipeline(
        network(),
        order,
        mesh=pl.Mesh(dp=2, pp=2),
        data_parallel=data_parallel,
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ranks=ranks_of(4),
    ) as pipe:
        pipe.step(inputs, targets)
        assert largest_difference(pipe.gradients(), whole_gradients()) < 1e-5
