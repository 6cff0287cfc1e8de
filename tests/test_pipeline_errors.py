"""What a pipeline refuses before any rank does anything, and how it comes back from what fails on a rank."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pipelab as pl
from pipelab.errors import CostError, EngineError, PartitionError, RankError, ScheduleError, SizeError

# As in a notebook: the ranks get functions and classes by value and do not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(60)
RanksOf = Callable[[int], pl.Ranks]


def mlp() -> nn.Sequential:
    return pl.models.mlp((8, 16, 16, 4))


def batch(size: int = 12) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 8), torch.randint(0, 4, (size,))


class Custom(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class OwnForward(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def own_parameter() -> nn.Sequential:
    model = mlp()
    model.scale = nn.Parameter(torch.ones(1))
    return model


def hooked() -> nn.Sequential:
    model = mlp()
    model.register_forward_hook(lambda *_: None)
    return model


def one_norm() -> nn.Sequential:
    norm = nn.BatchNorm1d(8)
    return nn.Sequential(norm, norm)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "more stages than layers": (
        {"model": nn.Sequential(nn.Linear(8, 4))},
        PartitionError,
        r"has 2 stages, but the model only 1 layers.*at most 1 stages",
    ),
    "no sequence": ({"model": Custom()}, EngineError, r"must be an nn.Sequential.*found a Custom"),
    "a forward of its own": (
        {"model": OwnForward(nn.Linear(8, 4), nn.ReLU())},
        EngineError,
        "OwnForward has a forward",
    ),
    "a parameter of its own": ({"model": own_parameter()}, EngineError, "has scale of its own, outside all layers"),
    "a buffer on two ranks": (
        {"model": one_norm()},
        EngineError,
        "0.running_mean on rank 0 and 1.running_mean on rank 1 are one",
    ),
    "a GPU model": (
        {"model": mlp().to("meta")},
        EngineError,
        "0.weight is on meta; give the pipeline the model on the CPU",
    ),
    "hooks of the whole model": ({"model": hooked()}, EngineError, "the model has hooks of its own"),
    "no shape yet": ({"model": nn.Sequential(nn.LazyLinear(4), nn.ReLU())}, EngineError, "0.weight has no shape"),
    "a loss with parameters": (
        {"loss_fn": nn.Linear(4, 1)},
        EngineError,
        "loss_fn has parameters.*into the last layer",
    ),
    "no schedule": ({"schedule": "gpipe"}, EngineError, r"must be a Schedule, as gpipe\(4, 8\) makes one, got 'gpipe'"),
    "other ranks": ({"schedule": pl.gpipe(3, 4)}, SizeError, r"is for 3 ranks, but there are 2: take Ranks\(3\)"),
    "no ranks": ({"ranks": 2}, EngineError, r"ranks must be Ranks, as in Ranks\(2\), got 2"),
    "a schedule that cannot run": (
        {"schedule": pl.Schedule.from_text("0F0 0B0\n1B0 1F0")},
        ScheduleError,
        "1B0 comes before 1F0",
    ),
    "updates in the schedule": (
        {"schedule": pl.pipedream(2, 4)},
        EngineError,
        r"'pipedream' has weight updates(.|\n)*there is no optimizer to make them",
    ),
    "a loss that is no function": ({"loss_fn": "mse"}, EngineError, "loss_fn must be a function of output and target"),
    "an optimizer for other parameters": (
        {"optimizer": torch.optim.SGD([nn.Parameter(torch.ones(1))])},
        EngineError,
        "optimizer must be a function that makes one.*got a SGD",
    ),
    "an optimizer that is not returned": (
        {"optimizer": lambda parameters: None},
        EngineError,
        "optimizer must be a function that returns one, with a step; it returned None",
    ),
    "an optimizer that asks for the loss": (
        {"optimizer": lambda parameters: torch.optim.LBFGS(parameters)},
        EngineError,
        "the optimizer's step wants a function.*as that of LBFGS does.*one gradient a step",
    ),
    "a scheduler that is not returned": (
        {
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            "scheduler": lambda optimizer: None,
        },
        EngineError,
        "scheduler must be a function that returns one, with a step; it returned None",
    ),
    "an unknown remat": ({"remat": "block"}, EngineError, r"remat must be 'none', 'stage', 'layer' or a.*got 'block'"),
    "remat of no layer": ({"remat": 0}, EngineError, "remat must be .* from 1 on, got 0"),
    "remat as a switch": ({"remat": True}, EngineError, "remat must be .*, got True"),
    "a pace that is no costs": ({"pace": 0.01}, EngineError, r"pace must be Costs in seconds.*got 0.01"),
    "a pace for three stages": (
        {"pace": pl.Costs(F=[1, 2, 3])},
        CostError,
        "F has 3 entries, but there are 2 stages",
    ),
    "an unknown clock": ({"clock": "fast"}, EngineError, "clock must be 'anchored' or 'plain', got 'fast'"),
    "an unknown batchnorm": (
        {"batchnorm": "batch"},
        EngineError,
        "batchnorm must be 'microbatch' or 'minibatch', got 'batch'",
    ),
    "an unknown precision": ({"precision": "int8"}, EngineError, "must be 'fp32' or 'bf16' or 'fp16', got 'int8'"),
    "an unknown policy": ({"nan": "skip"}, EngineError, "nan must be 'raise' or 'ignore', got 'skip'"),
    "a scheduler without an optimizer": (
        {"scheduler": lambda optimizer: None},
        EngineError,
        "scheduler must be a function.*and needs an optimizer; got a function and no optimizer",
    ),
    "a scheduler that watches a number": (
        {
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            "scheduler": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        },
        EngineError,
        "step wants a number to watch, as that of ReduceLROnPlateau does.*take one that counts steps",
    ),
    "a norm of nothing": ({"max_norm": 0.0}, EngineError, r"max_norm must be a positive number, or None.*got 0.0"),
    "a norm that is no number": (
        {"max_norm": float("nan")},
        EngineError,
        "max_norm must be a positive number.*got nan",
    ),
    "a partition of other stages": ({"partition": [1, 1, 3]}, PartitionError, "has 3 stages, but the schedule has 2"),
    "a partition of other layers": ({"partition": [1, 2]}, PartitionError, r"add up to 3 layers, but there are 5"),
    "a partition with a gap": (
        {"partition": [slice(0, 2), slice(3, 5)]},
        PartitionError,
        "gives stage 1 layers 3:5; expected it to begin with layer 2",
    ),
    "a partition with an empty stage": (
        {"partition": [slice(0, 0), slice(0, 5)]},
        PartitionError,
        "stage 0 layers 0:0",
    ),
    "a partition that ends early": (
        {"partition": [slice(0, 2), slice(2, 4)]},
        PartitionError,
        "ends before layer 4, but the model has 5 layers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_pipeline_refuses_before_the_ranks_do_anything(
    case: str, ranks_of: RanksOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, error, message = REFUSED[case]
    ranks = ranks_of(2)
    monkeypatch.setattr(ranks, "run_each", lambda *_: pytest.fail("something was sent to the ranks"))
    arguments = {"model": mlp(), "schedule": pl.gpipe(2, 4), "loss_fn": F.cross_entropy, "ranks": ranks, **changes}
    with pytest.raises(error, match=message):
        pl.Pipeline(**arguments)


BATCHES: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "lengths differ": (torch.ones(12, 8), torch.ones(11), SizeError, "inputs have 12 rows, targets have 11"),
    "empty": (torch.ones(0, 8), torch.ones(0), SizeError, "the batch is empty: inputs have 0 rows"),
    "too small": (torch.ones(3, 8), torch.ones(3), SizeError, "3 samples cannot fill 4 micro-batches: .*at most 3"),
    "no tensor": ([1.0, 2.0], torch.ones(2), EngineError, "inputs hold no tensor with a row a sample"),
    "targets no tensor": (torch.ones(12, 8), [0] * 12, EngineError, "targets hold no tensor with a row a sample"),
    "one number": (torch.tensor(1.0), torch.ones(1), EngineError, "inputs hold no tensor with a row a sample"),
    "parts differ": ((torch.ones(12, 8), torch.ones(6)), torch.ones(12), SizeError, "of inputs have 6 and 12 rows"),
}


@pytest.mark.parametrize("case", BATCHES)
def test_pipeline_refuses_a_batch_before_the_ranks_see_it(case: str, ranks_of: RanksOf) -> None:
    inputs, targets, error, message = BATCHES[case]
    with pl.Pipeline(mlp(), pl.gpipe(2, 4), loss_fn=F.cross_entropy, ranks=ranks_of(2)) as pipe:
        with pytest.raises(error, match=message):
            pipe.step(inputs, targets)
        if case != "too small":
            with pytest.raises(error, match=message):
                pipe.evaluate(inputs, targets)
        pipe.step(*batch())  # and goes on


def test_pipeline_refuses_a_state_of_another_model(ranks_of: RanksOf) -> None:
    with pl.Pipeline(mlp(), pl.gpipe(2, 4), loss_fn=F.cross_entropy, ranks=ranks_of(2)) as pipe:
        before = pipe.state_dict()
        state = {**before, "0.weight": torch.ones(2, 2), "9.weight": torch.ones(1)}
        del state["2.bias"]
        with pytest.raises(
            EngineError, match=r"nothing was loaded:\n  2.bias is missing\n  9.weight is not in the model"
        ):
            pipe.load_state_dict(state)
        with pytest.raises(EngineError, match=r"0.weight is \(2, 2\), in the model \(16, 8\)"):
            pipe.load_state_dict(state)
        for value, kind in ([[1.0]], "list"), (before["0.weight"].numpy(), "ndarray"), (None, "NoneType"):
            with pytest.raises(EngineError, match=rf"0.weight is a {kind}, in the model \(16, 8\)"):
                pipe.load_state_dict({**before, "0.weight": value})
        with pytest.raises(EngineError, match="it is a list, and not a dict of tensors by name"):
            pipe.load_state_dict(list(before.items()))  # type: ignore[arg-type]
        assert all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items())


# ---- what only shows on a rank

WRONG_LOSSES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a tensor of several numbers": (
        lambda output, target: F.cross_entropy(output, target, reduction="none"),
        r"must return a tensor with one number.*returned a torch.float32 tensor of shape \(3,\)",
    ),
    "a float": (lambda output, target: F.cross_entropy(output, target).item(), r"it returned <class 'float'>"),
    "whole numbers": (lambda output, target: target.sum(), r"it returned a torch.int64 tensor of shape \(\)"),
    "something besides": (
        lambda output, target: (F.cross_entropy(output, target), {"accuracy": 0.5}),
        "it returned a tensor and a dict, which is no count",
    ),
    "nothing to learn": (
        lambda output, target: output.detach().sum(),
        "does not depend on any parameter that requires a grad",
    ),
    "a count of nothing": (lambda output, target: (output.sum(), 0), "the counts of the batch add up to 0"),
}


@pytest.mark.parametrize("case", WRONG_LOSSES)
def test_pipeline_refuses_a_loss_that_is_none(case: str, ranks_of: RanksOf) -> None:
    loss_fn, message = WRONG_LOSSES[case]
    pipe = pl.Pipeline(mlp(), pl.gpipe(2, 4), loss_fn=loss_fn, ranks=ranks_of(2))
    with pytest.raises(EngineError, match=message) as caught:
        pipe.step(*batch())
    assert "rank 1" in str(caught.value)


def test_pipeline_refuses_a_loss_of_two_kinds(ranks_of: RanksOf) -> None:
    def moody(output: Tensor, target: Tensor) -> Any:
        return (output.sum(), 1) if target[0] == 0 else output.mean()

    x = torch.randn(4, 8)
    pipe = pl.Pipeline(mlp(), pl.gpipe(2, 2), loss_fn=moody, ranks=ranks_of(2))
    with pytest.raises(EngineError, match=r"returned \(sum, count\) for one micro-batch and a mean for another"):
        pipe.step(x, torch.tensor([0, 0, 1, 1]))
    for first, second, message in [(0, 1, "and now a mean"), (1, 0, r"and now \(sum, count\)")]:
        pipe = pl.Pipeline(mlp(), pl.gpipe(2, 2), loss_fn=moody, ranks=ranks_of(2))
        pipe.step(x, torch.full((4,), first))
        with pytest.raises(EngineError, match=message):
            pipe.step(x, torch.full((4,), second))


class Faulty(nn.Module):
    """Goes wrong in the third forward, or in the second backward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.how = how
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            if self.how == "raise":
                raise ValueError("planted fault")
            if self.how == "exit":
                os._exit(7)
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hang":
                time.sleep(100)
        x = self.layer(x)
        if self.calls == 2 and self.how == "backward":
            x.register_hook(self.fail)
        return x

    def fail(self, gradient: Tensor) -> None:
        raise ValueError("planted fault")


