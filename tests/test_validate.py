"""Dependencies and validate: what must come first, and every reason why an order cannot run."""

import pytest

from pipelab import Action, Kind, Schedule, ScheduleError, gpipe, one_f_one_b, simulate, validate
from pipelab.dependencies import blocked, needs, waits


def reasons(text, **more):
    with pytest.raises(ScheduleError, match="cannot run") as caught:
        validate(Schedule.from_text(text, **more))
    return caught.value.reasons


def action(text):
    return Action.from_text(text)


@pytest.mark.parametrize(
    ("of", "expected"),
    [("0F1", []), ("1F1", ["0F1"]), ("2B1", ["2F1"]), ("1B1", ["1F1", "2B1"]), ("0B0", ["0F0", "1B0"])],
)
def test_needs_of_a_full_backward(of, expected):
    assert needs(action(of), gpipe(3, 2)) == tuple(map(action, expected))


def test_needs_of_an_action_that_is_not_there():
    with pytest.raises(ScheduleError, match="schedule 'gpipe' has no action 0W0"):
        needs(action("0W0"), gpipe(3, 2))


def test_needs_of_a_split_backward_beside_a_full_one():
    schedule = Schedule.from_text("0F0 0F1 0I0 0W0 0B1\n1F0 1F1 1B0 1I1 1W1")
    assert needs(action("0I0"), schedule) == (action("0F0"), action("1B0"))
    assert needs(action("0B1"), schedule) == (action("0F1"), action("1I1"))
    assert needs(action("1W1"), schedule) == (action("1I1"),)
    validate(schedule)


def test_valid_is_none():
    assert validate(one_f_one_b(4, 8)) is None


def test_all_violations_at_once():
    text = one_f_one_b(4, 4).to_text().replace("3F0 3B0", "3B0 3F0").replace("3B3", "3B3 3F4")
    assert reasons(text) == (
        "rank 3, position 8: 3F4 names micro-batch 4, but there are 4 (0 to 3)",
        "rank 3, position 0: 3B0 comes before 3F0 (a backward needs its own forward)",
    )


def test_message_counts_and_lists_the_reasons():
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule.from_text("0B0 0F0 0F0", name="swapped"))
    assert str(caught.value).splitlines() == [
        "schedule 'swapped' cannot run, 2 reasons:",
        "  0F0 appears 2 times",
        "  rank 0, position 0: 0B0 comes before 0F0 (a backward needs its own forward)",
    ]


def test_missing_doubled_and_both_forms():
    assert reasons("0F0 0F1 0B0 0I0 0W0\n1F1 1B1 1B1 1F0", num_microbatches=2) == (
        "1B1 appears 2 times",
        "rank 0: 0B0 and 0I0 and 0W0: B is I and W together, so write one or the other",
        "rank 0: 0B1 is missing",
        "rank 1: 1B0 is missing",
    )


def test_half_a_split_backward():
    assert reasons("0F0 0I0") == ("rank 0: 0W0 is missing (0I0 is there, so this backward is split)",)
    assert reasons("0F0 0W0") == ("rank 0: 0I0 is missing (0W0 is there, so this backward is split)",)


def test_w_before_its_i_and_u_before_its_gradient():
    assert reasons("0F0 0W0 0I0") == ("rank 0, position 1: 0W0 comes before 0I0 (the weight gradient needs its own I)",)
    assert reasons("0F0 0U0 0B0") == ("rank 0, position 1: 0U0 comes before 0B0 (an update needs the weight gradient)",)


def test_action_on_the_wrong_rank():
    assert reasons("0F0 0B0\n1F0 1B0 0F1 0B1 1F1 1B1") == (
        "rank 1, position 2: 0F1 belongs to stage 0, which is on rank 0",
        "rank 1, position 3: 0B1 belongs to stage 0, which is on rank 0",
    )


