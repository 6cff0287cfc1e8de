"""Weight gradients that Linear layers put off: the same to the bit, in one walk, and only where it costs no memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_stage import LAYERS, REMATS, assert_same, in_pipeline_order, made, plain, seeds_by_hand  # noqa: F401
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pipelab as pl
from pipelab.engine import deferred
from pipelab.engine.deferred import Deferral
from pipelab.engine.live_bytes import LiveBytes
from pipelab.engine.message import Value
from pipelab.engine.stage import Stage


class UsedElsewhere(nn.Module):
    """The matrix of a Linear layer is used without the layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) @ self.layer.weight


class Sequence(nn.Module):
    """Linear layers on (samples, 2, 3), contiguous and not, and on single vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.turned = nn.Linear(3, 3), nn.Linear(2, 2, bias=False)
        self.vector = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        value = self.layer(x.unflatten(1, (2, 3)))
        value = self.turned(value.transpose(1, 2)).flatten(1)
        return torch.stack([self.vector(row) for row in value])


class Complex(nn.Module):
    """Complex numbers, whose gradients are conjugate: a Linear layer that did not know once had wrong ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.complex(x, 2 * x)).abs()


class Mapped(nn.Module):
    """One sample at a time, by a transform of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: torch.tanh(self.layer(row[None]))[0])(x)


def half_frozen() -> list[nn.Module]:
    layers = [nn.Linear(6, 6), nn.Linear(6, 6)]
    layers[0].weight.requires_grad_(False)
    layers[1].bias.requires_grad_(False)
    return layers


LINEARS: dict[str, Callable[[], list[nn.Module]]] = {
    **LAYERS,
    "used elsewhere": lambda: [UsedElsewhere(), nn.Linear(6, 6)],
    "sequence": lambda: [nn.Linear(6, 6), Sequence()],
    "no bias": lambda: [nn.Linear(6, 6, bias=False), nn.GELU(), nn.Linear(6, 6, bias=False)],
    "half frozen": half_frozen,
    "mapped": lambda: [nn.Linear(6, 6), Mapped(), nn.Linear(6, 6)],
    "complex": lambda: [nn.Linear(6, 6), Complex(), nn.Linear(6, 6)],
    "among others": lambda: [
        *(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(12, 6)),
        *(nn.LayerNorm(6), nn.PReLU(), nn.Linear(6, 6)),
    ],
}


def build(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*LINEARS[name]())


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("kinds", ["B", "IW"])
@pytest.mark.parametrize("name", LINEARS)
def test_deferred_gradients_are_those_of_the_ordinary_backward(
    name: str, kinds: str, remat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, although all that can be deferred is; the first micro-batch is weighed, and not deferred."""
    monkeypatch.setattr(deferred, "_SLACK", math.inf)
    model, reference = build(name), build(name)
    inputs = list(torch.randn(3, 4, 6))
    expected = plain(reference, inputs)
    stage = Stage(list(model), remat=remat, deferral=Deferral(model))
    assert_same(in_pipeline_order(stage, inputs, kinds), expected)
    rounded = name == "one layer twice" and remat in ("layer", 2)
    for (parameter_name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), parameter_name
        if theirs.grad is not None:
            same = torch.allclose(mine.grad, theirs.grad) if rounded else torch.equal(mine.grad, theirs.grad)
            assert same, parameter_name
    assert stage.empty


