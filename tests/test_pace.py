"""Emulated accelerators: their virtual clocks are the simulator's, exactly; real time is only ever late."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from schedule_sizes import FLUSHED
from torch import Tensor, nn

import pipelab as pl

# As in a notebook: the ranks get functions and classes by value and do not import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.timeout(60)
RanksOf = Callable[[int], pl.Ranks]

EVEN = pl.Costs(F=0.003, I=0.003, W=0.003)
UNEVEN = pl.Costs(F=(0.002, 0.004, 0.001), I=(0.003, 0.002, 0.005), W=(0.001, 0.002, 0.003), comm=0.0015)
LINK = pl.Costs(F=0.003, I=0.004, W=0.002, comm=pl.Link(latency_s=0.001, bytes_per_s=1e6), boundary_bytes=(5000, 2000))


def run(schedule: pl.Schedule, ranks: pl.Ranks, pace: pl.Costs, **options: Any) -> Any:
    model = pl.models.mlp((8, *[8] * 7, 4))
    with pl.Pipeline(model, schedule, loss_fn=F.cross_entropy, ranks=ranks, pace=pace, **options) as pipe:
        return pipe.step(torch.randn(24, 8), torch.randint(0, 4, (24,)))


def deadlines(trace: pl.Trace) -> dict[tuple[Any, bool], float]:
    """When each action had to end, counted from the first one's deadline."""
    ends = {(span.action, span.recompute): span.end - span.late for span in trace.spans}
    return {which: end - min(ends.values()) for which, end in ends.items()}


@pytest.mark.parametrize(
    ("name", "p", "costs"),
    [
        *[(name, 3, EVEN) for name in FLUSHED if name != "dualpipe_v"],
        *[(name, 3, UNEVEN) for name in ("naive", "gpipe", "one_f_one_b", "zb_h1", "zb_h2")],
        *[(name, 3, LINK) for name in ("gpipe", "one_f_one_b")],
    ],
)
def test_pace_deadlines_are_the_times_of_the_simulator(name: str, p: int, costs: pl.Costs, ranks_of: RanksOf) -> None:
    schedule = pl.SCHEDULES[name](p, 6)
    trace = run(schedule, ranks_of(p), costs).trace
    assert trace.source == "paced"
    assert [tuple(span.action for span in row) for row in trace.by_rank] == list(schedule.ranks)
    predicted = deadlines(pl.simulate(schedule, costs))
    assert deadlines(trace) == pytest.approx(predicted, abs=1e-7)


@pytest.mark.parametrize("remat", ["stage", "layer"])
def test_pace_recomputes_early_and_takes_time_for_it(remat: str, ranks_of: RanksOf) -> None:
    schedule = pl.one_f_one_b(2, 4)
    trace = run(schedule, ranks_of(2), pl.Costs(F=0.004, B=0.004, comm=0.002), remat=remat).trace
    predicted = pl.simulate(schedule, pl.Costs(F=0.004, B=0.004, comm=0.002), remat="early")
    assert sum(span.recompute for span in trace.spans) == 8
    assert deadlines(trace) == pytest.approx(deadlines(predicted), abs=1e-7)


def test_pace_never_ends_before_its_deadline(ranks_of: RanksOf) -> None:
    """Real time can be late, and the trace says by how much; it cannot be early."""
    schedule = pl.gpipe(2, 4)
    trace = run(schedule, ranks_of(2), EVEN).trace
    assert all(span.late >= 0 for span in trace.spans)
    assert trace.makespan >= pl.simulate(schedule, EVEN).makespan - 0.001


@pytest.mark.parametrize("clock", ["anchored", "plain"])
def test_pace_shows_a_slow_wire_as_waiting(clock: str, ranks_of: RanksOf) -> None:
    """The real message is there at once. A span that began with it would hide the wire in the action: no bubble."""
    costs = pl.Costs(F=0.003, B=0.004, comm=0.01)
    trace = run(pl.gpipe(2, 3), ranks_of(2), costs, clock=clock).trace
    times = {kind: stages[0] for kind, stages in costs.per_stage(2).items()}
    assert all(span.start >= span.end - span.late - times[span.action.kind] - 1e-6 for span in trace.spans)


