"""The promise of the whole thing: training through a pipeline is training, whatever the schedule.

Against plain training over the same micro-batches every parameter, buffer and loss is equal to the bit. Against plain
training over whole batches it is equal up to rounding. Every builder in SCHEDULES is run, so a new one joins by itself.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import plain_training
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pairwise import covering, everything
from plain_training import largest_difference, same_to_the_bit
from schedule_sizes import FLUSHED
from torch import Tensor, nn

import pipelab as pl

# As in a notebook: the ranks get functions and classes by value and do not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

SIZES = [
    (1, 1),
    (1, 4),
    (2, 1),
    (2, 4),
    (3, 2),
    (4, 4),
    (4, 8),
]  # ranks, micro-batches; also fewer micro-batches than ranks
LOOPED = ("interleaved", "breadth_first")
RUNS = FLUSHED


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def network(num_layers: int) -> nn.Sequential:
    """Layers of several kinds, at least `num_layers`: with statistics, without weights, writing in place."""
    torch.manual_seed(7)
    block = [
        nn.Linear(10, 10, bias=False),  # a bias would not matter to BatchNorm: its gradient is rounding alone
        nn.BatchNorm1d(10),
        nn.ReLU(inplace=True),
        nn.Linear(10, 10),
        nn.LayerNorm(10),
        nn.Tanh(),
    ]
    layers = [copy.deepcopy(block[number % len(block)]) for number in range(max(num_layers - 1, 6))]
    return nn.Sequential(*layers, nn.Linear(10, 5))


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    """Random inputs and targets of these sizes, always the same."""
    random = torch.Generator().manual_seed(3)
    return [(torch.randn(n, 10, generator=random), torch.randint(0, 5, (n,), generator=random)) for n in sizes]


def built(name: str, p: int, m: int) -> pl.Schedule | None:
    """The builder's schedule, or None where it does not take these sizes."""
    try:
        return pl.SCHEDULES[name](p, m)
    except pl.SizeError:
        return None


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", RUNS)
def test_pipeline_trains_as_one_process_does(name: str, p: int, m: int, ranks_of: Callable[[int], pl.Ranks]) -> None:
    """Five steps with Adam on batches of different, mostly uneven sizes: equal to the bit."""
    schedule = built(name, p, m)
    if schedule is None:
        pytest.skip(f"{name} does not take {p} ranks with {m} micro-batches")
    model = network(schedule.num_stages)
    reference = copy.deepcopy(model)
    optimizer = adam(reference.parameters())
    with pl.Pipeline(model, schedule, loss_fn=F.cross_entropy, optimizer=adam, ranks=ranks_of(p)) as pipe:
        for inputs, targets in batches(24, 19, 30, 17, 24):
            result = pipe.step(inputs, targets)
            optimizer.zero_grad()
            loss = plain_training.step(reference, inputs, targets, F.cross_entropy, schedule)
            gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
            optimizer.step()
            assert result.loss == pytest.approx(loss, rel=1e-15)
            assert same_to_the_bit(pipe.gradients(), gradients)
        assert same_to_the_bit(pipe.state_dict(), reference.state_dict())


@pytest.mark.parametrize("name", RUNS)
def test_pipeline_equals_whole_batches(name: str, ranks_of: Callable[[int], pl.Ranks]) -> None:
    """Without statistics of batches in the model, micro-batches are the whole batch, up to rounding."""
    model = pl.models.mlp((10, *[12] * 8, 5))
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    with pl.Pipeline(
        model,
        pl.SCHEDULES[name](4, 8),
        loss_fn=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        ranks=ranks_of(4),
    ) as pipe:
        for inputs, targets in batches(24, 19, 30, 17, 24):
            result = pipe.step(inputs, targets)
            optimizer.zero_grad()
            loss = F.cross_entropy(reference(inputs), targets)
            loss.backward()
            optimizer.step()
            assert result.loss == pytest.approx(loss.item(), rel=1e-6)
        assert largest_difference(pipe.state_dict(), reference.state_dict()) < 1e-6