class Force(nn.Module):
    """Works out a gradient in its forward, which is differentiated again, as a model of molecules does."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("kinds", ["B", "IW"])
def test_deferred_gradients_can_be_differentiated_again(kinds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred, "_SLACK", math.inf)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Force(), nn.Linear(6, 6))
    reference, inputs = copy.deepcopy(model), list(torch.randn(3, 4, 6))
    expected = plain(reference, inputs)
    assert_same(in_pipeline_order(Stage(list(model), deferral=Deferral(model)), inputs, kinds), expected)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


class Checkpointed(nn.Module):
    """Computes its layers again in the backward, by torch's own means; or keeps what they save elsewhere."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.how = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "kept elsewhere":
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
                return torch.tanh(self.layers(x))
        return torch.tanh(checkpoint(self.layers, x, use_reentrant=False))


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("kinds", ["B", "IW"])
@pytest.mark.parametrize("how", ["computed again", "kept elsewhere"])
def test_deferred_gradients_go_with_hooks_on_what_is_saved(
    how: str, kinds: str, remat: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second forward once saved other matrices than the first, and the weight that came back was another tensor."""
    monkeypatch.setattr(deferred, "_SLACK", math.inf)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Checkpointed(how), nn.Linear(6, 6))
    reference, inputs = copy.deepcopy(model), list(torch.randn(3, 4, 6))
    expected = plain(reference, inputs)
    assert_same(in_pipeline_order(Stage(list(model), remat=remat, deferral=Deferral(model)), inputs, kinds), expected)
    assert_same([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])


def block(width: int = 64) -> nn.Sequential:
    return nn.Sequential(*[pl.models.Block(width, 4) for _ in range(6)])


def gelus(width: int = 64) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(24) for layer in (nn.Linear(width, width), nn.GELU())])


def relus(width: int = 64) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(24) for layer in (nn.Linear(width, width), nn.ReLU())])


def linears(width: int = 64) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(24)])


STACKS = {"block": (block, True), "gelus": (gelus, True), "relus": (relus, False), "linears": (linears, False)}


@pytest.mark.parametrize("name", STACKS)
def test_deferred_holds_no_more_than_the_ordinary_backward(name: str) -> None:
    """Within 5 %: at the peak, and between I and W of what is there between F and B.

    The stacks are deep, for the work space of one layer is on top in either case, and where W is split off there is one
    more gradient in it.
    """
    make, defers = STACKS[name]
    torch.manual_seed(0)
    model = make()
    model.zero_grad()
    x = torch.randn(16, 64, 64)
    plain_stage, stage = Stage(list(copy.deepcopy(model))), Stage(list(model), deferral=Deferral(model))
    for microbatch in range(2):  # the gradients are there, and it is decided
        for each in (plain_stage, stage):
            output = each.forward(microbatch, Value(b"tensor", [x.clone()], [True])).tensors[0]
            each.backward(microbatch, [torch.ones_like(output)])
            del output
    assert stage.segments[0]._defers is defers
    with LiveBytes() as memory:
        gradient = torch.ones_like(plain_stage.forward(2, Value(b"tensor", [x.clone()], [True])).tensors[0])
        kept = memory.live
        memory.reset_peak()
        plain_stage.backward(2, [gradient])
        ordinary = memory.peak
        del gradient
    with LiveBytes() as memory:
        gradient = torch.ones_like(stage.forward(2, Value(b"tensor", [x.clone()], [True])).tensors[0])
        memory.reset_peak()
        stage.backward_input(2, [gradient])
        del gradient
        between = memory.live
        stage.backward_weight(2)
        assert between <= 1.05 * kept
        assert memory.peak <= 1.05 * ordinary
        assert memory.live == 0


def test_deferred_walks_once() -> None:
    """A layer in between is passed by I alone, where without deferral W passes it again."""
    passes = []

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            passes.append(g.shape)
            return g

    class Count(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(Counting.apply(x))

    model = nn.Sequential(nn.Linear(64, 64), Count(), nn.Linear(64, 64), Count())
    stage = Stage(list(model), deferral=Deferral(model))
    counts = []
    for microbatch in range(2):
        passes.clear()
        stage.forward(microbatch, Value(b"tensor", [torch.randn(512, 64)], [True]))
        stage.backward_input(microbatch, [torch.ones(512, 64)])
        stage.backward_weight(microbatch)
        counts.append(len(passes))
    assert counts == [4, 2]


@pytest.mark.parametrize("late", [False, True])
def test_deferred_leaves_hooks_of_weights_to_torch(late: bool) -> None:
    """A hook that doubles a gradient does so once; also one that comes when the forwards have chosen to defer.

    Of such a one nobody knew: it was called in I for other layers' weights, and for a Linear's not at all.
    """
    models = [gelus(), gelus()]
    models[1].load_state_dict(models[0].state_dict())
    stage = Stage(list(models[0]), deferral=Deferral(models[0]))
    inputs = list(torch.randn(3, 128, 64))
    for microbatch, x in enumerate(inputs):
        if microbatch == 0 and not late:
            models[0][0].weight.register_hook(lambda gradient: 2 * gradient)
        stage.forward(microbatch, Value(b"tensor", [x.clone()], [True]))
        if microbatch == 1 and late:
            models[0][0].weight.register_hook(lambda gradient: 2 * gradient)
        stage.backward_input(microbatch, [torch.ones(128, 64)])
        stage.backward_weight(microbatch)
        if microbatch == int(late):
            models[1][0].weight.register_hook(lambda gradient: 2 * gradient)
        models[1](x).backward(torch.ones(128, 64))
    assert torch.equal(models[0][0].weight.grad, models[1][0].weight.grad)
