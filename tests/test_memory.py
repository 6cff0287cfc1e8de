"""What is alive when: against hand-drawn cases, published peaks, and the counting rule written once more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipelab as pl
from pipelab.errors import CostError
from pipelab.memory import MemoryCurve

small = st.integers(1, 8)


@given(small, small)
def test_memory_of_gpipe_is_all_microbatches_and_of_1f1b_at_most_the_ranks_behind(p, m):
    # Huang et al. 2019 keep all M until the backward; Narayanan et al. 2021, section 2.2.1: at most p - r on rank r
    assert pl.peak_activations(pl.simulate(pl.gpipe(p, m))) == (m,) * p
    assert pl.peak_activations(pl.simulate(pl.one_f_one_b(p, m))) == tuple(min(m, p - r) for r in range(p))


def test_memory_of_1f1b_against_gpipe_at_8_ranks_and_32_microbatches():
    assert max(pl.peak_activations(pl.simulate(pl.gpipe(8, 32)))) == 32
    assert max(pl.peak_activations(pl.simulate(pl.one_f_one_b(8, 32)))) == 8


SPLIT = """
0F0 0F1 0I0 0I1 0W0 0W1
1F0 1I0 1F1 1I1 1W1 1W0
"""


def test_memory_curve_draws_what_is_held_for_i_and_for_w_apart():
    # By hand, one unit an action. Rank 1: F0 at 1, I0 at 2, F1 at 3, I1 at 4, W1 at 5, W0 at 6
    trace = pl.simulate(pl.Schedule.from_text(SPLIT))
    curve = pl.memory_curve(trace, (8, 100), weight_part=0.5)
    assert curve.times[1] == (1, 3, 5, 6, 7)
    assert curve.until_input[1] == (100, 100, 0, 0, 0)
    assert curve.until_weight[1] == (0, 50, 100, 50, 0)
    assert curve.total[1] == (100, 150, 100, 50, 0)
    assert curve.peak == (16, 150)
    assert pl.peak_activations(trace, weight_part=0.5) == (2, 1.5)


def test_memory_curve_with_remat_keeps_inputs_and_one_whole_activation():
    # GPipe, section 2.3 of Huang et al. 2019: M boundaries and one micro-batch's activations, O(N + L/K * N/M)
    trace = pl.simulate(pl.gpipe(3, 5), remat=True)
    assert pl.memory_curve(trace, 100, boundary=7, remat=True).peak == (5 * 7 + 100,) * 3
    trace = pl.simulate(pl.one_f_one_b(3, 5), remat=True)
    assert pl.memory_curve(trace, 100, boundary=7, remat=True).peak == (3 * 7 + 100, 2 * 7 + 100, 7 + 100)


def test_memory_curve_with_remat_holds_the_whole_from_the_recomputation_to_the_end_of_b():
    # One rank by hand, F = 1, B = 2: F at 0, F again at 1, B from 2 to 4.
    trace = pl.simulate(pl.gpipe(1, 1), pl.Costs(F=1, B=2), remat=True)
    curve = pl.memory_curve(trace, 100, boundary=7, remat=True)
    assert curve.pairs() == (((0, 7), (1, 107), (4, 0)),)
    # The recomputation at once where the rank is free: the last rank of two has its output early, so has rank 0
    early = pl.simulate(pl.gpipe(2, 1), remat="early")
    assert pl.memory_curve(early, 100, boundary=7, remat=True).pairs()[0] == ((0, 7), (1, 107), (7, 0))


@given(st.sampled_from(sorted(pl.SCHEDULES)), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_memory_curve_peaks_where_the_count_in_order_does_and_ends_empty(name, weight_part):
    trace = pl.simulate(pl.SCHEDULES[name](4, 8))
    share = 1 / trace.schedule.stages_per_rank
    curve = pl.memory_curve(trace, share, weight_part=weight_part)
    assert curve.peak == pytest.approx(pl.peak_activations(trace, weight_part), abs=1e-12)
    assert [row[-1] for row in curve.total] == [0] * 4


def test_memory_curve_keeps_all_of_it_for_w_and_no_inputs_unless_told():
    trace = pl.simulate(pl.Schedule.from_text(SPLIT))
    assert pl.memory_curve(trace, 100).until_weight[1] == (0, 100, 200, 100, 0)
    remat = pl.simulate(pl.gpipe(3, 5), remat=True)
    assert pl.memory_curve(remat, 100, remat=True).peak == (100,) * 3


def test_memory_curve_with_remat_of_a_trace_that_does_not_show_it_begins_the_whole_with_b():
    # one rank, F = 1, B = 2, and the recomputation is part of B
    trace = pl.simulate(pl.gpipe(1, 1), pl.Costs(F=1, B=2))
    assert pl.memory_curve(trace, 100, boundary=7, remat=True).pairs() == (((0, 7), (1, 107), (3, 0)),)


def test_memory_curve_names_what_is_no_number_of_bytes():
    trace = pl.simulate(pl.gpipe(2, 3))
    with pytest.raises(CostError, match=r"^weight_part must be"):
        pl.memory_curve(trace, 1, weight_part=-1)
    with pytest.raises(CostError, match=r"^boundary must be"):
        pl.memory_curve(trace, 1, boundary=-1, remat=True)


def test_memory_curve_takes_bytes_per_stage():
    trace = pl.simulate(pl.gpipe(2, 3))
    assert pl.memory_curve(trace, (10, 1)).peak == (30, 3)
    with pytest.raises(CostError, match="activation has 3 entries, but there are 2 stages"):
        pl.memory_curve(trace, (1, 2, 3))
    with pytest.raises(CostError, match=r"activation\[1\] must be finite and not negative"):
        pl.memory_curve(trace, (1, -2))


def test_memory_refuses_a_trace_that_recomputes_where_remat_is_not_said():
    with pytest.raises(CostError, match="recomputes forwards: give remat=True"):
        pl.memory_curve(pl.simulate(pl.gpipe(2, 3), remat=True), 100)


@pytest.mark.parametrize("weight_part", [-0.5, float("nan"), True])
def test_memory_refuses_a_weight_part_that_is_no_part(weight_part):
    with pytest.raises(CostError, match="weight_part must be"):
        pl.peak_activations(pl.simulate(pl.gpipe(2, 3)), weight_part)


def test_memory_is_asked_of_a_trace():
    for ask in (pl.peak_activations, lambda schedule: pl.memory_curve(schedule, 1)):
        with pytest.raises(CostError, match="needs the times of a Trace, and Schedule has none"):
            ask(pl.gpipe(2, 3))


def test_memory_measured_holds_each_number_from_the_end_of_its_span():
    trace = pl.simulate(pl.gpipe(2, 1), pl.Costs(F=1, B=2))
    curve = MemoryCurve.measured(trace, [[5, 0], [7, 0]])
    assert curve.pairs() == (((1, 5), (6, 0)), ((2, 7), (4, 0)))
    assert curve.peak == (5, 7)
    with pytest.raises(pl.CostError, match=r"ran \[2, 2\] spans, but held has \[2, 1\] numbers"):
        MemoryCurve.measured(trace, [[5, 0], [7]])
