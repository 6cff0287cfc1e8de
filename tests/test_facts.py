"""Published and derived numbers, reproduced: each with its source. The identities in general are in test_theory.py.

"Published" numbers are a paper's or its authors' repository's. "Derived" ones were worked out by hand first.
"""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipelab as pl
from pipelab import theory
from pipelab.dependencies import graph
from pipelab.published import ZERO_BUBBLE

GIB = 2**30
slots = pl.Costs(F=0.5, B=0.5)  # a forward and a backward are one slot together


# --- Huang et al. 2019 (arXiv 1811.06965): the bubble ---------------------------------------------------------------


def test_facts_of_four_ranks_and_twelve_microbatches():
    # derived: in unit slots naive 48, GPipe 15, 3.2 times as fast, bubble 20 %
    naive, gpipe = (pl.simulate(plan, slots) for plan in (pl.naive(4, 12), pl.gpipe(4, 12)))
    assert (naive.makespan, gpipe.makespan) == (48, 15)
    assert naive.makespan / gpipe.makespan == 3.2
    assert gpipe.bubble_fraction == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("p", "m", "percent"),
    [
        *((4, 1, 75.00), (4, 4, 42.86), (4, 8, 27.27), (4, 12, 20.00), (4, 16, 15.79), (4, 32, 8.57), (4, 64, 4.48)),
        *((8, 16, 30.43), (8, 64, 9.86), (16, 64, 18.99), (6, 12, 29.41), (4, 20, 13.04)),
        # "negligible when M >= 4K" (section 2.3): 11.1, 15.8, 17.9, 19.0, 19.7 % with K = 2, 4, 8, 16, 64
        *((2, 8, 11.11), (8, 32, 17.95), (64, 256, 19.75)),
    ],
)
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b"])
def test_facts_bubble_in_percent(name, p, m, percent):
    # (p - 1)/(m + p - 1), section 2.3; with equal stages the same for 1F1B, which many tutorials say shrinks it
    trace = pl.simulate(pl.SCHEDULES[name](p, m), pl.Costs(F=1, B=2))
    assert round(100 * trace.bubble_fraction, 2) == percent


@pytest.mark.parametrize(("p", "eps", "m"), [(8, 0.1, 63), (6, 0.1, 45), (4, 0.15, 17)])
def test_facts_microbatches_for_a_bubble(p, eps, m):
    # derived: M >= (K - 1)(1 - e)/e
    assert theory.microbatches_for(eps, p=p) == m == math.ceil((p - 1) * (1 - Fraction(str(eps))) / Fraction(str(eps)))
    assert pl.simulate(pl.gpipe(p, m)).bubble_fraction <= eps + 1e-12
    assert pl.simulate(pl.gpipe(p, m - 1)).bubble_fraction > eps + 1e-6


@pytest.mark.parametrize(
    ("m", "expected"),
    [(1, (1, 1, 1)), (4, (1.60, 2.29, 2.91)), (32, (1.94, 3.66, 6.56))],  # derived: MK/(M + K - 1) over K = 2, M = 1
)
def test_facts_throughput_of_the_bubble_model(m, expected):
    def throughput(p, m):
        return 1 / pl.simulate(pl.gpipe(p, m), pl.Costs(F=1 / (p * m), B=2 / (p * m))).makespan

    assert tuple(round(throughput(p, m) / throughput(2, 1), 2) for p in (2, 4, 8)) == expected


def test_facts_throughput_of_the_bubble_model_at_32_microbatches_over_two_ranks():
    # derived; the paper measured 1, 1.7, 2.7 (AmoebaNet) and 1, 1.8, 3.3 (Transformer) on P100 without NVLink
    steps = [pl.simulate(pl.gpipe(p, 32), pl.Costs(F=1 / p, B=2 / p)).makespan for p in (2, 4, 8)]
    assert [round(steps[0] / step, 3) for step in steps] == [1, 1.886, 3.385]


