"""Every closed form against the simulator: right inside its stated range, and wrong outside, where there is one."""

import math
from fractions import Fraction

import pytest
import sympy
from hypothesis import assume, given
from hypothesis import strategies as st

import pipelab as pl
from pipelab import theory
from pipelab.errors import FormulaError

LOOPED = ("interleaved", "breadth_first")
V_SHAPED = ("zb_v", "v_half", "v_min", "dualpipe_v")
# times for which a formula with a split backward holds
WORK = {"zb_h1": {"F": 5, "I": 6, "W": 4}, "zb_h2": {"F": 5, "I": 6, "W": 4}}
WORK |= {name: {"F": 5, "I": 5, "W": 5} for name in V_SHAPED}
times = st.integers(1, 20)
near = {"rel": 1e-12}


def inside(formula, values):
    """Whether `formula` says that it holds at `values`."""
    symbols = {getattr(theory, name): sympy.Rational(value) for name, value in values.items()}
    symbols.setdefault(theory.B, symbols[theory.I] + symbols[theory.W])
    return formula.holds.subs(symbols) == True  # noqa: E712


@st.composite
def settings(draw, schedules):
    """A schedule, sizes that it takes, and times: whole-rank F, I, W and a delay in a sensible relation to them."""
    name, p = draw(st.sampled_from(sorted(set(schedules) & set(pl.SCHEDULES)))), draw(st.integers(1, 7))
    v = draw(st.integers(1, 4)) if name in LOOPED else 1
    split = name in ("zb_h1", "zb_h2", *V_SHAPED)  # whose formulas ask for m >= 2p, W <= min(F, I) and a short hop
    m = p * draw(st.integers(1, 3)) if name == "interleaved" else draw(st.integers(2 * p if split else 1, 4 * p))
    F, I = draw(times), draw(times)
    W = draw(st.integers(1, min(F, I)) if split else times)
    c = Fraction(draw(st.sampled_from([0, 1, 2] if split else [0, 2, 10, 20, 60])), 20) * min(F, I, W) / v
    if name in V_SHAPED:  # drawn for equal actions on free links
        I = W = F
        c = 0
    sizes = {"p": p, "m": m, **({"v": v} if name in LOOPED else {})}
    return name, sizes, {"F": F, "I": I, "W": W, "c": c}


def timed(name, sizes, costs, **changes):
    schedule = pl.SCHEDULES[name](*sizes.values())
    whole = pl.Costs(F=costs["F"], I=costs["I"], W=costs["W"], comm=costs.get("c", 0), **changes)
    return pl.simulate(schedule, whole.split(schedule.stages_per_rank))


# --- inside the range -----------------------------------------------------------------------------------------------


@given(settings(set(theory.makespan)))
def test_theory_makespan_bubble_and_messages_are_the_simulators(case):
    name, sizes, costs = case
    assume(inside(theory.makespan[name], {**sizes, **costs}))
    trace = timed(name, sizes, costs)
    assert theory.makespan(name, **sizes, **costs) == pytest.approx(trace.makespan, **near)
    assert theory.bubble_fraction(name, **sizes, **costs) == pytest.approx(trace.bubble_fraction, abs=1e-12)
    if name not in LOOPED or sizes["p"] >= 2:
        assert theory.messages(name, **sizes) == len(trace.messages)


@given(settings(set(theory.longest_rank_span)))
def test_theory_longest_rank_span_is_the_simulators(case):
    name, sizes, costs = case
    assume(inside(theory.longest_rank_span[name], {**sizes, **costs}))
    cost = timed(name, sizes, costs).longest_rank_span
    assert theory.longest_rank_span(name, **sizes, **costs) == pytest.approx(cost, **near)
    work = sizes["m"] * (costs["F"] + costs["I"] + costs["W"])
    assert theory.bubble_rate(name, **sizes, **costs) == pytest.approx((cost - work) / cost, abs=1e-12)