@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("name", RUNS)
def test_pipeline_sends_what_no_buffer_was_ready_for(name: str, p: int, ranks_of: Callable[[int], pl.Ranks]) -> None:
    """Messages of 16, 8 and 33 kB: a first one over 4 kB, and one larger than the last, goes in two pieces."""
    model = pl.models.mlp((10, *[64] * 8, 5))
    reference = copy.deepcopy(model)
    with pl.Pipeline(model, pl.SCHEDULES[name](p, 8), loss_fn=F.cross_entropy, ranks=ranks_of(p)) as pipe:
        for inputs, targets in batches(512, 256, 1040):
            pipe.step(inputs, targets)
            reference.zero_grad()
            F.cross_entropy(reference(inputs), targets).backward()
            gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
            assert largest_difference(pipe.gradients(), gradients) < 1e-5


EVERYTHING: dict[str, Sequence[Any]] = {
    "name": RUNS,
    "size": [(1, 2), (2, 4), (3, 6)],
    "remat": ["none", "stage", "layer", 2],
    "batchnorm": ["microbatch", "minibatch"],
    "samples": [(24, 24, 24, 24, 24), (24, 19, 30, 17, 24)],
    "dropout": [False, True],
    "tied": [False, True],
}


def of_everything(num_layers: int, *, dropout: bool, tied: bool) -> nn.Sequential:
    """A network in float64 whose first and last Linear may have one weight, on whatever ranks they are."""
    layers = [*network(num_layers)[:-1], nn.Dropout(0.3 if dropout else 0.0), nn.Linear(10, 10)]
    if tied:
        layers[-1].weight = layers[0].weight
    return nn.Sequential(*layers).double()


def check_everything(case: dict[str, Any], ranks_of: Callable[[int], pl.Ranks]) -> None:
    """Five steps with Adam, and after every one of them loss, gradients, parameters and buffers.

    To the bit, but for what is summed in another order: a tied weight, and the statistics of a whole mini-batch.
    """
    p, m = case["size"]
    schedule = pl.SCHEDULES[case["name"]](p, m)
    model = of_everything(schedule.num_stages, dropout=case["dropout"], tied=case["tied"])
    reference = copy.deepcopy(model)
    optimizer = adam(reference.parameters())
    torch.manual_seed(5)
    with pl.Pipeline(
        model,
        schedule,
        loss_fn=F.cross_entropy,
        optimizer=adam,
        ranks=ranks_of(p),
        remat=case["remat"],
        batchnorm=case["batchnorm"],
    ) as pipe:
        for number, (inputs, targets) in enumerate(batches(*case["samples"])):
            loss = pipe.step(inputs.double(), targets).loss
            optimizer.zero_grad()
            assert loss == pytest.approx(
                plain_training.step(
                    *(reference, inputs.double(), targets, F.cross_entropy, schedule),
                    batchnorm=case["batchnorm"],
                    dropout=(5, number),
                ),
                rel=1e-12,
            )
            gradients = {name: p.grad for name, p in reference.named_parameters(remove_duplicate=False)}
            optimizer.step()
            ours, theirs = pipe.state_dict(), reference.state_dict()
            if case["tied"]:
                assert largest_difference(pipe.gradients(), gradients) < 1e-10
                assert largest_difference(ours, theirs) < 1e-10
            else:
                assert same_to_the_bit(pipe.gradients(), gradients)
                summed = [n for n in theirs if "running" in n and case["batchnorm"] == "minibatch"]
                assert largest_difference({n: ours.pop(n) for n in summed}, {n: theirs.pop(n) for n in summed}) < 1e-12
                assert same_to_the_bit(ours, theirs)


@pytest.mark.parametrize("case", covering(EVERYTHING), ids=lambda case: "-".join(map(str, case.values())))
def test_pipeline_trains_the_same_with_any_two_things_together(
    case: dict[str, Any], ranks_of: Callable[[int], pl.Ranks]
) -> None:
    check_everything(case, ranks_of)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", everything(EVERYTHING), ids=lambda case: "-".join(map(str, case.values())))
def test_pipeline_trains_the_same_with_everything_together(
    case: dict[str, Any], ranks_of: Callable[[int], pl.Ranks]
) -> None:
    check_everything(case, ranks_of)


def with_dropout() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        *(nn.Linear(10, 40), nn.Dropout(0.5), nn.ReLU(), nn.Linear(40, 40), nn.Dropout(0.2)),
        *(nn.Linear(40, 40), nn.Dropout(0.5), nn.Tanh(), nn.Linear(40, 5)),
    )


