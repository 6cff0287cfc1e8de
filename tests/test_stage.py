"""A stage's F, B, I and W against torch's ordinary backward, to the bit, for many kinds of layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipelab.engine.live_bytes import LiveBytes
from pipelab.engine.message import Value, copied, unwrap, wrap
from pipelab.engine.stage import Stage
from pipelab.errors import EngineError

REMATS = ["none", "stage", "layer", 2]


class TwiceUsed(nn.Module):
    """One weight, used twice, once directly and once transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(x @ self.weight) @ self.weight.t() + self.inner(x))


class SplitAndJoin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x).chunk(2, dim=1)[0], self.right(x).chunk(2, dim=1)[1]
        return torch.cat([left * right, right], dim=1) + x


class WritesInPlace(nn.Module):
    """Works on its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2).add_(1)
        return x * self.scale


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class ToDict(nn.Module):
    """A value of several parts: learnt, whole numbers, a mask, nothing, and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"x": self.layer(x), "skip": x, "row": torch.arange(len(x)), "mask": x > 0, "none": None, "factor": 0.5}


class FromDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, value: dict[str, Any]) -> tuple[Tensor, Tensor]:
        assert value["none"] is None
        hidden = torch.where(value["mask"], self.layer(value["x"]), value["skip"]) * value["factor"]
        return hidden, value["row"]


class Last(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.unsqueeze(1))[0].squeeze(1)


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


def with_hook(layer: nn.Module) -> nn.Module:
    """Draws random numbers, although its type does not."""
    layer.register_forward_hook(lambda layer, args, output: nn.functional.dropout(output))
    return layer


def with_new_forward(layer: nn.Module) -> nn.Module:
    """The same, by a function in place of its method."""
    layer.forward = lambda x: nn.functional.dropout(x)
    return layer


def twice(layer: nn.Module) -> list[nn.Module]:
    return [layer, nn.Tanh(), layer]


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": lambda: [nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)],
    "norms": lambda: [nn.LayerNorm(6), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.GELU()],
    "convolution": lambda: [nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3, padding=1), nn.BatchNorm1d(2), nn.Flatten()],
    "one weight twice": lambda: [TwiceUsed(), nn.Tanh(), TwiceUsed()],
    "one layer twice": lambda: twice(nn.Linear(6, 6)),
    "split and join": lambda: [SplitAndJoin(), SplitAndJoin()],
    "in place": lambda: [nn.ReLU(inplace=True), nn.Linear(6, 6), nn.Hardtanh(inplace=True), WritesInPlace()],
    "in place first": lambda: [WritesInPlace(), nn.Linear(6, 6)],
    "views": lambda: [nn.Unflatten(1, (2, 3)), nn.Flatten(), nn.Linear(6, 6), nn.Unflatten(1, (3, 2))],
    "a view alone": lambda: [nn.Unflatten(1, (2, 3))],
    "frozen": lambda: [frozen(nn.Linear(6, 6)), nn.Linear(6, 6), frozen(nn.LayerNorm(6))],
    "all frozen": lambda: [frozen(nn.Linear(6, 6)), nn.Tanh()],
    "unused": lambda: [Unused(), nn.ReLU()],
    "no weights": lambda: [nn.ReLU(), nn.Softmax(dim=1)],
    "recurrent": lambda: [Last(6, 6), nn.Linear(6, 6)],
    "dict inside": lambda: [nn.Linear(6, 6), ToDict(), FromDict()],
    "dict out": lambda: [nn.Linear(6, 6), nn.Tanh(), ToDict()],
    "dropout in a hook": lambda: [nn.Linear(6, 6), nn.Dropout(0.5), with_hook(nn.Linear(6, 6)), nn.Tanh()],
    "dropout in a changed forward": lambda: [nn.Linear(6, 6), nn.Dropout(0.5), with_new_forward(nn.Linear(6, 6))],
    "dropout": lambda: [nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5)],
    "nothing": lambda: [nn.Identity()],
}


def made(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*LAYERS[name]())


def gradient_for(output: Any, microbatch: int) -> list[Tensor | None]:
    """A gradient for every tensor of `output` that wants one."""
    generator = torch.Generator().manual_seed(microbatch)
    return [torch.randn(t.shape, generator=generator) for t in wrap(output).tensors if t.requires_grad]