@given(settings(set(theory.peak_activations)), st.sampled_from([Fraction(q, 4) for q in range(5)]))
def test_theory_peak_activations_are_the_simulators(case, part):
    name, sizes, costs = case
    peaks = pl.peak_activations(timed(name, sizes, costs), part)
    if "r" not in theory.peak_activations[name].letters:  # the formula is for the rank that keeps most
        peaks = (max(peaks),)
    for rank, peak in enumerate(peaks):
        letters = {**sizes, "r": rank, "w": part}
        values = {letter: letters[letter] for letter in theory.peak_activations[name].letters if letter in letters}
        assume(inside(theory.peak_activations[name], {**values, **costs}))
        assert theory.peak_activations(name, **values) == pytest.approx(peak, **near)


@pytest.mark.parametrize(
    (
        "name",
        "idle",
        "peak",
    ),  # published: arXiv 2405.15362, the authors' code
    [
        ("v_min", (11, 27, 59), (2, 4, 6)),
        ("v_half", (5, 17, 41), (3, 5, 9)),
        ("one_f_one_b", (18, 42, 90), (4, 8, 16)),
    ],
)
def test_theory_of_v_shapes_is_the_published_table(name, idle, peak):
    # one unit for each of F, I, W of one of a rank's two stages
    makespans = [theory.makespan(name, p=p, m=4 * p, F=2, I=2, W=2) for p in (4, 8, 16)]
    assert tuple(makespan - 24 * p for makespan, p in zip(makespans, (4, 8, 16), strict=True)) == idle
    rank = {"r": 0} if name == "one_f_one_b" else {}
    assert tuple(theory.peak_activations(name, p=p, m=4 * p, **rank) for p in (4, 8, 16)) == peak


def test_theory_of_overlapped_pairs_is_the_published_rule():
    # PP = 2p stages, F = I = W: (PP / 2 - 1)(F&B + B - 3W) is 2(p - 1) where a pair takes as long as F and B
    assert theory.dualpipe_overlapped_idle(p=4, O=3, B=2, W=1) == 6
    assert theory.dualpipe_overlapped_idle(p=4, O=2, B=2, W=1) == 3  # and less where it overlaps


@given(settings({"gpipe", "one_f_one_b", "interleaved"}))
def test_theory_bubble_over_ideal_time_has_another_denominator(case):
    name, sizes, costs = case
    trace = timed(name, sizes, {**costs, "c": 0})
    ideal = sizes["m"] * (costs["F"] + costs["I"] + costs["W"])
    over_ideal = theory.bubble_over_ideal(name, **sizes)
    assert over_ideal == pytest.approx(trace.idle(0) / ideal, abs=1e-12)
    assert theory.bubble_fraction(name, **sizes) == pytest.approx(over_ideal / (1 + over_ideal), abs=1e-12)


@given(st.integers(1, 7), st.integers(1, 28), st.data())
def test_theory_uneven_bubble_fraction_is_the_simulators(p, m, data):
    F = data.draw(st.lists(st.integers(1, 20), min_size=p, max_size=p))
    trace = pl.simulate(pl.gpipe(p, m), pl.Costs(F=F, B=[2 * f for f in F]))
    slowest = Fraction(max(F) * p, sum(F))
    assert theory.uneven_bubble_fraction(p=p, m=m, x=slowest) == pytest.approx(trace.bubble_fraction, abs=1e-12)


# --- outside it -----------------------------------------------------------------------------------------------------

OUTSIDE = [
    ("breadth_first", {"p": 4, "m": 3, "v": 2}, {"F": 1, "I": 1, "W": 1}),  # fewer micro-batches than ranks
    ("breadth_first", {"p": 4, "m": 4, "v": 2}, {"F": 1, "I": 1, "W": 1, "c": 0.1}),  # the wrap-around is not hidden
    ("interleaved", {"p": 4, "m": 8, "v": 2}, {"F": 1, "I": 1, "W": 1, "c": 0.6}),  # a hop longer than a stage's F
    ("zb_h1", {"p": 4, "m": 3}, {"F": 1, "I": 1, "W": 1}),
    ("zb_h1", {"p": 4, "m": 8}, {"F": 1, "I": 1, "W": 2}),  # W fills no gap that is shorter
    ("zb_h1", {"p": 4, "m": 8}, {"F": 10, "I": 12, "W": 10, "c": 8}),
    ("zb_h2", {"p": 4, "m": 5}, {"F": 1, "I": 1, "W": 1}),
    ("zb_h2", {"p": 4, "m": 8}, {"F": 1, "I": 3, "W": 2}),
]