def faulty(how: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), Faulty(how), nn.Linear(16, 4))


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", r"rank 1 raised ValueError in 1F2: planted fault"),
        ("backward", r"rank 1 raised ValueError in 1[BI]1: planted fault"),
        ("exit", r"rank 1 died in 1F2 \(exit code 7\)"),
        ("kill", r"rank 1 was killed in 1F2 \(SIGKILL"),
    ],
)
def test_pipeline_reports_the_rank_and_action_that_failed(name: str, how: str, message: str, ranks_of: RanksOf) -> None:
    ranks = ranks_of(3)
    pipe = pl.Pipeline(faulty(how), pl.SCHEDULES[name](3, 6), loss_fn=F.cross_entropy, ranks=ranks)
    began = time.monotonic()
    with pytest.raises(RankError, match=message) as caught:
        pipe.step(*batch())
    assert time.monotonic() - began < 10  # 2 s on a quiet machine
    assert caught.value.rank == 1
    if how in ("raise", "backward"):
        assert caught.value.exception_type == "ValueError"
        assert 'raise ValueError("planted fault")' in caught.value.remote_traceback
    for call in (lambda: pipe.step(*batch()), pipe.state_dict, lambda: pipe.predict(batch()[0])):
        with pytest.raises(EngineError, match=r"pipeline is over, because its step failed \(rank 1 .*Build it again"):
            call()
    pipe.close()  # nothing more to do, and no complaint
    with pl.Pipeline(faulty("not"), pl.SCHEDULES[name](3, 6), loss_fn=F.cross_entropy, ranks=ranks) as pipe:
        pipe.step(*batch())


