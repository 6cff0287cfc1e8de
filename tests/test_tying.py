"""Tied weights: an embedding and an output layer on different ranks that are one and the same matrix."""

from __future__ import annotations

import copy
import io
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
from pipelab.ranks import local_state

# As in a notebook: the ranks get functions and classes by value and do not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(60)
RanksOf = Callable[[int], pl.Ranks]
VOCAB, WIDTH = 11, 8


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    tied = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *layers, nn.Linear(WIDTH, VOCAB, bias=False))
    tied[-1].weight = tied[0].weight
    return tied


def batch(seed: int = 0, size: int = 9) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (size,), generator=random), torch.randint(VOCAB, (size,), generator=random)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def copies(name: str) -> list[Tensor]:
    """This rank's parameters of that name."""
    (resident,) = [value for key, value in local_state().items() if key[0] == "pipelab.engine"]
    return [parameter.detach() for other, parameter in resident._named_parameters() if other == name]


BY_HAND = pl.Schedule.from_text(  # the embedding on the last rank, the output layer on the first
    """
    rank 0: 1F0 2F0 1F1 2F1 2B0 2B1 1B0 1B1
    rank 1: 0F0 0F1 0B0 0B1
    """
)
PLANS = {
    "gpipe": pl.gpipe(2, 4),
    "one_f_one_b": pl.one_f_one_b(3, 4),
    "zb_h1": pl.zb_h1(3, 3),
    "interleaved": pl.interleaved(2, 4),
    "zb_v": pl.zb_v(2, 4),
    "by hand": BY_HAND,
    "one rank": pl.gpipe(1, 3),
}


@pytest.mark.parametrize("plan", PLANS)
def test_tying_trains_as_the_tied_model_does(plan: str, ranks_of: RanksOf) -> None:
    schedule = PLANS[plan]
    plain = model()
    optimizer = momentum(plain.parameters())
    with pl.Pipeline(
        model(),
        schedule,
        loss_fn=F.cross_entropy,
        optimizer=momentum,
        ranks=ranks_of(schedule.num_ranks),
        max_norm=0.5,
    ) as pipe:
        for seed in range(10):
            result = pipe.step(*batch(seed))
            optimizer.zero_grad()
            F.cross_entropy(plain(batch(seed)[0]), batch(seed)[1]).backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            gradients = {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False)}
            optimizer.step()
            assert result.gradient_norm == pytest.approx(norm.item(), rel=1e-5)  # the tied matrix counts once
            assert largest_difference(pipe.gradients(), gradients) < 1e-5
        assert largest_difference(pipe.state_dict(), plain.state_dict()) < 1e-5


@pytest.mark.parametrize("plan", PLANS)
def test_tying_keeps_the_copies_equal_to_the_bit(plan: str, ranks_of: RanksOf) -> None:
    schedule = PLANS[plan]
    with pl.Pipeline(
        model(), schedule, loss_fn=F.cross_entropy, optimizer=adam, ranks=ranks_of(schedule.num_ranks)
    ) as pipe:
        for seed in range(10):
            pipe.step(*batch(seed))
        found = [value for name in ("0.weight", "7.weight") for each in pipe.ranks.run(copies, name) for value in each]
    assert len(found) == 2
    assert torch.equal(*found)
    assert not torch.equal(found[0], model()[0].weight)


def summed(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return F.cross_entropy(output, target, reduction="sum"), len(target)


@pytest.mark.parametrize("loss_fn", [F.cross_entropy, summed])
def test_tying_adds_up_gradients_until_an_update(loss_fn: Any, ranks_of: RanksOf) -> None:
    plain = model()
    with pl.Pipeline(model(), pl.gpipe(3, 3), loss_fn=loss_fn, optimizer=momentum, ranks=ranks_of(3)) as pipe:
        for seed in range(3):
            pipe.step(*batch(seed), update=False)
            F.cross_entropy(plain(batch(seed)[0]), batch(seed)[1]).backward()
            gradients = {name: p.grad for name, p in plain.named_parameters(remove_duplicate=False)}
            assert largest_difference(pipe.gradients(), gradients) < 1e-5
        pipe.step(*batch(3))
        F.cross_entropy(plain(batch(3)[0]), batch(3)[1]).backward()
        momentum(plain.parameters()).step()
        assert largest_difference(pipe.state_dict(), plain.state_dict()) < 1e-5


def test_tying_saves_the_weight_once(ranks_of: RanksOf) -> None:
    def size(state: dict[str, Tensor]) -> int:
        file = io.BytesIO()
        torch.save(state, file)
        return file.tell()

    with pl.Pipeline(model(), pl.gpipe(2, 2), loss_fn=F.cross_entropy, ranks=ranks_of(2)) as pipe:
        state = pipe.state_dict()
        assert list(state) == list(model().state_dict())
        assert state["0.weight"] is state["7.weight"]
        assert abs(size(state) - size(dict(model().state_dict()))) < VOCAB * WIDTH * 4 / 2


def test_tying_holds_after_two_values_were_loaded(ranks_of: RanksOf) -> None:
    """Of a file in which the copies differ the last one counts, as in the tied model itself."""
    other = {name: torch.randn_like(value) for name, value in model().state_dict().items()}
    plain = model()
    plain.load_state_dict(other)
    with pl.Pipeline(model(), pl.gpipe(2, 2), loss_fn=F.cross_entropy, ranks=ranks_of(2)) as pipe:
        pipe.load_state_dict(other)
        first, second = (value for each in pipe.ranks.run(copies, "7.weight") for value in each), plain[0].weight
        assert torch.equal(next(first), second)
        assert torch.equal(pipe.state_dict()["0.weight"], second)
        assert pipe.evaluate(*batch()) == pytest.approx(F.cross_entropy(plain(batch()[0]), batch()[1]).item(), 1e-6)


@pytest.mark.parametrize("frozen", ["all", "first use", "none"])
def test_tying_of_uses_without_gradients(frozen: str, ranks_of: RanksOf) -> None:
    """A frozen weight has no gradient anywhere; a use that gives none leaves the sum to the other."""
    tied = model()
    if frozen == "all":
        tied[0].weight.requires_grad_(False)
    if frozen == "first use":
        tied[0] = Detached(tied[0].weight)
    plain = copy.deepcopy(tied)
    F.cross_entropy(plain(batch()[0]), batch()[1]).backward()
    with pl.Pipeline(tied, pl.gpipe(2, 3), loss_fn=F.cross_entropy, optimizer=adam, ranks=ranks_of(2)) as pipe:
        pipe.step(*batch())
        ours = pipe.gradients()
    if frozen == "all":
        assert ours["0.weight"] is None
    else:
        assert torch.allclose(ours["0.weight"], plain[0].weight.grad, atol=1e-7)


class Detached(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight.detach())


def test_tying_sends_one_gradient_in_either_direction(ranks_of: RanksOf) -> None:
    """Nine embedded words of four bytes a number go on, their gradients come back, and so does the shared matrix's."""
    with pl.Pipeline(model(), PLANS["gpipe"], loss_fn=F.cross_entropy, ranks=ranks_of(2)) as pipe:
        result = pipe.step(*batch())
        assert pipe.step(*batch()).sent_bytes == result.sent_bytes
    each = 4 * (9 * WIDTH + VOCAB * WIDTH)
    assert result.sent_bytes == result.axis_bytes["pp"] == (each, each)
