"""Training as it is: keyword inputs, learning rates that change, numbers that are none."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import plain_training
import pytest
import torch
import torch.nn.functional as F
from plain_training import largest_difference, same_to_the_bit
from torch import Tensor, nn

import pipelab as pl

# As in a notebook: the ranks get functions and classes by value and do not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]
RanksOf = Callable[[int], pl.Ranks]


def batch(seed: int = 0, size: int = 10) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(size, 8, generator=random), torch.randint(0, 4, (size,), generator=random)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


# ---- keyword inputs


class Masked(nn.Module):
    """Takes a mask and a scale; what it is given is called as one of the keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, scale: Tensor, mask: Tensor, *, factor: float = 1.0) -> Tensor:
        return torch.tanh(self.layer(scale)) * mask * factor


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.layer(x) * scale


def keyword_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Masked(), nn.Dropout(0.0), nn.Linear(8, 8), Masked(), Scaled())


def keyword_output(model: nn.Sequential, x: Tensor, mask: Tensor, scale: Tensor, factor: float) -> Tensor:
    hidden = model[2](model[1](model[0](x, mask, factor=factor)))
    output: Tensor = model[4](model[3](hidden, mask, factor=factor), scale)
    return output


@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "interleaved"])
def test_training_gives_keywords_to_the_layers_that_name_them(name: str, remat: str, ranks_of: RanksOf) -> None:
    """Uneven micro-batches, each with its own rows of the mask; and in evaluation, with fewer of them."""
    model = keyword_model()
    reference = copy.deepcopy(model)
    optimizer = sgd(reference.parameters())
    with pl.Pipeline(
        model, pl.SCHEDULES[name](2, 4), loss_fn=F.cross_entropy, optimizer=sgd, ranks=ranks_of(2), remat=remat
    ) as pipe:
        for size in (10, 4, 13):
            inputs, targets = batch(size, size)
            kwargs = {"mask": (inputs > 0).float(), "scale": inputs[:, :1].abs(), "factor": 0.5}
            loss = F.cross_entropy(keyword_output(reference, inputs, **kwargs), targets)
            assert pipe.evaluate(inputs, targets, kwargs=kwargs) == pytest.approx(loss.item(), rel=1e-6)
            assert pipe.step(inputs, targets, kwargs=kwargs).loss == pytest.approx(loss.item(), rel=1e-6)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        few = {"mask": torch.ones(2, 8), "scale": torch.ones(2, 1)}
        wanted = keyword_output(reference, inputs[:2], **few, factor=1.0)
        assert torch.allclose(pipe.predict(inputs[:2], kwargs=few), wanted, atol=1e-5)
        assert largest_difference(pipe.state_dict(), reference.state_dict()) < 1e-5


class Times(nn.Linear):
    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:  # type: ignore[override]
        return super().forward(x) * factor


def test_training_takes_keywords_without_a_tensor(ranks_of: RanksOf) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Times(8, 8), nn.Tanh(), Times(8, 4)), torch.randn(10, 8)
    with pl.Pipeline(model, pl.gpipe(2, 4), loss_fn=F.cross_entropy, ranks=ranks_of(2)) as pipe:
        wanted = model[2](model[1](model[0](x, factor=0.5)), factor=0.5)
        assert torch.allclose(pipe.predict(x, kwargs={"factor": 0.5}), wanted, atol=1e-6)


KEYWORDS: dict[str, tuple[Any, type[Exception], str]] = {
    "unknown": ({"masks": torch.ones(10, 8)}, pl.EngineError, "no layer takes 'masks'.*take factor, mask, scale"),
    "no dict": ([("mask", torch.ones(10, 8))], pl.EngineError, "kwargs must be a dict of keywords.*got a list"),
    "the value itself": ({"x": torch.ones(10, 8)}, pl.EngineError, "no layer takes 'x' as a keyword"),
    "other rows": ({"mask": torch.ones(8, 8)}, pl.SizeError, "mask has 8 rows, but there are 10 samples"),
}