def test_stage_and_microbatch_out_of_range():
    order = (Action(0, Kind.F, 0), Action(0, Kind.B, 0), Action(1, Kind.F, 0), Action(0, Kind.F, 1))
    with pytest.raises(ScheduleError, match="names stage 1, but there are 1") as caught:
        validate(Schedule("too far", (order,), (0,), 1))
    assert "names micro-batch 1, but there are 1 (0 to 0)" in caught.value.reasons[1]


def test_a_microbatch_that_there_is_not_is_no_other_stages_first():
    # 0B1 of one micro-batch: what it would read is not what stage 1 makes of micro-batch 0
    assert reasons("0F0 0B1 1F0 1B0 0B0", num_microbatches=1) == (
        "rank 0, position 1: 0B1 names micro-batch 1, but there are 1 (0 to 0)",
    )


def test_validate_is_asked_about_a_schedule():
    with pytest.raises(ScheduleError, match=r"expected a Schedule, as pl.one_f_one_b\(4, 8\) makes one, got <Trace"):
        validate(simulate(gpipe(2, 2)))


def test_message_lists_the_first_hundred_reasons():
    with pytest.raises(ScheduleError) as caught:
        validate(Schedule.from_text("0F0 0B0", num_microbatches=300))
    assert len(caught.value.reasons) == 2 * 299
    lines = str(caught.value).splitlines()
    assert (len(lines), lines[-1]) == (102, "  and 498 more, in .reasons")


def test_rank_without_work():
    with pytest.raises(ScheduleError, match="rank 1 has nothing to do"):
        validate(Schedule("idle", (gpipe(1, 1).ranks[0], ()), (0,), 1))


def test_circle_is_named_rank_by_rank():
    # rank 0 wants the gradient of micro-batch 1 before it sends micro-batch 1 forward
    assert reasons("0F0 0B1 0F1 0B0\n1F0 1F1 1B1 1B0") == (
        "rank 0, position 1: 0B1 comes before 0F1 (a backward needs its own forward)",
    )
    assert reasons("0F1 0B1 0F0 0B0\n1F0 1B0 1F1 1B1") == (
        "rank 0, position 1: 0B1 waits for 1B1 at rank 1, position 3, which is never reached",
        "rank 1, position 0: 1F0 waits for 0F0 at rank 0, position 2, which is never reached",
    )


def test_neighbour_on_the_same_rank_but_later():
    assert reasons("0F0 1F0 1B0 0B0 1F1 0F1 1B1 0B1") == (
        "rank 0, position 4: 1F1 waits for 0F1 at rank 0, position 5, later in its own order",
    )


def test_blocked_says_where_each_rank_stops():
    assert blocked(one_f_one_b(4, 8)) == {}
    stuck = Schedule.from_text("0F1 0B1 0F0 0B0\n1F0 1B0 1F1 1B1")
    assert blocked(stuck) == {0: 1, 1: 4}
    assert blocked(Schedule.from_text("0B0 0F0")) == {0: 0}  # its own forward comes later: never


def test_waits_names_a_neighbours_value_or_ones_own():
    # rank 1 stops at once, because its backward stands before its own forward; rank 0 goes on as far as it can
    stuck = Schedule.from_text("0F0 0B0\n1B0 1F0")
    assert blocked(stuck) == {0: 1, 1: 2}
    assert list(waits(stuck)) == [(0, 1, 2), (1, 2, 3)]  # 0B0 waits for 1B0, 1B0 for 1F0


def test_first_action_of_all_may_be_what_others_wait_for():
    # stage 1 on rank 0: its forward is the plan's first action, and the circle goes through it
    validate(Schedule.from_text("1F0 1B0\n0F0 0B0"))
    (circle,) = reasons("1F0 1B0\n0B0 0F0")
    assert "rank 1" in circle
    assert "0B0" in circle


def test_stage_on_a_rank_that_is_not_there():
    with pytest.raises(ScheduleError, match="stage 1 is placed on rank 2, but there are 2 ranks"):
        validate(Schedule("misplaced", gpipe(2, 1).ranks, (0, 2)))