@pytest.mark.parametrize(("name", "sizes", "costs"), OUTSIDE)
def test_theory_makespan_fails_outside_its_range_and_says_so(name, sizes, costs):
    with pytest.raises(FormulaError, match=rf"makespan of {name} holds where .*, asked at "):
        theory.makespan(name, **sizes, **costs)
    values = {getattr(theory, letter): value for letter, value in {"c": 0, **sizes, **costs}.items()}
    there = theory.makespan[name].expression.subs({theory.B: costs["I"] + costs["W"], **values})
    assert float(there) != pytest.approx(timed(name, sizes, costs).makespan, rel=1e-3)


@pytest.mark.parametrize("name", ["naive", "gpipe", "one_f_one_b"])
def test_theory_of_equal_stages_fails_where_one_is_slow(name):
    # all formulas are for equal stages: with the first twice as slow the average is 1.25 times as slow, the step more
    slow = pl.simulate(pl.SCHEDULES[name](4, 8), pl.Costs(F=(2, 1, 1, 1), B=(4, 2, 2, 2)))
    average = theory.makespan(name, p=4, m=8, F=1.25, B=2.5)
    assert (slow.makespan == average) == (name == "naive")  # which never has two ranks at work


def test_theory_peak_of_zero_bubble_needs_enough_microbatches():
    with pytest.raises(FormulaError, match="zb_h2 holds where"):
        theory.peak_activations("zb_h2", p=4, m=6, r=0)
    assert pl.peak_activations(pl.simulate(pl.zb_h2(4, 6)))[0] == 6  # and not 2p - 1 = 7


# --- how it is asked ------------------------------------------------------------------------------------------------


def test_theory_is_an_expression_without_values_and_the_nearest_float_with_them():
    p, m, F, B = theory.p, theory.m, theory.F, theory.B
    assert theory.bubble_fraction("gpipe") == (p - 1) / (m + p - 1)
    assert theory.bubble_fraction("gpipe", p=4, m=8) == 3 / 11
    assert theory.bubble_fraction("gpipe", p=4) == 3 / (m + 3)
    assert theory.makespan("gpipe") == (m + p - 1) * (F + B)
    assert theory.makespan("gpipe", c=theory.c) == (m + p - 1) * (F + B) + 2 * theory.c * (p - 1)
    assert theory.makespan("gpipe", p=p, m=2 * p, F=1, B=2) == 3 * (3 * p - 1)


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_theory_numbers_are_correctly_rounded(p, m):
    assert theory.bubble_fraction("gpipe", p=p, m=m) == float(Fraction(p - 1, m + p - 1))


def test_theory_takes_floats_as_the_decimals_that_were_written():
    assert theory.makespan("gpipe", p=2, m=1, F=0.1, B=0.2) == 0.6  # as binary floats 2 * (0.1 + 0.2) is 0.6000...01
    assert theory.makespan("gpipe", p=2, m=1, F=0.1, B=0.4) == 1
    assert theory.makespan("gpipe", p=2, m=2, F=Fraction(1, 3), B=1) == 4


def test_theory_adds_i_and_w_up_to_b():
    assert theory.makespan("gpipe", p=4, m=8, F=1, I=1, W=1) == theory.makespan("gpipe", p=4, m=8, F=1, B=2) == 33