def test_pipeline_reports_an_optimizer_that_fails(ranks_of: RanksOf) -> None:
    class Broken(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            raise ArithmeticError("no update today")

    pipe = pl.Pipeline(
        mlp(), pl.gpipe(2, 4), loss_fn=F.cross_entropy, optimizer=lambda p: Broken(p, lr=1), ranks=ranks_of(2)
    )
    with pytest.raises(RankError, match=r"rank \d raised ArithmeticError in the update: no update today"):
        pipe.step(*batch())


def test_pipeline_lets_a_rank_make_an_optimizer_that_cannot_be_tried_out(ranks_of: RanksOf) -> None:
    """It wants the model's own parameters: it fails on a rank or not at all."""

    def second(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameters[1]], lr=0.1)

    arguments: dict[str, Any] = {"loss_fn": F.cross_entropy, "ranks": ranks_of(2), "optimizer": second}
    with pl.Pipeline(mlp(), pl.gpipe(2, 4), **arguments) as pipe:
        before = pipe.state_dict()
        pipe.step(*batch())
        changed = [name for name, value in pipe.state_dict().items() if not torch.equal(value, before[name])]
        assert changed == ["0.bias", "2.bias"]
    with pytest.raises(RankError, match=r"rank 0 raised IndexError"):
        pl.Pipeline(nn.Sequential(nn.ReLU(), nn.PReLU(), nn.Linear(8, 4)), pl.gpipe(2, 4), **arguments)


