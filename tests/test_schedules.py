"""One set of properties for every builder, over the sizes that tests/schedule_sizes.py says it takes."""

import inspect
import math
from collections import Counter
from itertools import pairwise
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_sizes import GOLDEN, REFUSED, SIZES

import pipelab as pl

every_builder = pytest.mark.parametrize("name", sorted(pl.SCHEDULES))


def build(name, sizes):
    return pl.SCHEDULES[name](**sizes)


def without_updates(schedule):
    return tuple(tuple(action for action in order if action.kind is not pl.Kind.U) for order in schedule.ranks)


@every_builder
def test_schedules_has_a_row_for_every_builder(name):
    assert name in SIZES
    assert name in GOLDEN
    assert getattr(pl, name) is pl.SCHEDULES[name]


@every_builder
def test_schedules_equals_the_order_written_by_hand(name):
    sizes, text = GOLDEN[name]
    assert build(name, sizes).to_text() == dedent(text).strip() + "\n"


@every_builder
@given(st.data())
def test_schedules_are_valid_and_have_each_action_once(name, data):
    sizes = data.draw(SIZES[name])
    schedule = build(name, sizes)
    pl.validate(schedule)
    assert (schedule.name, schedule.num_ranks) == (name, sizes["num_ranks"])
    assert schedule.num_microbatches == sizes["num_microbatches"]
    work = Counter((stage, k, kind) for order in schedule.ranks for stage, kind, k in order)
    assert set(work.values()) == {1}
    for stage in range(schedule.num_stages):
        for k in range(schedule.num_microbatches):
            kinds = {kind.value for kind in pl.Kind if (stage, k, kind) in work}
            assert kinds - {"U"} in ({"F", "B"}, {"F", "I", "W"})
    assert {(a.stage, rank) for rank, order in enumerate(schedule.ranks) for a in order} == set(
        enumerate(schedule.placement)
    )


@every_builder
@given(data=st.data())
def test_schedules_survive_text_and_csv(name, data, tmp_path_factory):
    schedule = build(name, data.draw(SIZES[name]))
    again = pl.Schedule.from_text(schedule.to_text())
    assert (again, again.name, again.placement) == (schedule, name, schedule.placement)
    path = tmp_path_factory.getbasetemp() / f"{name}.csv"
    schedule.to_csv(path)
    read = pl.Schedule.from_csv(path)
    assert (read.name, read.ranks, read.placement) == (name, without_updates(schedule), schedule.placement)
    assert read.num_microbatches == schedule.num_microbatches


@st.composite
def costs_of(draw, schedule):
    """Random times a stage, whole numbers so that sums are exact, and a random delay."""
    times = st.lists(st.integers(1, 9), min_size=schedule.num_stages, max_size=schedule.num_stages)
    return pl.Costs(F=draw(times), I=draw(times), W=draw(times), U=draw(times), comm=draw(st.integers(0, 4)))


@every_builder
@given(st.data())
def test_schedules_run_every_action_after_what_it_needs(name, data):
    schedule = build(name, data.draw(SIZES[name]))
    costs = data.draw(costs_of(schedule))
    trace = pl.simulate(schedule, costs)
    end = {(a.stage, a.kind.value, a.microbatch): (end, rank) for rank, a, _, end, *_ in trace.spans}
    last = schedule.num_stages - 1

    def there(stage, kinds, k, on):
        ends, rank = next(end[stage, kind, k] for kind in kinds if (stage, kind, k) in end)
        return ends + (costs.comm if rank != on else 0)

    for rank, action, start, *_ in trace.spans:
        stage, kind, k = action.stage, action.kind.value, action.microbatch
        if kind == "F" and stage > 0:
            assert start >= there(stage - 1, "F", k, rank)
        if kind in "BI":
            assert start >= there(stage, "F", k, rank)
            assert stage == last or start >= there(stage + 1, "BI", k, rank)
        if kind == "W":
            assert start >= there(stage, "I", k, rank)
        if kind == "U":
            assert start >= there(stage, "BW", k, rank)
    for row, order in zip(trace.by_rank, schedule.ranks, strict=True):
        assert tuple(span.action for span in row) == order
        assert all(before.end <= after.start for before, after in pairwise(row))


@every_builder
@given(st.data())
def test_schedules_are_busy_for_the_sum_of_their_actions(name, data):
    # cost tables that lose a term, or time a full backward as its first half, fail here
    schedule = build(name, data.draw(SIZES[name]))
    costs = data.draw(costs_of(schedule))
    trace = pl.simulate(schedule, costs)
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_on(rank)
        work = schedule.num_microbatches * sum(costs.F[s] + costs.I[s] + costs.W[s] for s in stages)
        updates = sum(costs.U[a.stage] for a in schedule.ranks[rank] if a.kind is pl.Kind.U)
        assert trace.busy(rank) == work + updates
    assert trace.bubble_fraction == pytest.approx(
        1 - math.fsum(map(trace.busy, range(schedule.num_ranks))) / (trace.makespan * schedule.num_ranks)
    )


@every_builder
@given(st.data())
def test_schedules_lower_to_a_program_that_ends_when_every_send_blocks(name, data):
    schedule = build(name, data.draw(SIZES[name]))
    program = pl.lower(schedule)
    pl.validate_program(program)
    for order, instructions in zip(schedule.ranks, program.ranks, strict=True):
        assert tuple(step.action for step in instructions if len(step) == 1) == order  # a Run is just an action


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, (sizes, _) in GOLDEN.items() for size in sizes])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, "4", None])
def test_schedules_refuse_a_size_that_is_no_count(name, size, value):
    with pytest.raises(pl.SizeError, match=f"{size} must be"):
        build(name, {**GOLDEN[name][0], size: value})


@pytest.mark.parametrize(
    ("name", "sizes", "message"), [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_schedules_refuse_a_size_with_the_nearest_legal_one(name, sizes, message):
    with pytest.raises(pl.SizeError, match=message):
        build(name, sizes)


@every_builder
def test_schedules_say_where_they_come_from_and_what_sizes_they_take(name):
    text = " ".join(inspect.getdoc(pl.SCHEDULES[name]).split())
    assert any(source in text for source in (" et al. ", "arXiv", "DeepSeek", "Ours")), "name the source, or say Ours"
    assert "Any sizes from 1" in text or "Raises SizeError" in text, "say which sizes it takes"


def test_schedules_interleaved_with_one_stage_a_rank_is_1f1b():
    assert pl.interleaved(4, 7, stages_per_rank=1) == pl.one_f_one_b(4, 7)