@given(
    st.sampled_from(sorted(set(theory.makespan) - {"naive"})),
    st.integers(3, 8),
    st.integers(1, 60),
    st.integers(2, 4),
)
def test_theory_microbatches_for_is_the_first_that_is_enough(name, p, percent, v):
    values = {"p": p, **({"v": v} if name in LOOPED else {}), **WORK.get(name, {"F": 1, "I": 1, "W": 1})}
    asked = {letter: value for letter, value in values.items() if letter in "pv" or name in WORK}
    found = theory.microbatches_for(Fraction(percent, 100), name, **asked)

    def enough(m):
        symbols = {getattr(theory, letter): value for letter, value in {**values, "m": m, "c": 0}.items()}
        symbols[theory.B] = values["I"] + values["W"]
        return 100 * theory.bubble_fraction[name].expression.subs(symbols) <= percent

    def legal(m):
        return m >= 1 and inside(theory.makespan[name], {**values, "m": m, "c": 0})

    assert legal(found)
    assert enough(found)
    assert not any(legal(m) and enough(m) for m in range(found - p, found))


def test_theory_microbatches_for_needs_what_it_needs():
    with pytest.raises(FormulaError, match="also needs a value for p"):
        theory.microbatches_for(0.1)
    with pytest.raises(FormulaError, match="also needs a value for F, I, W"):
        theory.microbatches_for(0.1, "zb_h1", p=4)
    with pytest.raises(FormulaError, match="the bubble of naive itself grows with m"):
        theory.microbatches_for(0.1, "naive", p=4)
    with pytest.raises(FormulaError, match="a share of the makespan, between 0 and 1, got 10"):
        theory.microbatches_for(10, p=4)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: theory.makespan("gpipe", v=2), r"has no letter 'v'; it has p \(ranks\), m"),
        (lambda: theory.makespan("zb_h1", B=2), "has no letter 'B'"),
        (lambda: theory.makespan("gipe", p=4), "for 'gipe'; there is one for naive, gpipe"),
        (lambda: theory.makespan("gpipe", p=2.5), r"p \(ranks\) must be integer and positive, got 2.5"),
        (lambda: theory.makespan("gpipe", p=0), "must be integer and positive, got 0"),
        (lambda: theory.makespan("gpipe", F=-1), "must be nonnegative, got -1"),
        (lambda: theory.makespan("gpipe", F=math.nan), "must be a finite number, got nan"),
        (lambda: theory.makespan("gpipe", F=True), "must be a finite number, got True"),
        (lambda: theory.peak_activations("one_f_one_b", p=4, m=8, r=4), "r < p, asked at p = 4, r = 4"),
    ],
)
def test_theory_refuses_what_it_cannot_answer(ask, message):
    with pytest.raises(FormulaError, match=message):
        ask()


def test_theory_says_source_and_range_of_every_formula():
    families = [value for value in vars(theory).values() if isinstance(value, theory.Family)]
    formulas = [value for value in vars(theory).values() if isinstance(value, theory.Formula)]
    assert len(families) >= 8
    for formula in [*formulas, *(one for family in families for one in family.values())]:
        assert formula.source
        assert str(formula).startswith(f"{formula.name} = ")
        assert set(formula.letters) <= set(theory.__all__)


# --- batches, bytes, versions ---------------------------------------------------------------------------------------


@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 100), st.integers(0, 5))
def test_theory_step_time_is_gpipe_with_an_overhead_in_every_microbatch(p, m, T, o):
    cost = T / m + o
    trace = pl.simulate(pl.gpipe(p, m), pl.Costs(F=cost / 3, B=2 * cost / 3))
    assert theory.step_time(p=p, m=m, T=T, o=o) == pytest.approx(trace.makespan)


@given(st.integers(2, 10), st.integers(1, 500), st.integers(1, 10))
def test_theory_best_microbatches_has_the_shortest_step(p, T, o):
    def step(m):
        return (m + p - 1) * (Fraction(T, m) + o)

    best = theory.best_microbatches(p=p, T=T, o=o)
    around = min(max(1, math.floor(best)), math.ceil(best), key=step)
    assert step(around) == min(step(m) for m in range(1, int(best) + 20))
    assert theory.step_time(p=p, m=around, T=T, o=o) == float(step(around))


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
def test_theory_gpipe_memory_is_the_memory_curves(p, m, layers, samples):
    L, N = layers * p, samples * m  # whole layers a rank, whole samples a micro-batch
    stage, boundary = layers * samples, samples
    kept = pl.memory_curve(pl.simulate(pl.gpipe(p, m)), stage)
    remat = pl.memory_curve(pl.simulate(pl.gpipe(p, m), remat=True), stage, boundary=boundary, remat=True)
    assert max(kept.peak) == theory.gpipe_memory("kept", N=N, L=L, p=p)
    assert max(remat.peak) == theory.gpipe_memory("remat", N=N, L=L, p=p, m=m)


