"""The V-shaped builders: what their papers promise in time and memory, over many sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipelab as pl
from pipelab.schedule import placed
from pipelab.schedules._block import block, repeat, tight_block

slots = pl.Costs(F=1, I=1, W=1)  # each of a rank's two stages takes one slot for F, I and W


def idle_and_peak(schedule):
    """Slots beyond the 6m that every rank works, and the most whole-rank micro-batches that one rank keeps until W."""
    trace = pl.simulate(schedule, slots)
    return trace.makespan - 6 * schedule.num_microbatches, max(pl.peak_activations(trace))


# Qi et al. 2024: the authors' own code, with unit times and m = 4p
PUBLISHED = [
    *(("v_min", 4, 11, 2), ("v_min", 8, 27, 4), ("v_min", 16, 59, 6)),
    *(("v_half", 4, 5, 3), ("v_half", 8, 17, 5), ("v_half", 16, 41, 9)),
]


@pytest.mark.parametrize(("name", "p", "idle", "peak"), PUBLISHED)
def test_v_shape_waits_and_keeps_no_more_than_published(name, p, idle, peak):
    ours = idle_and_peak(pl.SCHEDULES[name](p, 4 * p))
    assert ours[0] <= idle
    assert ours[1] <= peak


@pytest.mark.parametrize("p", range(2, 17))
@pytest.mark.parametrize("m", [lambda p: p + 1, lambda p: 2 * p, lambda p: 2 * p + 1, lambda p: 4 * p])
def test_v_shape_keeps_its_promise_for_every_number_of_ranks(p, m):
    # the peaks are the published table's, (p + 4) // 3 and (p + 2) // 2; V-Min's idle time too
    idle, peak = idle_and_peak(pl.v_min(p, m(p)))
    assert idle <= 4 * p - 5
    assert peak <= (p + 4) // 3
    idle, peak = idle_and_peak(pl.v_half(p, m(p)))
    assert idle <= 3 * p - 4
    assert peak <= (p + 2) // 2


@pytest.mark.parametrize("name", ["v_min", "v_half", "zb_v"])
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_v_shape_with_few_micro_batches_is_no_slower_than_one_after_the_other(name, p):
    for m in range(1, p + 1):
        schedule = pl.SCHEDULES[name](p, m)
        trace = pl.simulate(schedule, slots)
        assert trace.makespan <= m * 4 * p + 2  # down and up and back, 4p slots each, and the last W
        assert max(pl.peak_activations(trace)) <= m


@given(st.integers(1, 12), st.integers(0, 20))
def test_v_shape_zb_v_never_waits_and_keeps_what_1f1b_keeps(p, more):
    m = 2 * p + more
    trace = pl.simulate(pl.zb_v(p, m), slots)
    assert trace.longest_rank_span == 6 * m
    assert trace.makespan == 6 * m + p - 1
    assert set(pl.peak_activations(trace)) == {p}


def test_v_shape_zb_v_is_at_least_as_good_as_torchs_order():
    costs = pl.Costs(F=1, I=1, W=1).split(2)  # of a whole rank
    assert pl.simulate(pl.zb_v(4, 8), costs).makespan == 25.5


@given(st.integers(2, 10), st.integers(0, 20))
def test_v_shape_dualpipe_v_idles_one_slot_less_than_it_has_ranks(p, more):
    # every pair read as F, then B; peak in flight 2p + 1 stages (DualPipe's README: PP + 1)
    assert idle_and_peak(pl.dualpipe_v(p, 2 * p + more)) == (p - 1, p + 0.5)


def test_v_shape_idle_and_peak_trade_places():
    by_memory = [idle_and_peak(pl.SCHEDULES[name](8, 32)) for name in ("v_min", "v_half", "zb_v")]
    assert by_memory == [(27, 4), (17, 5), (7, 8)]
    one_f_one_b = pl.simulate(pl.one_f_one_b(8, 32), pl.Costs(F=2, I=2, W=2))
    assert one_f_one_b.makespan - 6 * 32 == 42
    assert max(pl.peak_activations(one_f_one_b)) == 8


# --- blocks ---------------------------------------------------------------------------------------------------------


def test_v_shape_block_is_v_mins_of_the_docstring():
    assert tight_block(placed(2, 2, "v"), down=1, up=1, period=6) == (0, 1, 2, 3, 4, 5, 6, 7)
    wish = repeat((0, 1, 2, 3, 4, 5, 6, 7), placed(2, 2, "v"), 2, 6)
    assert wish == (
        (0, 3, 4, 0, 7, 3, 4, 7),
        (1, 2, 5, 6, 1, 2, 5, 6),
    )


@pytest.mark.parametrize(("down", "up"), [(1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("p", range(1, 17))
def test_v_shape_tight_block_can_be_repeated(p, down, up):
    slots_of = tight_block(placed(p, 2, "v"), down=down, up=up, period=6)
    for rank in range(p):
        mine = [slots_of[s] % 6 for s in (rank, 2 * p - 1 - rank, 2 * p + rank, 4 * p - 1 - rank)]
        assert len(set(mine)) == 4  # which leaves two of six slots for W
    assert list(slots_of) == sorted(slots_of)
    assert slots_of[-1] >= block(placed(p, 2, "v"), down=down, up=up)[-1]


def test_v_shape_lifespans_of_v_min_add_up_to_a_third_of_1f1bs():
    p = 16
    slots_of = tight_block(placed(p, 2, "v"), down=1, up=1, period=6)
    for rank in range(p):
        first, second = slots_of[4 * p - 1 - rank] - slots_of[rank], slots_of[2 * p + rank] - slots_of[2 * p - 1 - rank]
        assert (first + second) / 6 == pytest.approx(2 * p / 3, abs=1)  # in stages: p / 3 micro-batches of a whole rank
