"""lower: sends and receives in places where even blocking sends cannot hang."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import Action, Program, Schedule, ScheduleError, gpipe, lower, naive, one_f_one_b, validate_program
from pipelab.lower import Receive, Run, Send


def test_1f1b_with_receives_just_before_use_hangs_at_two_ranks():
    # the story of the module: both ranks stand at a send, and neither has reached its receive
    f, b = Action.from_text, Action.from_text
    rank0 = [Run(f("0F0")), Send(f("0F0"), 1), Run(f("0F1")), Send(f("0F1"), 1)]
    rank0 += [Receive(b("1B0"), 1), Run(b("0B0")), Receive(b("1B1"), 1), Run(b("0B1"))]
    rank1 = [Receive(f("0F0"), 0), Run(f("1F0")), Run(b("1B0")), Send(b("1B0"), 0)]
    rank1 += [Receive(f("0F1"), 0), Run(f("1F1")), Run(b("1B1")), Send(b("1B1"), 0)]
    with pytest.raises(ScheduleError, match="hangs when every send blocks") as caught:
        validate_program(Program(one_f_one_b(2, 2), (tuple(rank0), tuple(rank1))))
    assert caught.value.reasons == (
        "rank 0, position 3: waits to send 0F1 to 1",
        "rank 1, position 3: waits to send 1B0 to 0",
    )


def test_a_send_to_a_rank_that_has_ended_hangs():
    program = lower(gpipe(2, 1))
    twice = (program.ranks[0] + program.ranks[0][1:2], program.ranks[1])
    assert isinstance(twice[0][-1], Send)
    with pytest.raises(ScheduleError, match="hangs when every send blocks") as caught:
        validate_program(Program(program.schedule, twice))
    assert caught.value.reasons == (f"rank 0, position {len(twice[0]) - 1}: waits to send 0F0 to 1",)


def test_a_value_used_before_it_is_received():
    program = lower(gpipe(2, 1))
    early = (program.ranks[0], (program.ranks[1][1], program.ranks[1][0], *program.ranks[1][2:]))
    with pytest.raises(ScheduleError, match="rank 1, position 0: 1F0 runs before 0F0 is received"):
        validate_program(Program(program.schedule, early))


def test_a_program_that_leaves_actions_out_or_changes_their_order():
    program, f = lower(gpipe(2, 2)), Action.from_text
    with pytest.raises(ScheduleError, match="does not run its schedule, 2 reasons") as caught:
        validate_program(Program(program.schedule, ()))
    assert caught.value.reasons[1].startswith("rank 1 runs 0 actions, the schedule has 4,")
    alone = gpipe(1, 2)
    swapped = tuple(map(Run, map(f, ("0F0", "0F1", "0B1", "0B0"))))
    with pytest.raises(ScheduleError, match=r"rank 0 runs 4 actions, .* has 4, and the first 2 are the same"):
        validate_program(Program(alone, (swapped,)))


def test_a_schedule_is_no_program():
    with pytest.raises(ScheduleError, match=r"expected a Program, as pl.lower\(schedule\) makes one, got <Schedule"):
        validate_program(gpipe(2, 2))


def test_lowered_1f1b_by_hand():
    assert str(lower(one_f_one_b(2, 2))).splitlines() == [
        "rank 0: 0F0, send 0F0 to 1, 0F1, send 0F1 to 1, receive 1B0 from 1, 0B0, receive 1B1 from 1, 0B1",
        "rank 1: receive 0F0 from 0, receive 0F1 from 0, 1F0, 1B0, send 1B0 to 0, 1F1, 1B1, send 1B1 to 0",
    ]


@given(
    builder=st.sampled_from([naive, gpipe, one_f_one_b]),
    num_ranks=st.integers(1, 7),
    num_microbatches=st.integers(1, 9),
)
def test_every_program_makes_progress_and_keeps_the_order(builder, num_ranks, num_microbatches):
    schedule = builder(num_ranks, num_microbatches)
    program = lower(schedule)
    validate_program(program)
    runs = tuple(tuple(i.action for i in order if isinstance(i, Run)) for order in program.ranks)
    assert runs == schedule.ranks
    sends = sum(isinstance(i, Send) for order in program.ranks for i in order)
    assert sends == 2 * (num_ranks - 1) * num_microbatches


def test_a_rank_sends_itself_nothing():
    program = lower(Schedule.from_text("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0"))
    validate_program(program)
    assert sum(isinstance(i, Send) for order in program.ranks for i in order) == 4


def test_an_invalid_schedule_is_not_lowered():
    with pytest.raises(ScheduleError, match="0B0 is missing"):
        lower(Schedule.from_text("0F0"))


def test_the_first_action_of_all_may_be_a_reader():
    # stage 1 on rank 0: its forward has index 0, and waits for a message
    program = lower(Schedule.from_text("1F0 1B0\n0F0 0B0"))
    assert str(program).splitlines()[0] == "rank 0: receive 0F0 from 1, 1F0, 1B0, send 1B0 to 1"
    validate_program(program)
