"""Every closed form against the simulator: right inside its stated range, and wrong outside it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipelab as pl
from pipelab import theory
from pipelab.errors import FormulaError

small = st.integers(1, 9)
times = st.integers(1, 20)


@given(st.sampled_from(["naive", "gpipe", "one_f_one_b"]), small, small, times, times, times)
def test_theory_makespan_and_bubble_are_the_simulators(name, p, m, F, I, W):
    trace = pl.simulate(pl.SCHEDULES[name](p, m), pl.Costs(F=F, I=I, W=W))
    assert theory.makespan(name, p=p, m=m, F=F, I=I, W=W) == trace.makespan
    assert theory.bubble_fraction(name, p=p, m=m) == trace.bubble_fraction


def test_theory_is_an_expression_without_values_and_the_nearest_float_with_them():
    p, m = theory.p, theory.m
    assert theory.bubble_fraction("gpipe") == (p - 1) / (m + p - 1)
    assert theory.bubble_fraction("gpipe", p=4, m=8) == 3 / 11


# FACTS: (p - 1)(1 - eps) / eps, worked numbers of Huang et al.'s bubble
@pytest.mark.parametrize(("eps", "p", "m"), [(0.1, 8, 63), (0.15, 4, 17), (0.1, 6, 45)])
def test_theory_microbatches_for_is_exact(eps, p, m):
    assert theory.microbatches_for(eps, "gpipe", p=p) == m


def test_theory_refuses_a_letter_and_a_schedule_that_it_does_not_know():
    with pytest.raises(FormulaError, match=r"has no letter 'v'; it has p \(ranks\), m"):
        theory.makespan("gpipe", v=2)
    with pytest.raises(FormulaError, match=r"for 'gipe'; there is one for naive, gpipe"):
        theory.makespan("gipe", p=4)
