"""Any model, any split, any schedule: what is drawn at random trains as in one process.

The layers are those that engines get wrong: they write in place, join again what they have split, use a weight twice or
not at all, drop at random, or do not learn. They stand in any order, and a cut may go between any two of them.
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import plain_training
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_training import largest_difference, same_to_the_bit
from schedule_sizes import FLUSHED
from torch import Tensor, nn

import pipelab as pl

# As in a notebook: the ranks get functions and classes by value and do not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("one_thread")
RanksOf = Callable[[int], pl.Ranks]
WIDTH = 6


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.layer(x))


class Fork(nn.Module):
    """Two tensors, of which one is its input, and what is no tensor; `Join` stands behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return self.layer(x), {"skipped": x, "scale": 0.5, "nothing": None, "signs": x.detach() > 0}


class Join(nn.Module):
    def forward(self, value: tuple[Tensor, dict[str, Any]]) -> Tensor:
        x, rest = value
        joined: Tensor = torch.where(rest["signs"], x, rest["scale"] * rest["skipped"]) + rest["skipped"]
        return joined


class Twice(nn.Module):
    """One matrix, used as it is and turned, by itself and in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.layer(torch.tanh(self.layer(x))) @ self.layer.weight.t()
        return value


class Unused(nn.Module):
    """Has a weight that it never uses, and one that gets a gradient of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.shift = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.used(x) + 0 * self.shift
        return value


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def frozen(*names: str) -> nn.Linear:
    """A Linear layer whose parameters of these names do not learn."""
    layer = linear()
    for name in names:
        getattr(layer, name).requires_grad_(False)
    return layer


def shared() -> list[nn.Module]:
    """One layer in two places, which may be on two ranks."""
    layer = linear()
    return [layer, nn.Tanh(), layer]


PARTS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": lambda: [linear()],
    "tanh": lambda: [nn.Tanh()],
    "writes in place": lambda: [linear(), nn.ReLU(inplace=True)],
    "residual": lambda: [Residual()],
    "dropout": lambda: [nn.Dropout(0.3)],
    "norm": lambda: [nn.LayerNorm(WIDTH)],
    "fork": lambda: [Fork(), Join()],
    "twice": lambda: [Twice()],
    "unused": lambda: [Unused()],
    "frozen": lambda: [frozen("weight", "bias")],
    "half frozen": lambda: [frozen("weight"), nn.Tanh(), frozen("bias")],
    "shared": shared,
}
PLANS = FLUSHED


@st.composite
def settings_of_a_run(draw: st.DrawFn) -> dict[str, Any]:
    """A schedule, the parts of a model with a layer for each stage at least, a split, and sizes of batches."""
    name, p = draw(st.sampled_from(PLANS)), draw(st.integers(1, 3))
    schedule = pl.SCHEDULES[name](p, p * draw(st.integers(2, 3)))
    parts = draw(st.lists(st.sampled_from(sorted(PARTS)), min_size=2, max_size=8))
    lengths = [len(PARTS[part]()) for part in parts]
    parts += ["linear"] * (schedule.num_stages - sum(lengths) - 1)
    num_layers = sum(len(PARTS[part]()) for part in parts) + 1
    cuts = draw(
        st.lists(
            st.integers(1, num_layers - 1),
            min_size=schedule.num_stages - 1,
            max_size=schedule.num_stages - 1,
            unique=True,
        )
    )
    ends = [0, *sorted(cuts), num_layers]
    m = schedule.num_microbatches
    return {
        "schedule": schedule,
        "parts": parts,
        "partition": [after - before for before, after in itertools.pairwise(ends)],
        "remat": draw(st.sampled_from(["none", "stage", "layer", 2])),
        "sizes": draw(st.lists(st.integers(m, 3 * m), min_size=2, max_size=2)),
        "seed": draw(st.integers(0, 100)),
    }


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def check(run: dict[str, Any], ranks_of: RanksOf) -> None:
    """Two steps, and after each of them loss, gradients and parameters: to the bit, unless a layer is in two places."""
    schedule, partition, seed = run["schedule"], run["partition"], run["seed"]
    torch.manual_seed(seed)
    model = nn.Sequential(*[layer for part in run["parts"] for layer in PARTS[part]()], nn.Linear(WIDTH, 4)).double()
    reference = copy.deepcopy(model)
    optimizer = sgd(reference.parameters())
    with pl.Pipeline(
        model,
        schedule,
        loss_fn=F.cross_entropy,
        optimizer=sgd,
        ranks=ranks_of(schedule.num_ranks),
        partition=partition,
        remat=run["remat"],
    ) as pipe:
        for step, size in enumerate(run["sizes"]):
            inputs, targets = torch.randn(size, WIDTH, dtype=torch.double), torch.randint(4, (size,))
            loss = pipe.step(inputs, targets).loss
            optimizer.zero_grad()
            plain = plain_training.step(
                *(reference, inputs, targets, F.cross_entropy, schedule), dropout=(seed, step), partition=partition
            )
            gradients = {name: p.grad for name, p in reference.named_parameters(remove_duplicate=False)}
            optimizer.step()
            ours = pipe.gradients()
            assert loss == pytest.approx(plain, rel=1e-12)
            assert [name for name in ours if ours[name] is None] == [n for n in gradients if gradients[n] is None]
            found = {name: gradient for name, gradient in ours.items() if gradient is not None}
            wanted = {name: gradient for name, gradient in gradients.items() if gradient is not None}
            if "shared" in run["parts"]:
                assert largest_difference(found, wanted) < 1e-9
                assert largest_difference(pipe.state_dict(), reference.state_dict()) < 1e-9
            else:
                assert same_to_the_bit(found, wanted)
                assert same_to_the_bit(pipe.state_dict(), reference.state_dict())


@settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(run=settings_of_a_run())
def test_any_model_trains_as_in_one_process(ranks_of: RanksOf, run: dict[str, Any]) -> None:
    check(run, ranks_of)


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(run=settings_of_a_run())
def test_any_of_many_models_trains_as_in_one_process(ranks_of: RanksOf, run: dict[str, Any]) -> None:
    check(run, ranks_of)
