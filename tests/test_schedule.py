"""Actions and schedules: what they say, how they are read and written."""

import pytest

from pipelab import Action, Kind, Schedule, ScheduleError, SizeError, gpipe, naive, one_f_one_b
from pipelab.schedule import placed

# Narayanan et al. 2021, figure 3, top: 1F1B with 4 devices and 8 micro-batches (0-based here)
ONE_F_ONE_B_4_8 = """
rank 0: 0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7
rank 1: 1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7
rank 2: 2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7
rank 3: 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7
"""


@pytest.mark.parametrize("kind", list(Kind))
def test_action_text_round_trip(kind):
    action = Action(12, kind, 7)
    assert str(action) == f"12{kind.name}7"
    assert Action.from_text(str(action)) == action


@pytest.mark.parametrize("word", ["", "F0", "2X0", "2F", "-1F0", "2F0 2F1", "2f0", "2F" + 5000 * "9", None, 3])
def test_action_refuses_other_words(word):
    with pytest.raises(ScheduleError, match="is no action: write stage, one of F, B, I, W, U, and micro-batch"):
        Action.from_text(word)


def test_one_f_one_b_order_is_the_published_one():
    assert one_f_one_b(4, 8) == Schedule.from_text(ONE_F_ONE_B_4_8)


def test_gpipe_order():
    assert gpipe(2, 3) == Schedule.from_text("0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2")


def test_naive_order():
    assert naive(2, 2) == Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1")


@pytest.mark.parametrize("builder", [naive, gpipe, one_f_one_b])
@pytest.mark.parametrize("bad", [0, -3, 1.5, True, "4", None, float("nan"), float("inf")])
def test_builders_refuse_sizes(builder, bad):
    with pytest.raises(SizeError, match="num_ranks must be"):
        builder(bad, 4)
    with pytest.raises(SizeError, match="num_microbatches must be"):
        builder(4, bad)


def test_text_round_trip_keeps_everything():
    schedule = Schedule("mine", one_f_one_b(2, 3).ranks, (0, 1), 3)
    again = Schedule.from_text(schedule.to_text())
    assert again == schedule
    assert (again.name, again.placement, again.num_microbatches) == ("mine", (0, 1), 3)


def test_text_reads_comments_commas_and_rows_without_a_label():
    assert Schedule.from_text("# by hand\n0F0, 0B0  # the first rank\n\n1F0 1B0\n") == naive(2, 1)


def test_text_names_the_place_of_an_unknown_action():
    with pytest.raises(ScheduleError, match=r"line 2, position 1: '1Q0' is no action"):
        Schedule.from_text("rank 0: 0F0 0B0\nrank 1: 1F0 1Q0")


def test_text_refuses_rows_out_of_order():
    with pytest.raises(ScheduleError, match="line 1: expected the row of rank 0, found that of rank 1"):
        Schedule.from_text("rank 1: 1F0 1B0\nrank 0: 0F0 0B0")


def test_text_refuses_nothing():
    with pytest.raises(ScheduleError, match="the text holds no schedule"):
        Schedule.from_text("# only a comment\n")


def test_stages_without_a_gap():
    with pytest.raises(ScheduleError, match="actions up to stage 3 but none for stages 1, 2; stages count from 0"):
        Schedule.from_text("0F0 0B0\n3F0 3B0")


def test_csv_round_trip(tmp_path):
    path = tmp_path / "one_f_one_b.csv"
    one_f_one_b(3, 5).to_csv(path)
    assert path.read_text().splitlines()[2] == "2F0,2B0,2F1,2B1,2F2,2B2,2F3,2B3,2F4,2B4"
    again = Schedule.from_csv(path)
    assert again == one_f_one_b(3, 5)
    assert again.name == "one_f_one_b"


def test_csv_drops_updates(tmp_path):
    Schedule.from_text("0F0 0B0 0U0").to_csv(tmp_path / "s.csv")
    assert (tmp_path / "s.csv").read_text() == "0F0,0B0\n"


def test_csv_reads_idle_cells_communication_and_overlapped_pairs(tmp_path):
    # the forms in which torch.distributed.pipelining 2.13 dumps a lowered schedule
    path = tmp_path / "lowered.csv"
    path.write_text(
        "0UNSHARD,,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
        "1RECV_F0,1F0,1RECV_F1,(1F1;1B0)OVERLAP_F_B,1SEND_B0,1B1,1SEND_B1,,,,,\n"
    )
    assert Schedule.from_csv(path) == gpipe(2, 2)


def test_csv_leaves_blank_lines_at_the_end_out(tmp_path):
    path = tmp_path / "blank.csv"
    path.write_text("0F0,0B0\n1F0,1B0\n\n,,\n")
    assert Schedule.from_csv(path) == gpipe(2, 1)