def test_pipeline_reports_a_rank_that_hangs(ranks_of: RanksOf) -> None:
    """At the limit that the ranks have, with the stack of the one that hangs."""
    ranks = ranks_of(3)
    pipe = pl.Pipeline(faulty("hang"), pl.gpipe(3, 6), loss_fn=F.cross_entropy, ranks=ranks)
    usual, ranks.timeout = ranks.timeout, 2.0
    try:
        with pytest.raises(RankError, match=r"gave no answer within 2 s.*(?s:.*)in 1F2"):
            pipe.step(*batch())
    finally:
        ranks.timeout = usual


def test_pipeline_notices_that_its_ranks_started_again(ranks_of: RanksOf) -> None:
    ranks = ranks_of(2)
    pipe = pl.Pipeline(mlp(), pl.gpipe(2, 4), loss_fn=F.cross_entropy, ranks=ranks)
    ranks.restart()
    with pytest.raises(EngineError, match="over, because its ranks ended or were started again"):
        pipe.step(*batch())
    pipe.close()


class Locked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_pipeline_names_the_function_or_layer_that_cannot_be_sent(ranks_of: RanksOf) -> None:
    lock = threading.Lock()

    def locked(first: Any, target: Any = None) -> Any:
        with lock:
            return torch.optim.SGD(first, lr=1.0)

    arguments: dict[str, Any] = {"loss_fn": F.cross_entropy, "ranks": ranks_of(2)}
    for name in ("loss_fn", "optimizer"):
        with pytest.raises(EngineError, match=rf"{name}: .*locked cannot be sent.* variable 'lock' that it uses"):
            pl.Pipeline(mlp(), pl.gpipe(2, 4), **{**arguments, name: locked})
    with pytest.raises(EngineError, match=r"layer 1: Locked cannot be sent to the ranks.*lock"):
        pl.Pipeline(nn.Sequential(nn.Linear(8, 4), Locked()), pl.gpipe(2, 4), **arguments)


def test_pipeline_survives_an_argument_that_cannot_be_sent(ranks_of: RanksOf) -> None:
    """Nothing has reached the ranks then, so there is no reason to begin again."""
    with pl.Pipeline(mlp(), pl.gpipe(2, 4), loss_fn=F.cross_entropy, ranks=ranks_of(2)) as pipe:
        with pytest.raises(EngineError, match="cannot travel between stages"):
            pipe.step((torch.ones(12, 8), (i for i in range(3))), batch()[1])
        pipe.step(*batch())