def test_facts_early_recomputation_hides_in_the_bubble():
    # derived: F = R = 1, B = 2, p = 4, m = 16; why the paper calls the bubble negligible
    costs = pl.Costs(F=1, B=2)
    late, early = (pl.simulate(pl.gpipe(4, 16), costs, remat=when) for when in ("late", "early"))
    assert (late.makespan, early.makespan) == (76, 73)


# --- the same bubble, another memory: GPipe and 1F1B ----------------------------------------------------------------


@pytest.mark.parametrize(("p", "m", "units"), [(4, 4, 14), (4, 8, 22), (8, 32, 78)])
def test_facts_1f1b_takes_as_long_as_gpipe_with_equal_stages(p, m, units):
    # derived, F = B = 1
    assert {pl.simulate(plan(p, m), pl.Costs(F=1, B=1)).makespan for plan in (pl.gpipe, pl.one_f_one_b)} == {units}


@pytest.mark.parametrize(
    ("costs", "gpipe", "one_f_one_b"),
    [
        (pl.Costs(F=(2, 1, 1, 1), B=(4, 2, 2, 2)), 57, 51),  # the first stage slow: 1F1B is quicker
        (pl.Costs(F=(1, 1, 1, 2), B=(2, 2, 2, 4)), 57, 57),  # the last stage slow: no difference
        (pl.Costs(F=1, B=2, comm=0.1), 33.6, 34.6),  # a slow link: GPipe is quicker, 1F1B pays at every micro-batch
    ],
)
def test_facts_1f1b_is_not_gpipe_where_stages_or_links_are_not_equal(costs, gpipe, one_f_one_b):
    # derived, p = 4, m = 8
    assert pl.simulate(pl.gpipe(4, 8), costs).makespan == pytest.approx(gpipe)
    assert pl.simulate(pl.one_f_one_b(4, 8), costs).makespan == pytest.approx(one_f_one_b)


@given(st.integers(2, 6), st.integers(0, 10), st.data())
def test_facts_1f1b_is_never_slower_than_gpipe_on_free_links(p, more, data):
    # derived: quicker or equal in each of 2,000 random cases
    times = st.lists(st.integers(1, 5), min_size=p, max_size=p)
    costs = pl.Costs(F=data.draw(times), B=data.draw(times))
    gpipe, one_f_one_b = (pl.simulate(plan(p, p + more), costs) for plan in (pl.gpipe, pl.one_f_one_b))
    assert one_f_one_b.makespan <= gpipe.makespan


# --- worked numbers of a textbook's example -------------------------------------------------------------------------


def test_facts_of_traffic():
    # published: 33.5 MB a boundary, 1.1 GB a step; and 24.5 GB for a data-parallel all-reduce of 7e9 bf16 gradients
    tensor = {"b": 2, "s": 2048, "h": 4096, "e": 2}
    assert theory.boundary_bytes(**tensor) == 33_554_432
    assert round(theory.boundary_traffic(m=16, **tensor) / 1e9, 1) == 1.1
    assert theory.all_reduce_traffic(d=8, n=7e9, e=2) == 24.5e9
    # derived: a boundary moves as much with 365 micro-batches, so "far less" is a matter of the batch
    assert round(24.5e9 / theory.boundary_traffic(m=1, **tensor)) == 365


def test_facts_of_activation_memory():
    # derived (34 bytes a layer, token and hidden unit; L = 32, h = 4096, P = 4, micro-batch 2, T = 1024, M = 16):
    # 8.5, 6.4, 4.25, 2.1 GiB under 1F1B and 34 GiB under GPipe; the example itself prints 17 GiB, counting twice
    per_microbatch = 34 * 2 * 1024 * 4096 * 8
    one_f_one_b = pl.memory_curve(pl.simulate(pl.one_f_one_b(4, 16)), per_microbatch).peak
    assert [round(peak / GIB, 3) for peak in one_f_one_b] == [8.5, 6.375, 4.25, 2.125]
    assert max(pl.memory_curve(pl.simulate(pl.gpipe(4, 16)), per_microbatch).peak) == 34 * GIB
    # published (Korthikanti et al. 2022): 5 a s / h more where attention is neither fused nor recomputed, here 40
    whole = theory.activation_bytes(b=2, s=1024, h=4096, L=8, a=32)
    assert whole / per_microbatch == (34 + 40) / 34


