"""Running statistics of BatchNorm: of every micro-batch, or of the mini-batch as if it had never been split."""

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

# As in a notebook: the ranks get functions and classes by value and do not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(60)
RanksOf = Callable[[int], pl.Ranks]
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def model(momentum: float | None = 0.1) -> nn.Sequential:
    """Its BatchNorm reads what does not depend on any other, so its input is the same, split or not."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 6), nn.Tanh(), nn.BatchNorm1d(6, momentum=momentum), nn.ReLU(), nn.Linear(6, 4), nn.Identity()
    )


def batch(size: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(size)
    return torch.randn(size, 8, generator=random), torch.randint(0, 4, (size,), generator=random)


def statistics(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if name.endswith(STATISTICS)}


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("remat", ["none", "stage", "layer", 2])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "interleaved"])
def test_batchnorm_statistics_are_those_of_the_unsplit_run(
    name: str, remat: Any, momentum: float | None, ranks_of: RanksOf
) -> None:
    """Uneven micro-batches, three steps, the second without an update: mean, unbiased variance and count."""
    unsplit = model(momentum)
    with pl.Pipeline(
        model(momentum),
        pl.SCHEDULES[name](2, 4),
        loss_fn=F.cross_entropy,
        ranks=ranks_of(2),
        remat=remat,
        batchnorm="minibatch",
    ) as pipe:
        for size in (10, 19, 9):
            pipe.step(*batch(size))
            pipe.evaluate(*batch(12))
            unsplit(batch(size)[0])
        state = pipe.state_dict()
    assert list(state) == list(unsplit.state_dict())
    assert state["2.num_batches_tracked"] == 3
    assert largest_difference(statistics(state), statistics(unsplit.state_dict())) < 1e-6


def test_batchnorm_statistics_survive_a_large_mean(ranks_of: RanksOf) -> None:
    """The mean is 10,000 times the deviation: a sum of squares in float32 would leave no digit of the variance."""
    random = torch.Generator().manual_seed(0)
    pictures = 10_000 + torch.randn(10, 3, 4, 4, generator=random)
    layers = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 4))
    with pl.Pipeline(layers, pl.gpipe(2, 4), loss_fn=F.cross_entropy, ranks=ranks_of(2), batchnorm="minibatch") as pipe:
        pipe.step(pictures, torch.zeros(10, dtype=torch.int64))
        state = pipe.state_dict()
    exact = pictures.double().transpose(0, 1).flatten(1)
    assert torch.allclose(state["0.running_mean"].double(), 0.1 * exact.mean(1), rtol=1e-6)
    assert torch.allclose(state["0.running_var"].double(), 0.9 + 0.1 * exact.var(1), rtol=1e-4)


@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
def test_batchnorm_of_micro_batches_counts_every_one_once(remat: str, ranks_of: RanksOf) -> None:
    plain = model()
    with pl.Pipeline(model(), pl.one_f_one_b(2, 4), loss_fn=F.cross_entropy, ranks=ranks_of(2), remat=remat) as pipe:
        pipe.step(*batch(10))
        for part in batch(10)[0].tensor_split(4):
            plain(part)
        state = pipe.state_dict()
    assert state["2.num_batches_tracked"] == 4
    assert largest_difference(statistics(state), statistics(plain.state_dict())) < 1e-6


def test_batchnorm_mode_changes_statistics_only(ranks_of: RanksOf) -> None:
    """Outputs and gradients are those of normalised micro-batches either way, to the bit."""
    found = []
    for mode in ("microbatch", "minibatch"):
        with pl.Pipeline(model(), pl.gpipe(2, 4), loss_fn=F.cross_entropy, ranks=ranks_of(2), batchnorm=mode) as pipe:
            found.append((pipe.step(*batch(10)).loss, pipe.gradients(), pipe.state_dict()))
    (loss, gradients, state), (other_loss, other_gradients, other_state) = found
    assert loss == other_loss
    assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)
    assert not torch.equal(state["2.running_var"], other_state["2.running_var"])


def test_batchnorm_that_is_frozen_or_keeps_no_statistics_is_left_alone(ranks_of: RanksOf) -> None:
    layers = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 4))
    layers[0].eval()
    before = copy.deepcopy(layers.state_dict())
    with pl.Pipeline(layers, pl.gpipe(2, 4), loss_fn=F.cross_entropy, ranks=ranks_of(2), batchnorm="minibatch") as pipe:
        pipe.step(*batch(10))
        after = pipe.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_batchnorm_used_twice_is_refused(ranks_of: RanksOf) -> None:
    """Two uses update twice in the unsplit run; taken together they would be a batch that never was."""
    norm = nn.BatchNorm1d(8)
    pipe = pl.Pipeline(
        nn.Sequential(norm, nn.Tanh(), norm, nn.Linear(8, 4)),
        pl.gpipe(1, 4),
        loss_fn=F.cross_entropy,
        ranks=ranks_of(1),
        batchnorm="minibatch",
    )
    with pytest.raises(pl.EngineError, match="BatchNorm1d of 8 channels was used 8 times for 4 micro-batches"):
        pipe.step(*batch(10))


class Own(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, training=True)


def test_batchnorm_with_a_forward_of_its_own_is_refused(ranks_of: RanksOf) -> None:
    with pytest.raises(pl.EngineError, match="0 is a Own with a forward of its own"):
        pl.Pipeline(
            nn.Sequential(Own(8), nn.Linear(8, 4)),
            pl.gpipe(2, 4),
            loss_fn=F.cross_entropy,
            ranks=ranks_of(2),
            batchnorm="minibatch",
        )