@pytest.mark.parametrize("case", KEYWORDS)
def test_training_refuses_keywords_that_fit_no_layer_or_sample(case: str, ranks_of: RanksOf) -> None:
    kwargs, error, message = KEYWORDS[case]
    with pl.Pipeline(keyword_model(), pl.gpipe(2, 4), loss_fn=F.cross_entropy, ranks=ranks_of(2)) as pipe:
        with pytest.raises(error, match=message):
            pipe.step(*batch(), kwargs=kwargs)
        pipe.step(*batch(), kwargs={"mask": torch.ones(10, 8), "scale": torch.tensor(2.0)})  # it goes on


# ---- learning rates


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def warmed_up(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [3])


def by_function(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # of torch's own SequentialLR
@pytest.mark.parametrize("scheduler", [halved, warmed_up, by_function])
def test_training_changes_the_learning_rate_with_every_update(
    scheduler: Any, tmp_path: Path, ranks_of: RanksOf
) -> None:
    """Every second step has no update, and does not count; a checkpoint goes on where the scheduler was."""
    torch.manual_seed(0)
    model = pl.models.mlp((8, 8, 8, 4))
    setting = {"loss_fn": F.cross_entropy, "optimizer": sgd, "scheduler": scheduler}
    reference = copy.deepcopy(model)
    optimizer = sgd(reference.parameters())
    plan = scheduler(optimizer)
    with pl.Pipeline(model, pl.gpipe(2, 2), ranks=ranks_of(2), **setting) as pipe:
        for seed in range(8):
            pipe.step(*batch(seed), update=seed % 2 == 1)
            F.cross_entropy(reference(batch(seed)[0]), batch(seed)[1]).backward()
            if seed % 2 == 1:
                optimizer.step()
                plan.step()
                optimizer.zero_grad()
        pipe.save(tmp_path / "model.pt")
    with pl.Pipeline.load(tmp_path / "model.pt", model, pl.gpipe(3, 2), ranks=ranks_of(3), **setting) as pipe:
        for seed in range(3):
            pipe.step(*batch(seed))
            optimizer.zero_grad()
            F.cross_entropy(reference(batch(seed)[0]), batch(seed)[1]).backward()
            optimizer.step()
            plan.step()
        assert largest_difference(pipe.state_dict(), reference.state_dict()) < 1e-5


# ---- no numbers


class Broken(nn.Module):
    """Makes a gradient that is no number of a loss that is one: the root of 0 has none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sqrt((x * self.weight).square().sum(1, keepdim=True)) + x


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_training_stops_before_a_number_that_is_none_gets_into_a_weight(
    value: str, max_norm: float | None, ranks_of: RanksOf
) -> None:
    """Step and rank are named, no parameter has changed, and the next batch trains as if nothing had been."""
    states = []
    for spoilt in (False, True):
        with pl.Pipeline(
            pl.models.mlp((8, 8, 8, 4)),
            pl.one_f_one_b(3, 4),
            loss_fn=F.cross_entropy,
            optimizer=sgd,
            ranks=ranks_of(3),
            max_norm=max_norm,
        ) as pipe:
            pipe.step(*batch(0))
            if spoilt:
                before = pipe.state_dict()
                inputs, targets = batch(1)
                inputs[3, 2] = float(value)
                with pytest.raises(pl.EngineError, match=r"in step 1, counted from 0, the loss is nan \(on rank 2\)"):
                    pipe.step(inputs, targets)
                assert same_to_the_bit(pipe.state_dict(), before)
            pipe.step(*batch(2))
            states.append(pipe.state_dict())
    assert same_to_the_bit(*states)


def test_training_names_the_rank_of_a_gradient_that_is_no_number(ranks_of: RanksOf) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Identity(), Broken(), nn.Linear(8, 4))
    inputs, targets = torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)
    nn.init.zeros_(model[0].bias)
    with pl.Pipeline(
        model, pl.gpipe(2, 2), loss_fn=F.cross_entropy, optimizer=sgd, ranks=ranks_of(2), partition=[1, 3]
    ) as pipe:
        with pytest.raises(pl.EngineError, match=r"in step 0.* gradients are not finite on rank 0, 1\. "):
            pipe.step(inputs, targets)
        assert same_to_the_bit(pipe.state_dict(), model.state_dict())


def test_training_accumulates_after_a_step_that_was_not_finite(ranks_of: RanksOf) -> None:
    """The verdict on a step stayed with the ranks that had no numbers, and condemned the next one without an update."""
    inputs, targets = batch(1)
    inputs[3, 2] = float("nan")
    plain = pl.models.mlp((8, 8, 4))
    F.cross_entropy(plain(batch(0)[0]), batch(0)[1]).backward()
    with pl.Pipeline(
        pl.models.mlp((8, 8, 4)), pl.gpipe(2, 2), loss_fn=F.cross_entropy, optimizer=sgd, ranks=ranks_of(2)
    ) as pipe:
        with pytest.raises(pl.EngineError, match="gradients are not finite on rank 0, 1"):
            pipe.step(inputs, targets)
        pipe.step(*batch(0), update=False)
        wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
        assert largest_difference(pipe.gradients(), wanted) < 1e-6


@pytest.mark.parametrize("update", [False, True])
def test_training_keeps_gradients_that_wait_through_a_step_that_is_not_finite(update: bool, ranks_of: RanksOf) -> None:
    """They took in the bad ones, so that the next good step was condemned, with their own batch lost."""
    bad, targets = batch(1)
    bad[3, 2] = float("nan")
    plain = pl.models.mlp((8, 8, 4))
    optimizer = sgd(plain.parameters())
    for number in (0, 2):
        F.cross_entropy(plain(batch(number)[0]), batch(number)[1]).backward()
    optimizer.step()
    with pl.Pipeline(
        pl.models.mlp((8, 8, 4)), pl.gpipe(2, 2), loss_fn=F.cross_entropy, optimizer=sgd, ranks=ranks_of(2)
    ) as pipe:
        pipe.step(*batch(0), update=False)
        before = pipe.gradients()
        with pytest.raises(pl.EngineError, match="gradients are not finite on rank 0, 1"):
            pipe.step(bad, targets, update=update)
        assert same_to_the_bit(pipe.gradients(), before)
        pipe.step(*batch(2))
        assert largest_difference(pipe.state_dict(), plain.state_dict()) < 1e-6


def test_training_goes_on_with_no_numbers_where_asked(ranks_of: RanksOf) -> None:
    inputs, targets = batch()
    inputs[0] = float("nan")
    with pl.Pipeline(
        pl.models.mlp((8, 8, 4)),
        pl.gpipe(2, 2),
        loss_fn=F.cross_entropy,
        optimizer=sgd,
        ranks=ranks_of(2),
        nan="ignore",
    ) as pipe:
        assert torch.tensor(pipe.step(inputs, targets).loss).isnan()
        assert all(value.isnan().any() for value in pipe.state_dict().values())


# ---- bfloat16


@pytest.mark.parametrize("remat", ["none", "stage", "layer"])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "interleaved"])
def test_training_in_bf16_is_that_of_autocast(name: str, remat: str, ranks_of: RanksOf) -> None:
    """To the bit; weights, their gradients and the loss stay in float32, and half as many bytes are sent."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.LayerNorm(16)),
        *(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 4)),
    )
    reference = copy.deepcopy(model)
    optimizer = sgd(reference.parameters())
    schedule = pl.SCHEDULES[name](2, 4)
    with pl.Pipeline(
        model,
        schedule,
        loss_fn=F.cross_entropy,
        optimizer=sgd,
        ranks=ranks_of(2),
        remat=remat,
        precision="bf16",
    ) as pipe:
        for seed, size in enumerate((10, 8, 13)):
            result = pipe.step(*batch(seed, size))
            optimizer.zero_grad()
            loss = plain_training.step(reference, *batch(seed, size), F.cross_entropy, schedule, precision="bf16")
            optimizer.step()
            assert result.loss == pytest.approx(loss, rel=1e-15)
        assert same_to_the_bit(pipe.state_dict(), reference.state_dict())
        assert {value.dtype for value in pipe.state_dict().values()} == {torch.float32}
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(reference(batch()[0]), batch()[1])
        assert pipe.evaluate(*batch()) == pytest.approx(loss.item(), rel=1e-3)
        assert pipe.predict(batch()[0]).dtype == torch.bfloat16
    if name == "gpipe":
        assert result.sent_bytes == (13 * 16 * 2, 13 * 16 * 2)
