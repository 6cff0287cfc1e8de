"""A mesh on GPUs trains as one process on the CPU does: over gloo with one shared GPU, over NCCL with one a rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from plain_training import largest_difference
from torch import nn

import pipelab as pl
from pipelab.models import gpt, next_token_loss

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(180)

PLACES = ["gloo", "nccl"]
SMALL = [pl.Mesh(dp=2, pp=2), pl.Mesh(pp=2, tp=2)]
EQUAL = 1e-4  # of the largest entry, in float32
DEVICE = "cuda"


def ranks_for(backend: str, count: int) -> pl.Ranks:
    """With "gloo" they share what there is, with "nccl" each has a GPU of its own."""
    if backend == "nccl" and torch.cuda.device_count() < count:
        pytest.skip(f"NCCL needs a GPU for each of {count} ranks, and there are {torch.cuda.device_count()}")
    return pl.Ranks(count, backend=backend, timeout=90)


@pytest.fixture(scope="module", params=PLACES)
def four(request: pytest.FixtureRequest) -> Iterator[pl.Ranks]:
    with ranks_for(request.param, 4) as ranks:
        yield ranks


def model(dropout: float = 0.0) -> nn.Sequential:
    return gpt(23, width=32, heads=2, depth=4, context=6, dropout=dropout)


def batch() -> Any:
    return torch.randint(23, (2, 18, 6), generator=torch.Generator().manual_seed(3)).unbind()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def pipeline(ranks: pl.Ranks, mesh: pl.Mesh, schedule: pl.Schedule, **options: Any) -> pl.Pipeline:
    return pl.Pipeline(
        options.pop("model", None) or model(),
        schedule,
        mesh=mesh,
        loss_fn=next_token_loss,
        optimizer=momentum,
        ranks=ranks,
        device=DEVICE,
        **options,
    )


def check(ranks: pl.Ranks, mesh: pl.Mesh, schedule: pl.Schedule, **options: Any) -> None:
    """Loss, norm and gradients of three clipped steps, then all parameters."""
    inputs, targets = batch()
    plain = model()
    optimizer = momentum(plain.parameters())
    with pipeline(ranks, mesh, schedule, max_norm=0.3, **options) as pipe:
        for _ in range(3):
            result = pipe.step(inputs, targets)
            optimizer.zero_grad()
            loss = next_token_loss(plain(inputs), targets)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.3)
            optimizer.step()
            assert result.loss == pytest.approx(loss.item(), rel=EQUAL)
            assert result.gradient_norm == pytest.approx(norm.item(), rel=EQUAL)
            wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
            assert largest_difference(pipe.gradients(), wanted) < EQUAL
        assert largest_difference(pipe.state_dict(), plain.state_dict()) < EQUAL


@pytest.mark.parametrize("mesh", SMALL, ids=str)
@pytest.mark.parametrize("build", [pl.one_f_one_b, pl.zb_h1, pl.zb_v])
def test_gpu_mesh_trains_as_one_process_does(four: pl.Ranks, mesh: pl.Mesh, build: Any) -> None:
    check(four, mesh, build(2, 4))


def test_gpu_mesh_shards_the_optimizer(four: pl.Ranks) -> None:
    check(four, pl.Mesh(dp=2, pp=2), pl.zb_h1(2, 4), data_parallel="shard")


def test_gpu_mesh_updates_on_the_way(four: pl.Ranks) -> None:
    """Against a replay, whose micro-batch k has the rows of both replicas' micro-batches k."""
    inputs, targets = (rows[:16] for rows in batch())
    plain, schedule = model(), pl.pipedream(2, 4)
    with pipeline(four, pl.Mesh(dp=2, pp=2), schedule, data_parallel="shard") as pipe:
        pipe.step(inputs, targets)
        state = pipe.state_dict()
    both = [rows.unflatten(0, (2, 4, 2)).transpose(0, 1).flatten(0, 2) for rows in (inputs, targets)]
    pl.replay(plain, schedule, [tuple(both)], loss_fn=next_token_loss, optimizer=momentum)
    assert largest_difference(state, plain.state_dict()) < EQUAL


@pytest.mark.parametrize("backend", PLACES)
def test_gpu_mesh_in_three_dimensions(backend: str) -> None:
    with ranks_for(backend, 8) as ranks:
        check(ranks, pl.Mesh(dp=2, pp=2, tp=2), pl.zb_h1(2, 4))


@pytest.mark.parametrize("mesh", SMALL, ids=str)
def test_gpu_mesh_drops_the_same_with_remat(four: pl.Ranks, mesh: pl.Mesh) -> None:
    """The second forward would give other gradients, were its random numbers not those of the first."""
    found = []
    for remat in ("none", "layer"):
        torch.manual_seed(5)
        with pipeline(four, mesh, pl.one_f_one_b(2, 4), model=model(dropout=0.3), remat=remat) as pipe:
            pipe.step(*batch())
            found.append(pipe.gradients())
    assert largest_difference(*found) < EQUAL


def test_gpu_mesh_checkpoint_goes_on_without_split_layers(four: pl.Ranks, tmp_path: Any) -> None:
    with pipeline(four, pl.Mesh(pp=2, tp=2), pl.gpipe(2, 4)) as pipe:
        pipe.step(*batch())
        pipe.save(tmp_path / "checkpoint.pt")
        expected = pipe.step(*batch()).loss, pipe.evaluate(*batch())
    other: dict[str, Any] = {"loss_fn": next_token_loss, "optimizer": momentum, "ranks": four, "device": DEVICE}
    mesh = pl.Mesh(dp=2, pp=2)
    with pl.Pipeline.load(tmp_path / "checkpoint.pt", model(), pl.zb_h1(2, 4), mesh=mesh, **other) as pipe:
        assert (pipe.step(*batch()).loss, pipe.evaluate(*batch())) == pytest.approx(expected, rel=EQUAL)