def test_schedule_refuses_to_have_nothing_to_do():
    with pytest.raises(ScheduleError, match="schedule 'idle' has no actions"):
        Schedule("idle", ((), ()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no schedule: expected one row a rank"),
        ("loss,accuracy\n0.5,0.9\n", "row 0, column 0: 'loss' is no action"),
        ("0F0,0B0\n1F0,7\n", "row 1, column 1: '7' is no action"),
    ],
)
def test_csv_of_another_shape(tmp_path, text, message):
    path = tmp_path / "other.csv"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=message):
        Schedule.from_csv(path)


def test_table_marks_a_place():
    text = one_f_one_b(2, 2).table(mark=(1, 2))
    assert text.splitlines()[1] == "rank 1   1F0  1B0 [1F1] 1B1"
    assert one_f_one_b(2, 2).table(mark=Action(1, Kind.F, 1)) == text


def test_schedule_prints_as_its_table():
    assert str(naive(2)) == ("naive: 2 ranks, 1 micro-batch, stages on ranks 0 1\nrank 0   0F0  0B0\nrank 1   1F0  1B0")
    assert repr(naive(2)) == "<Schedule naive: 2 ranks, 1 micro-batch, stages on ranks 0 1; 4 actions>"


def test_schedules_are_plans_to_compare_and_to_keep_in_sets():
    renamed = Schedule("other name", gpipe(2, 2).ranks)
    assert {renamed, gpipe(2, 2)} == {renamed}
    assert gpipe(2, 1) == one_f_one_b(2, 1)
    assert gpipe(2, 2) != one_f_one_b(2, 2)


def test_a_rank_may_hold_several_stages():
    schedule = Schedule.from_text("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0")
    assert schedule.placement == (0, 1, 1, 0)
    assert schedule.stages_on(0) == (0, 3)
    assert schedule.stages_per_rank == 2
    assert schedule.is_last_stage(3)
    assert not schedule.is_last_stage(1)


F0 = Action(0, Kind.F, 0)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (None, "takes a row of actions for every rank, got None"),
        ((F0,), "rank 0, position 0: expected an Action .*, got 0;"),
        ([["0F0", "0B0"]], "rank 0, position 0: expected an Action .*, got '0F0'; Schedule.from_text reads 0F0"),
        ([[F0, (0, "B", 0)]], r"rank 0, position 1: expected an Action .*, got \(0, 'B', 0\)"),
        ([[F0], [Action(1, "F", 0)]], "rank 1, position 0: expected an Action of two ints from 0 and a Kind"),
        ([[Action(-1, Kind.F, 0)]], r"expected an Action of two ints from 0 .*, got \(-1, "),
        ([[Action(0, Kind.F, 0.5)]], "expected an Action of two ints"),
        (
            [[Action(0, Kind.F, 10**8)]],
            "1 actions for 1 stages and 100,000,001 micro-batches: is a number mistyped",
        ),
        ([[Action(10**8, Kind.F, 0)]], "for 100,000,001 stages and 1 micro-batches: is a number mistyped"),
    ],
)
def test_schedule_refuses_what_is_no_action(ranks, message):
    with pytest.raises(ScheduleError, match=message):
        Schedule("wrong", ranks)


@pytest.mark.parametrize("placement", [("0",), (-1,), (0.5,), (None,)])
def test_schedule_refuses_a_placement_on_no_rank(placement):
    with pytest.raises(SizeError, match="the rank of stage 0 must be"):
        Schedule("wrong", gpipe(1, 1).ranks, placement)


def test_text_keeps_a_name_with_a_colon():
    assert Schedule.from_text(Schedule("mine: 2", gpipe(2, 1).ranks).to_text()).name == "mine: 2"


def test_csv_saved_by_a_spreadsheet_and_what_is_no_text(tmp_path):
    path = tmp_path / "sheet.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n")  # with a byte order mark
    assert Schedule.from_csv(path) == gpipe(1, 1)
    for junk in (b"\xff\xfe0\x00F\x00", b"x" * 200_000):
        path.write_bytes(junk)
        with pytest.raises(ScheduleError, match="is no CSV text"):
            Schedule.from_csv(path)


def test_placed_in_a_loop_and_in_a_v():
    assert placed(3, 2) == (0, 1, 2, 0, 1, 2)
    assert placed(3, 3, "v") == (0, 1, 2, 2, 1, 0, 0, 1, 2)
    with pytest.raises(ScheduleError, match="in a 'loop' or a 'v', got 'w'"):
        placed(3, 2, "w")