def plain(model: nn.Sequential, inputs: list[Tensor], *, wants: bool = True) -> list[Any]:
    """torch's own forward and backward of all micro-batches: the outputs, and the inputs' gradients."""
    results = []
    for microbatch, x in enumerate(inputs):
        leaf = x.clone().requires_grad_(wants)
        value: Any = leaf.clone()
        for number, layer in enumerate(model):
            torch.default_generator.manual_seed(1000 * number + microbatch)
            value = layer(value)
        roots = [tensor for tensor in wrap(value).tensors if tensor.requires_grad]
        torch.autograd.backward(roots, gradient_for(value, microbatch))
        results.append((unwrap(copied(wrap(value))), leaf.grad))
    return results


@pytest.fixture(autouse=True)
def seeds_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage's random numbers for (layer, micro-batch) are those that `plain` draws."""

    def seed(base: int, step: int, number: int, microbatch: int) -> None:
        torch.default_generator.manual_seed(1000 * number + microbatch)

    monkeypatch.setattr("pipelab.engine.segment.seed", seed)


def in_pipeline_order(stage: Stage, inputs: list[Tensor], kinds: str, *, wants: bool = True) -> list[Any]:
    """All forwards, then all B, or all I and then all W. In between, others draw random numbers."""
    outputs, gradients = [], []
    for microbatch, x in enumerate(inputs):
        value = Value(b"tensor", [x.clone()], [wants])
        made = stage.forward(microbatch, value)
        outputs.append((unwrap(made), made.wants_gradient))
        torch.rand(3)
    for microbatch, (output, wanted) in enumerate(outputs):
        pairs = zip(wrap(output).tensors, wanted, strict=True)
        given = gradient_for([t.detach().requires_grad_() for t, wants_it in pairs if wants_it], microbatch)
        backward = stage.backward if kinds == "B" else stage.backward_input
        gradients.append(next(iter(backward(microbatch, given)), None))
        torch.rand(3)
    for microbatch in range(len(inputs) if kinds == "IW" else 0):
        stage.backward_weight(microbatch)
    return [(output, gradient) for (output, _), gradient in zip(outputs, gradients, strict=True)]


def assert_same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, Tensor):
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("kinds", ["B", "IW"])
@pytest.mark.parametrize("name", LAYERS)
def test_stage_equals_the_ordinary_backward(name: str, kinds: str, remat: str | int) -> None:
    model, reference = made(name), made(name)
    inputs = list(torch.randn(3, 4, 6))
    expected = plain(reference, inputs)
    stage = Stage(list(model), remat=remat)
    assert_same(in_pipeline_order(stage, inputs, kinds), expected)
    # a layer in two pieces gets the gradients of its two uses one after the other, not their sum at once
    rounded = name == "one layer twice" and remat in ("layer", 2)
    for (parameter_name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), parameter_name
        if theirs.grad is not None:
            same = torch.allclose(mine.grad, theirs.grad) if rounded else torch.equal(mine.grad, theirs.grad)
            assert same, parameter_name
    for (buffer_name, mine), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(mine, theirs), buffer_name
    assert stage.empty


@pytest.mark.parametrize("kinds", ["B", "IW"])
def test_stage_wants_no_gradient_for_the_model_input(kinds: str) -> None:
    model, reference = made("linear"), made("linear")
    inputs = list(torch.randn(2, 4, 6))
    expected = [output for output, _ in plain(reference, inputs, wants=False)]
    results = in_pipeline_order(Stage(list(model)), inputs, kinds, wants=False)
    assert_same(results, [(output, None) for output in expected])
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


def test_stage_passes_by_what_got_no_gradient() -> None:
    """An output that the next stage does not use comes back without a gradient."""
    model = nn.Sequential(ToDict())
    stage = Stage(list(model))
    x = torch.randn(4, 6)
    stage.forward(0, Value(b"tensor", [x.clone()], [True]))
    assert stage.backward(0, [None, None]) == [None]
    assert model[0].layer.weight.grad is None
    stage.forward(1, Value(b"tensor", [x.clone()], [True]))
    (gradient,) = stage.backward(1, [None, torch.ones(4, 6)])  # through the skip connection alone
    assert torch.equal(gradient, torch.ones(4, 6))
    assert model[0].layer.weight.grad is None