def noisy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.dropout(output, 0.1), target)


def test_pipeline_drops_the_same_in_every_schedule_and_split(ranks_of: Callable[[int], pl.Ranks]) -> None:
    """Also with remat, whose second forward must drop what the first one dropped; another seed drops others.

    The loss draws random numbers, too, behind a layer that draws none.
    """
    losses = {}
    for name, p, remat in [
        *(("gpipe", 1, "none"), ("gpipe", 4, "none"), ("one_f_one_b", 3, "none"), ("zb_h1", 2, "none")),
        *(("interleaved", 2, "stage"), ("gpipe", 3, "stage"), ("one_f_one_b", 4, "layer"), ("zb_h2", 2, 2)),
    ]:
        model = with_dropout()
        torch.manual_seed(11)
        with pl.Pipeline(
            model, pl.SCHEDULES[name](p, 4), loss_fn=noisy, optimizer=adam, ranks=ranks_of(p), remat=remat
        ) as pipe:
            losses[name, p, remat] = [pipe.step(*batch).loss for batch in batches(24, 19, 30)]
    first, *others = losses.values()
    assert others == [first] * len(others)
    torch.manual_seed(12)
    with pl.Pipeline(with_dropout(), pl.gpipe(1, 4), loss_fn=noisy, optimizer=adam, ranks=ranks_of(1)) as pipe:
        assert [pipe.step(*batch).loss for batch in batches(24, 19, 30)] != first


class Tally(nn.Module):
    """Adds a column that sums up what a dropout of 64 ones has kept; the weight's gradient then shows what that was."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        kept = F.dropout(torch.ones(len(x), 64), 0.5, self.training)
        return torch.cat([x, (kept * self.weight).sum(dim=1, keepdim=True)], dim=1)


def test_pipeline_drops_differently_for_every_layer_micro_batch_and_step(ranks_of: Callable[[int], pl.Ranks]) -> None:
    masks = []
    with pl.Pipeline(
        nn.Sequential(Tally(), Tally()), pl.gpipe(2, 2), loss_fn=lambda output, target: output.sum(), ranks=ranks_of(2)
    ) as pipe:
        for _ in range(2):
            pipe.step(torch.ones(2, 1), torch.zeros(2))
            masks += [tuple(gradient.tolist()) for gradient in pipe.gradients().values()]
    assert len(set(masks)) == 4
    assert all(set(mask) == {0.0, 1.0, 2.0} for mask in masks)  # 1: kept in one of the two micro-batches


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pipeline_trains_any_small_model_as_one_process_does(ranks_of: Callable[[int], pl.Ranks], data: Any) -> None:
    p, name = data.draw(st.integers(1, 3)), data.draw(st.sampled_from(RUNS))
    m = data.draw(st.integers(1, 3)) * p
    schedule = built(name, p, m)
    assume(schedule is not None)
    extra = data.draw(st.integers(0, 3))
    torch.manual_seed(data.draw(st.integers(0, 100)))
    count = schedule.num_stages + extra
    widths = data.draw(st.lists(st.integers(1, 8), min_size=count, max_size=count))
    kinds = data.draw(st.lists(st.sampled_from([nn.Tanh, nn.ReLU, nn.Softplus]), min_size=count, max_size=count))
    layers: list[nn.Module] = []
    for before, after, kind in zip([10, *widths], [*widths, 5], [*kinds, nn.Identity], strict=True):
        layers += [nn.Linear(before, after), kind()]
    model = nn.Sequential(*layers)
    reference = copy.deepcopy(model)
    sizes = data.draw(st.lists(st.integers(m, 3 * m), min_size=1, max_size=3))
    remat = data.draw(st.sampled_from(["none", "stage", "layer", 3]))
    optimizer = adam(reference.parameters())
    with pl.Pipeline(model, schedule, loss_fn=F.cross_entropy, optimizer=adam, ranks=ranks_of(p), remat=remat) as pipe:
        for inputs, targets in batches(*sizes):
            pipe.step(inputs, targets)
            optimizer.zero_grad()
            plain_training.step(reference, inputs, targets, F.cross_entropy, schedule)
            optimizer.step()
        assert same_to_the_bit(pipe.state_dict(), reference.state_dict())
