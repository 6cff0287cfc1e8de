"""A hundred short runs, each with one fault: what goes wrong, where and when is drawn from the run's number.

None may hang, none may leave a process or a wrong parameter behind; the error says which rank did what to which
micro-batch; and training that goes on from the last checkpoint ends with the parameters of a run that nothing stopped.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_training import same_to_the_bit, weight_order
from schedule_sizes import FLUSHED
from torch import Tensor, nn

import pipelab as pl

# As in a notebook: the ranks get functions and classes by value and do not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(60)

STEPS, LIMIT_S = 4, 2.0
KINDS = ("forward", "backward", "weight", "update", "kill", "nan", "hang", "memory", "disk")
RUNS = FLUSHED


@dataclass(frozen=True)
class Fault:
    """What goes wrong in `step` on the rank of `stage`: with a micro-batch, or with the stage's `microbatch`-th W."""

    kind: str
    schedule: str
    num_ranks: int
    stage: int
    microbatch: int
    saved_after: int  # the step after which the checkpoint was written
    step: int
    moment: float  # of a kill from outside: seconds after the step's begin

    @classmethod
    def draw(cls, run: int) -> Fault:
        """The fault of a run, always the same."""
        dice = random.Random(run)
        schedule, p = dice.choice(RUNS), dice.choice([2, 3])
        saved_after = dice.randrange(STEPS - 1)
        return cls(
            kind=KINDS[run % len(KINDS)],
            schedule=schedule,
            num_ranks=p,
            stage=dice.randrange(pl.SCHEDULES[schedule](p, 2 * p).num_stages),
            microbatch=dice.randrange(2 * p),
            saved_after=saved_after,
            step=dice.randrange(saved_after + 1, STEPS),
            moment=dice.uniform(0.0, 0.05),
        )

    @property
    def plan(self) -> pl.Schedule:
        return pl.SCHEDULES[self.schedule](self.num_ranks, 2 * self.num_ranks)

    @property
    def rank(self) -> int:
        return self.plan.placement[self.stage]

    @property
    def message(self) -> str:
        """What the error has to say, as a pattern."""
        rank, stage, k = self.rank, self.stage, self.microbatch
        last = self.plan.placement[-1]
        return {
            "forward": f"rank {rank} raised ValueError in {stage}F{k}: planted",
            "backward": f"rank {rank} raised ValueError in {stage}[BIW]{k}: planted",
            "weight": f"rank {rank} raised ValueError in {stage}[BW]{weight_order(self.plan, stage)[k]}: planted",
            "update": f"rank {rank} raised ValueError in the update: planted",
            "kill": f"rank {rank} was killed.*SIGKILL|its ranks ended",  # the second: between two steps
            "nan": f"in step {self.step}, counted from 0, the loss is nan .on rank {last}.",
            "hang": f"gave no answer within {LIMIT_S:g} s(?s:.*)rank {rank}, in {stage}F{k}:",
            "memory": f"rank {rank} raised RuntimeError in {stage}F{k}: .*memory",
            "disk": "no checkpoint was written to .*, which is as it was.*No space left",
        }[self.kind]