def test_stage_splits_the_work_of_i_and_w() -> None:
    """I touches no weight, W gives each its gradient."""
    model = made("linear")
    stage = Stage(list(model))
    stage.forward(0, Value(b"tensor", [torch.randn(4, 6)], [True]))
    (gradient,) = stage.backward_input(0, [torch.ones(4, 6)])
    assert gradient is not None
    assert all(parameter.grad is None for parameter in model.parameters())
    stage.backward_weight(0)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("remat", ["stage", "layer", 2])
def test_stage_recomputation_counts_statistics_once(remat: str | int) -> None:
    model, reference = (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    stage = Stage(list(model), remat=remat)
    inputs = list(torch.randn(5, 4, 6))
    in_pipeline_order(stage, inputs, "B")
    for x in inputs:
        reference(x)
    assert model[1].num_batches_tracked == 5
    assert torch.equal(model[1].running_mean, reference[1].running_mean)
    assert torch.equal(model[1].running_var, reference[1].running_var)


class Remembers(nn.Module):
    """Puts a new tensor in a buffer's place at every forward, and one where there was none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("first", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        scale = 2 if self.first is None else 1
        self.first = torch.ones((), dtype=torch.int64)
        return self.layer(x) * self.mean * scale


MOVING: dict[str, Callable[[], nn.Module]] = {
    "written": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "replaced": Remembers,
}


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("name", MOVING)
def test_stage_recomputation_sees_the_buffers_of_the_first_time(name: str, remat: str | int) -> None:
    """Spectral norm moves a buffer at every forward and divides by what it finds there."""
    torch.manual_seed(0)
    model = nn.Sequential(MOVING[name](), nn.ReLU())
    reference = copy.deepcopy(model)
    inputs = list(torch.randn(4, 4, 6))
    expected = plain(reference, inputs)
    assert_same(in_pipeline_order(Stage(list(model), remat=remat), inputs, "B"), expected)
    assert_same(model.state_dict(), reference.state_dict())
    assert_same([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])


def test_stage_recomputation_refuses_gradients_inside_a_forward() -> None:
    class Energy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)[0]

    def step(remat: str) -> Tensor | None:
        stage = Stage([nn.Linear(6, 6), Energy()], remat=remat)
        stage.forward(0, Value(b"tensor", [torch.ones(4, 6)], [True]))
        return stage.backward(0, [torch.ones(4, 6)])[0]

    assert step("none") is not None
    with pytest.raises(EngineError, match=r"gradients in its forward, which under rematerialization.*remat='none'"):
        step("stage")


@pytest.mark.parametrize(
    ("remat", "in_forward", "between", "in_backward"),
    [("none", 9, 8, 10), ("stage", 4, 1, 10), ("layer", 10, 8, 10), (4, 5, 2, 7)],
    ids=["none", "stage", "layer", "4"],
)
def test_stage_keeps_no_more_than_its_remat_says(
    remat: str | int, in_forward: int, between: int, in_backward: int
) -> None:
    """In units of one layer's input. From F to B: all eight, the first, every one, the first of every four.

    At most so many during F, which leaves nothing for a backward where it will run again, and during B.
    """
    unit = 4 * 1000 * 100
    model = nn.Sequential(*[nn.Linear(100, 100) for _ in range(8)])
    stage = Stage(list(model), remat=remat)
    with LiveBytes() as memory:
        stage.forward(0, Value(b"tensor", [torch.randn(1000, 100)], [True]))
        assert memory.peak / unit < in_forward + 0.5
        assert memory.live / unit == pytest.approx(between, abs=0.1)
        memory.reset_peak()
        stage.backward(0, [torch.ones(1000, 100)])
    assert memory.peak / unit < in_backward + 0.5


def test_stage_lets_go_of_an_output_once_it_is_sent() -> None:
    """Backward starts from edges of the graph, so the output itself need not stay."""
    stage = Stage([nn.Linear(100, 100)])
    x = torch.randn(1000, 100)
    with LiveBytes() as memory:
        output = stage.forward(0, Value(b"tensor", [x], [True]))
        assert memory.live >= 400_000
        del output
        assert memory.live < 1000
        stage.backward(0, [torch.ones(1000, 100)])


def test_stage_frees_everything_after_its_backward() -> None:
    model = made("norms")
    for kinds in ("B", "IW"):
        for remat in REMATS:
            model.zero_grad()
            stage = Stage(list(model), remat=remat)
            with LiveBytes() as memory:
                in_pipeline_order(stage, list(torch.randn(3, 4, 6)), kinds)
                model.zero_grad()
                assert memory.live == 0