@pytest.mark.parametrize("clock", ["anchored", "plain"])
def test_pace_shows_when_a_message_came_over_the_emulated_wire(clock: str, ranks_of: RanksOf) -> None:
    """A delay after it was sent, though the real message was there at once.

    So with anchored clocks the critical path is the predicted one. Plain clocks know only when a message was taken.
    """
    costs = pl.Costs(F=[0.02, 0.033], B=[0.041, 0.057], comm=0.025)
    schedule = pl.one_f_one_b(2, 4)
    trace = run(schedule, ranks_of(2), costs, clock=clock).trace
    start = {span.action: span.start for span in trace.spans}
    for message in trace.messages:
        assert message.sent < message.arrived <= start[message.reader]
        assert message.arrived - message.sent > 0.015  # 0.025, but for what the sender was late
    predicted = [span.action for span in pl.simulate(schedule, costs).critical_path()]
    assert clock == "plain" or [span.action for span in trace.critical_path()] == predicted


def test_pace_plain_clock_gives_every_action_its_time(ranks_of: RanksOf) -> None:
    """Nothing starts before it really can, and then takes its whole time."""
    result = run(pl.one_f_one_b(2, 4), ranks_of(2), EVEN, clock="plain")
    trace = result.trace
    times = {kind: stages[0] for kind, stages in EVEN.per_stage(2).items()}
    assert all(span.duration >= times[span.action.kind] - 1e-4 for span in trace.spans)
    came = {message.reader: message.arrived for message in trace.messages}
    assert all(span.start >= came.get(span.action, 0.0) for span in trace.spans)


class Slow(nn.Module):
    """Takes 40 ms of real time."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.04)
        return x


@pytest.mark.parametrize("clock", ["anchored", "plain"])
def test_pace_says_when_the_machine_is_too_busy(clock: str, ranks_of: RanksOf) -> None:
    """Real work of 40 ms in an action of 3 ms: anchored deadlines stay, plain ones move, and both runs say so."""
    schedule = pl.gpipe(2, 4)
    model = nn.Sequential(nn.Linear(8, 8), Slow(), nn.Linear(8, 4))
    with pl.Pipeline(
        model, schedule, loss_fn=F.cross_entropy, ranks=ranks_of(2), pace=EVEN, clock=clock, partition=[2, 1]
    ) as pipe:
        result = pipe.step(torch.randn(8, 8), torch.randint(0, 4, (8,)))
    assert result.too_busy
    assert "machine too busy: late by more than an action" in repr(result)
    on_time = deadlines(result.trace) == pytest.approx(deadlines(pl.simulate(schedule, EVEN)), abs=1e-7)
    assert on_time == (clock == "anchored")


def test_pace_is_content_with_a_machine_that_keeps_up(ranks_of: RanksOf) -> None:
    result = run(pl.gpipe(2, 2), ranks_of(2), pl.Costs(F=0.15, B=0.15))
    assert not result.too_busy
    assert "too busy" not in repr(result)
    assert result.trace.makespan == pytest.approx(0.9, rel=0.3)


def test_pace_changes_no_number(ranks_of: RanksOf) -> None:
    torch.manual_seed(0)
    model, x, y = pl.models.mlp((8, 16, 4)), torch.randn(12, 8), torch.randint(0, 4, (12,))
    gradients = []
    for pace in (None, EVEN):
        with pl.Pipeline(model, pl.zb_h1(2, 4), loss_fn=F.cross_entropy, ranks=ranks_of(2), pace=pace) as pipe:
            pipe.step(x, y)
            gradients.append(pipe.gradients())
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