class Layer(nn.Module):
    """A Linear layer with a Tanh; that of the fault's stage does what the fault says."""

    def __init__(self, fault: Fault | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.fault = fault
        self.forwards = self.weight_gradients = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrived on its rank: hooks of a parameter do not travel."""
        super().__setstate__(state)
        if self.fault and self.fault.kind == "weight":
            self.linear.weight.register_hook(self.count)

    def forward(self, x: Tensor) -> Tensor:
        fault, number = self.fault, self.forwards
        self.forwards += 1
        output = torch.tanh(self.linear(x))
        if fault is None:
            return output
        if number == fault.step * 2 * fault.num_ranks + fault.microbatch:
            if fault.kind == "forward":
                raise ValueError("planted")
            if fault.kind == "backward":
                output.register_hook(fail)
            if fault.kind == "hang":
                time.sleep(1000)
            if fault.kind == "memory":
                torch.empty(2**60)
        return output

    def count(self, gradient: Tensor) -> None:
        assert self.fault
        if self.weight_gradients == self.fault.step * 2 * self.fault.num_ranks + self.fault.microbatch:
            raise ValueError("planted")
        self.weight_gradients += 1


def fail(*_: Tensor) -> None:
    raise ValueError("planted")


def model(plan: pl.Schedule, fault: Fault | None = None) -> nn.Sequential:
    torch.manual_seed(7)
    stages = range(plan.num_stages)
    return nn.Sequential(*[Layer(fault if fault and fault.stage == stage else None) for stage in stages])


def optimizer(fault: Fault | None = None) -> Callable[[Any], torch.optim.Optimizer]:
    def make(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        if fault and fault.kind == "update" and dist.get_rank() == fault.rank:
            usual, numbers = made.step, itertools.count()
            made.step = lambda: usual() if next(numbers) < fault.step else fail()  # type: ignore[method-assign]
        return made

    return make


def batch(step: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    return torch.randn(13, 8, generator=source), torch.randn(13, 8, generator=source)


@pytest.fixture(scope="module")
def ranks_for() -> Iterator[Callable[[int], pl.Ranks]]:
    """Ranks of our own, since most runs end them."""
    get = cache(pl.Ranks)
    started = {}
    yield lambda count: started.setdefault(count, get(count))
    for ranks in started.values():
        ranks.close()


@pytest.fixture(scope="module")
def never_stopped(ranks_for: Callable[[int], pl.Ranks]) -> Callable[[str, int], dict[str, Tensor]]:
    """The parameters at the end of a run without any fault."""

    @cache
    def run(name: str, p: int) -> dict[str, Tensor]:
        plan = pl.SCHEDULES[name](p, 2 * p)
        with pl.Pipeline(model(plan), plan, loss_fn=F.mse_loss, optimizer=optimizer(), ranks=ranks_for(p)) as pipe:
            for step in range(STEPS):
                pipe.step(*batch(step))
            return pipe.state_dict()

    return run


def go_wrong(pipe: pl.Pipeline, fault: Fault, pids: list[int], path: Path, patch: pytest.MonkeyPatch) -> None:
    """Do the step with the fault; raises what comes of it."""
    inputs, targets = batch(fault.step)
    if fault.kind == "nan":
        inputs[torch.tensor_split(torch.arange(13), 2 * fault.num_ranks)[fault.microbatch][0], 3] = float("nan")
    if fault.kind == "disk":
        with patch.context() as patched:
            patched.setattr(os, "fsync", no_space)
            pipe.save(path)
    if fault.kind == "kill":
        threading.Timer(fault.moment, os.kill, (pids[fault.rank], signal.SIGKILL)).start()
        while True:
            pipe.step(inputs, targets)
    pipe.step(inputs, targets)


def no_space(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def left(pids: list[int]) -> list[int]:
    """Those of the processes that are still there, at the latest after two seconds."""
    deadline = time.monotonic() + 2
    while (there := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return there


def check(run: int, ranks_for: Any, never_stopped: Any, path: Path, patch: pytest.MonkeyPatch) -> float:
    """One run; how long the report of its fault took, in seconds."""
    fault = Fault.draw(run)
    plan, ranks = fault.plan, ranks_for(fault.num_ranks)
    pids = ranks.run(os.getpid)
    pipe = pl.Pipeline(model(plan, fault), plan, loss_fn=F.mse_loss, optimizer=optimizer(fault), ranks=ranks)
    for step in range(fault.step):
        pipe.step(*batch(step))
        if step == fault.saved_after:
            pipe.save(path)
    saved, before = path.read_bytes(), pipe.state_dict()
    ranks.timeout = LIMIT_S if fault.kind == "hang" else 30.0
    began = time.monotonic()
    with pytest.raises(pl.PipelabError) as caught:
        go_wrong(pipe, fault, pids, path, patch)
    took = time.monotonic() - began - (LIMIT_S if fault.kind == "hang" else 0.0)
    ranks.timeout = 30.0
    assert re.search(fault.message, str(caught.value)), (fault, str(caught.value))
    assert path.read_bytes() == saved
    if fault.kind in ("nan", "disk"):  # the ranks are as they were, and go on
        assert same_to_the_bit(pipe.state_dict(), before)
        assert ranks.run(os.getpid) == pids
    else:
        with pytest.raises(pl.EngineError, match=r"this pipeline is over.*Pipeline\.load"):
            pipe.step(*batch(0))
    pipe.close()
    resumed = pl.Pipeline.load(path, model(plan), plan, loss_fn=F.mse_loss, optimizer=optimizer(), ranks=ranks)
    with resumed as pipe:
        for step in range(fault.saved_after + 1, STEPS):
            pipe.step(*batch(step))
        assert same_to_the_bit(pipe.state_dict(), never_stopped(fault.schedule, fault.num_ranks))
    assert fault.kind in ("nan", "disk") or left(pids) == []
    return took


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize("run", [pytest.param(n, marks=pytest.mark.exhaustive if n >= 9 else ()) for n in range(100)])
def test_faults_end_a_run_with_their_own_error_and_training_goes_on(
    run: int,
    ranks_for: Any,
    never_stopped: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    took = check(run, ranks_for, never_stopped, tmp_path / "model.pt", monkeypatch)
    assert took < 10  # 2 s on a quiet machine
