"""Costs: what is accepted, what is refused, and how whole-rank costs are divided."""

import math

import numpy as np
import pytest

from pipelab import CostError, Costs, Kind, Link, Schedule, ScheduleError, gpipe, search, simulate
from pipelab.costs import Wire


def test_defaults_are_unit_times_without_delay():
    costs = Costs()
    assert (costs.F, costs.I, costs.W, costs.B, costs.comm) == (1.0, 1.0, 1.0, 2.0, 0.0)


def test_b_is_split_evenly():
    costs = Costs(F=1, B=3)
    assert (costs.I, costs.W, costs.B) == (1.5, 1.5, 3.0)
    assert Costs(F=1, B=[2, 4]).W == (1.0, 2.0)


def test_b_beside_i_or_w_is_refused():
    with pytest.raises(CostError, match="give B, or I and W, not both"):
        Costs(F=1, B=2, W=1)


def test_per_stage_adds_number_and_sequence():
    costs = Costs(F=[1, 2], I=3, W=[4, 5])
    assert costs.per_stage(2)[Kind.B] == (7.0, 8.0)
    assert costs.B == (7.0, 8.0)


def test_arrays_are_sequences():
    assert Costs(F=np.array([1, 2])).F == (1.0, 2.0)
    assert Costs(F=np.float32(2)).F == 2.0


@pytest.mark.parametrize("bad", [-1, math.nan, math.inf, 10**400, "3", b"1", None, True, [1, -2], [[1], [2]], []])
def test_times_that_are_none(bad):
    with pytest.raises(CostError, match=r"F(\[\d\])? (must be|is an empty sequence)"):
        Costs(F=bad)


@pytest.mark.parametrize("bad", [-1, math.nan, "fast", [1, 2]])
def test_delays_that_are_none(bad):
    with pytest.raises(CostError, match="comm must be"):
        Costs(comm=bad)


def test_link_refuses():
    with pytest.raises(CostError, match="latency_s must be finite and not negative"):
        Link(-1, 1e9)
    with pytest.raises(CostError, match="bytes_per_s must be positive"):
        Link(0, 0)
    with pytest.raises(CostError, match="bytes_per_s must be a number, got '3'"):
        Link(0, "3")


def test_link_takes_its_latency_and_then_a_time_for_every_byte():
    assert Link(0.5, 10).seconds(20) == 2.5
    assert Link(0.5, math.inf).seconds(20) == 0.5


@pytest.mark.parametrize("bad", [2.0, {"F": 1}, Link(0, 1)])
def test_costs_are_asked_for_by_name(bad):
    for ask in (lambda: simulate(gpipe(2, 2), bad), lambda: search(2, 2, bad, memory_limit=2)):
        with pytest.raises(CostError, match=r"costs must be Costs, as in Costs\(F=1, B=2\), got"):
            ask()


def test_costs_of_a_trace_are_asked_of_a_trace():
    with pytest.raises(CostError, match=r"the times of a Trace, and Schedule has none: give simulate\(schedule\)"):
        Costs.from_trace(gpipe(2, 2))


def test_split_in_a_v_lays_every_other_pass_backwards():
    assert Costs(F=[2, 4]).split(2, "v").F == (1, 2, 2, 1)
    with pytest.raises(ScheduleError, match="in a 'loop' or a 'v', got 'V'"):
        Costs(F=[2, 4]).split(2, "V")


def test_wrong_length_names_both_numbers():
    with pytest.raises(CostError, match="F has 3 entries, but there are 4 stages"):
        simulate(gpipe(4, 2), Costs(F=[1, 2, 3]))


def test_message_bytes_are_those_of_the_boundary_that_is_crossed():
    sizes = Costs(boundary_bytes=[10, 20]).message_bytes(3)
    assert sizes == {Kind.F: (10, 20, 0), Kind.B: (0, 10, 20), Kind.I: (0, 10, 20)}


def test_wire_queues_for_the_bandwidth_and_overlaps_latencies():
    wire = Wire(Link(0.25, 50))  # 100 bytes take 2 s
    assert [wire.send(now, 100) for now in (1, 2, 3, 20)] == [3.25, 5.25, 7.25, 22.25]
    delay = Wire(Costs(comm=0.5).link)
    assert [delay.send(now, 1e9) for now in (0, 0.25)] == [0.5, 0.75]


def test_boundary_bytes_may_leave_out_the_last_stage():
    assert Costs(boundary_bytes=[10, 20]).bytes_per_stage(3) == (10.0, 20.0, 0.0)
    with pytest.raises(CostError, match="boundary_bytes has 2 entries, but there are 4 stages"):
        Costs(boundary_bytes=[10, 20]).bytes_per_stage(4)


def test_split_divides_whole_rank_costs():
    assert Costs(F=2, I=4, W=6, comm=3).split(2) == Costs(F=1, I=2, W=3, comm=3)
    assert Costs(F=[2, 4]).split(2).F == (1.0, 2.0, 1.0, 2.0)  # a loop: stage 2 is on rank 0 again
    assert Costs(F=[2, 4]).split(2, "v").F == (1.0, 2.0, 2.0, 1.0)  # a V: stage 2 is on rank 1


def test_costs_read_off_a_trace_are_those_that_made_it():
    split_and_full = Schedule.from_text("0F0 0I0 0W0 0F1 0I1 0W1 0U1\n1F0 1B0 1F1 1B1 1U1")
    costs = Costs(F=[1, 2], I=[3, 5], W=[4, 5], U=[6, 7], comm=0.5)
    assert Costs.from_trace(simulate(split_and_full, costs)) == Costs(F=[1, 2], I=[3, 5], W=[4, 5], U=[6, 7])