@given(st.integers(2, 6), st.integers(1, 12))
def test_theory_boundary_traffic_is_what_the_simulated_messages_weigh(p, m):
    size = theory.boundary_bytes(b=2, s=16, h=8, e=2)
    trace = pl.simulate(pl.one_f_one_b(p, m), pl.Costs(boundary_bytes=size))
    first_boundary = sum(message.bytes for message in trace.messages if 0 in (message.sender, message.receiver))
    assert size == 2 * 16 * 8 * 2
    assert first_boundary == theory.boundary_traffic(m=m, b=2, s=16, h=8, e=2)


@given(st.integers(1, 6), st.integers(8, 16))
def test_theory_weight_delay_of_stashing_is_what_pipedreams_order_shows(p, m):
    for rank, order in enumerate(pl.pipedream(p, m).ranks):
        text = [str(action)[len(str(rank)) :] for action in order]
        k = m - 1  # in the steady state: count the updates between the forward and the backward of one micro-batch
        updates = sum(word.startswith("U") for word in text[text.index(f"F{k}") : text.index(f"B{k}")])
        assert theory.weight_delay("stashing", p=p, r=rank) == updates
        assert theory.weight_versions("stashing", p=p, r=rank) == updates + 1


def test_theory_two_buffered_version_lags_by_a_whole_batch():
    # 4 micro-batches a batch: the first update comes after 4, and the batch already on its way reads the old one
    versions = [theory.two_buffered_version(i=i, m=4) for i in range(16)]
    assert versions == [0] * 8 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(("t", "published"), [(0, 2), (1, 1), (2, 0.618), (3, 0.445)])
def test_theory_largest_stable_rate_is_where_descent_with_old_gradients_begins_to_grow(t, published):
    def end(rate):
        weights = [1.0] * (t + 1)
        for _ in range(4000):
            weights = [*weights[1:], weights[-1] - rate * weights[0]]  # f = w^2 / 2, its gradient t updates old
        return abs(weights[-1])

    limit = theory.largest_stable_rate(t=t)
    assert limit == pytest.approx(published, abs=1e-3)
    assert end(0.98 * limit) < 0.1
    assert end(1.02 * limit) > 10


@given(st.integers(1, 8), st.integers(1, 40))
def test_theory_best_segments_keep_the_least(m, L):
    def kept(segments):  # every micro-batch keeps the inputs of its segments, one segment at a time is there in full
        return m * segments + Fraction(L, segments)

    best = theory.best_segments(L=L, m=m)
    around = min(max(1, math.floor(best)), max(1, math.ceil(best)), key=kept)
    assert kept(around) == min(kept(segments) for segments in range(1, L + 8))
    assert theory.segment_memory(L=L, m=m, S=around) == float(kept(around))


def test_theory_batch_time_and_global_batch_agree_with_the_pipelines_own():
    # 512 samples on 4 replicas in micro-batches of 2: 64 micro-batches on each
    assert theory.global_batch(d=4, m=64, b=2, g=1) == 512
    pipeline = pl.simulate(pl.one_f_one_b(4, 64), pl.Costs(F=1, B=2)).makespan
    assert theory.batch_time(N=512, d=4, b=2, p=4, F=1, B=2) == pipeline


@given(times, times)
def test_theory_remat_overhead_is_the_extra_busy_time(F, B):
    plain, again = (pl.simulate(pl.gpipe(3, 4), pl.Costs(F=F, B=B), remat=remat).busy(1) for remat in (False, True))
    assert theory.remat_overhead(F=F, B=B) == pytest.approx(again / plain - 1)