def test_facts_of_model_state():
    # derived: 7e9 parameters, 4 ranks, 2 replicas: 28, 17.5 and 14 GB
    size = {"n": 7e9, "p": 4}
    assert theory.model_state_bytes("replicated", **size) == 28e9
    assert theory.model_state_bytes("zero_1", **size, d=2) == 17.5e9
    assert theory.model_state_bytes("zero_3", **size, d=2) == 14e9


def test_facts_of_a_batch_that_fits_in_integers():
    # derived: 512 samples in micro-batches of 2 on 4 ranks with a bubble of at most 15 %
    least = theory.microbatches_for(0.15, "one_f_one_b", p=4)
    ways = [(m, 256 // m) for m in range(least, 257) if 256 % m == 0]
    assert ways == [(32, 8), (64, 4), (128, 2), (256, 1)]
    assert {theory.global_batch(d=1, m=m, b=2, g=g) for m, g in ways} == {512}
    assert [round(100 * theory.bubble_fraction("one_f_one_b", p=4, m=m), 2) for m, _ in ways] == [
        8.57,
        4.48,
        2.29,
        1.16,
    ]


def test_facts_accumulating_flushed_pipelines_is_pure_loss():
    # derived: the same 256 micro-batches and the same memory, 16 flushes of 16 or one of 256
    often, once = (pl.simulate(pl.one_f_one_b(4, m), slots) for m in (16, 256))
    assert (16 * often.makespan, once.makespan) == (304, 259)
    assert pl.peak_activations(often) == pl.peak_activations(once)


def test_facts_messages_grow_by_pv_minus_1_over_p_minus_1():
    # derived: 7 forward messages a micro-batch against 3 with p = 4, v = 2
    plain, loops = (pl.simulate(plan) for plan in (pl.one_f_one_b(4, 8), pl.interleaved(4, 8, 2)))
    assert (len(plain.messages), len(loops.messages)) == (2 * 8 * 3, 2 * 8 * 7)


@pytest.mark.parametrize(
    ("plan", "costs", "makespan"),
    [
        (pl.naive(4, 1), pl.Costs(F=1, B=2, comm=0.5), 15),
        (pl.gpipe(4, 8), pl.Costs(F=1, B=2, comm=0.5), 36),
        (pl.zb_h1(4, 8), pl.Costs(F=10, I=12, W=8), 282),
        (pl.one_f_one_b(4, 8), pl.Costs(F=10, I=12, W=8), 330),
        (pl.interleaved(8, 16, 2), pl.Costs(F=1, B=2).split(2), 16 * 3 / (1 - 7 / 39)),
    ],
)
def test_facts_worked_by_hand(plan, costs, makespan):
    assert pl.simulate(plan, costs).makespan == pytest.approx(makespan)


# --- Qi et al. 2023 (arXiv 2401.10241), tables 5 and 9: published bubble rates --------------------------------------

ROWS = [  # layers of the model, p, m, and F, I, W, c in milliseconds
    (24, 8, 24, 18.522, 18.086, 9.337, 0.601),  # 1.5B parameters
    (24, 8, 32, 18.513, 18.086, 9.331, 0.626),
    (24, 8, 64, 18.546, 18.097, 9.321, 0.762),
    (32, 8, 24, 29.718, 29.444, 19.927, 0.527),  # 6.2B
    (32, 8, 32, 29.802, 29.428, 19.530, 0.577),
    (32, 8, 64, 29.935, 29.621, 19.388, 0.535),
    (48, 16, 48, 11.347, 11.248, 8.132, 0.377),  # 14.6B
    (48, 16, 64, 11.307, 11.254, 8.101, 0.379),
    (48, 16, 128, 11.325, 11.308, 8.109, 0.378),
]
ONE_F_ONE_B = (0.2431, 0.1985, 0.1240, 0.2347, 0.1898, 0.1091, 0.2552, 0.2082, 0.1251)
ZB_H1 = (0.1585, 0.1242, 0.0674, 0.1323, 0.1045, 0.0554, 0.1397, 0.1088, 0.0576)
ZB_H2 = (0.1083, 0.0837, 0.0444, 0.0698, 0.0559, 0.0294, 0.0672, 0.0516, 0.0266)
# the same orders, with every dependency kept, and as printed
STRICT = (0.1090, 0.0847, 0.0461, 0.0827, 0.0644, 0.0328, 0.1136, 0.0878, 0.0459)
PRINTED = (0.1055, 0.0818, 0.0443, 0.0808, 0.0628, 0.0320, 0.1104, 0.0852, 0.0445)


def test_facts_that_chapters_read_are_these():
    assert [(s.layers, s.p, s.m, s.F, s.I, s.W, s.c) for s in ZERO_BUBBLE] == ROWS
    columns = zip(*((s.one_f_one_b, s.zb_h1, s.zb_h2, s.interleaved) for s in ZERO_BUBBLE), strict=True)
    assert list(columns) == [ONE_F_ONE_B, ZB_H1, ZB_H2, PRINTED]


def rate(cost, m, F, I, W):
    return round((cost - m * (F + I + W)) / cost, 4)


@pytest.mark.parametrize(
    ("row", "published"),
    list(zip(ROWS, zip(ONE_F_ONE_B, ZB_H1, ZB_H2, strict=True), strict=True)),
)
def test_facts_of_the_zero_bubble_paper(row, published):
    _, p, m, *times, c = row
    F, I, W = times
    costs = pl.Costs(F=F, I=I, W=W, comm=c)
    plain, first, second = (pl.simulate(plan(p, m), costs) for plan in (pl.one_f_one_b, pl.zb_h1, pl.zb_h2))
    assert rate(plain.makespan, m, *times) == published[0]
    assert rate(first.makespan, m, *times) == published[1]
    assert rate(second.longest_rank_span, m, *times) == published[2]  # not the makespan: ranks may overlap two steps


@pytest.mark.parametrize(
    ("index", "by_makespan"), [(0, 0.1083), (1, 0.0837), (2, 0.0444), (3, 0.1003), (4, 0.0778), (5, 0.0405)]
)
def test_facts_of_zb_h2_by_makespan(index, by_makespan):
    # derived: what ZB-H2 would come to if the next step waited for all ranks
    _, p, m, *times, c = ROWS[index]
    F, I, W = times
    trace = pl.simulate(pl.zb_h2(p, m), pl.Costs(F=F, I=I, W=W, comm=c))
    assert rate(trace.makespan, m, *times) == by_makespan


def forgetful(schedule):
    """`schedule` without the backward wrap-around from the first rank to the last, but for each group's first one."""
    p, kept = schedule.num_ranks, graph(schedule)
    neighbour, crosses, reader = list(kept.neighbour), list(kept.crosses), list(kept.reader)
    for index, (stage, kind, k) in enumerate(kept.actions):
        if kind is pl.Kind.B and stage % p == p - 1 and not schedule.is_last_stage(stage) and k % p:
            reader[neighbour[index]] = -1
            neighbour[index], crosses[index] = -1, False
    copy = pl.Schedule(schedule.name, schedule.ranks, schedule.placement, schedule.num_microbatches)
    copy.__dict__["_graph"] = replace(kept, neighbour=neighbour, crosses=crosses, reader=reader)
    return copy


@pytest.mark.parametrize(("row", "strict", "printed"), list(zip(ROWS, STRICT, PRINTED, strict=True)))
def test_facts_of_interleaving_in_the_zero_bubble_paper(row, strict, printed):
    # derived: with every dependency the printed column is out of reach; without the backward wrap-around it is exact
    layers, p, m, *times, c = row
    F, I, W = times
    v = layers // p
    costs = pl.Costs(F=F, I=I, W=W, comm=c).split(v)
    plan = pl.interleaved(p, m, v)
    assert rate(pl.simulate(plan, costs).makespan, m, *times) == strict
    assert rate(pl.simulate(forgetful(plan), costs).makespan, m, *times) == printed
