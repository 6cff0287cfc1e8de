"""The builder: what is placed can run, what may not be placed says why, and a level can be won, but not by accident."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab.action import Action
from pipelab.costs import Costs, Link
from pipelab.errors import CostError, ScheduleError, SizeError
from pipelab.memory import peak_activations
from pipelab.schedule import Schedule
from pipelab.schedules import SCHEDULES, gpipe, interleaved, naive, one_f_one_b, search
from pipelab.simulate import simulate
from pipelab.trace import Trace
from pipelab.widgets.build import Builder, build, exported
from pipelab.widgets.build_finish import RULES, finish
from pipelab.widgets.build_levels import LEVELS, Level
from pipelab.widgets.build_model import Board, Task, read
from pipelab.widgets.build_score import best_known, recognised, score

GPIPE, ONE_F_ONE_B, SOONEST = RULES
times = st.sampled_from([0.0, 0.5, 1.0, 2.0])
any_task = st.builds(
    Task,
    num_ranks=st.integers(1, 4),
    num_microbatches=st.integers(1, 5),
    stages_per_rank=st.integers(1, 3),
    split_backward=st.booleans(),
    costs=st.builds(
        Costs,
        F=times,
        I=times,
        W=times,
        comm=st.sampled_from([0.0, 0.3, Link(0.1, 10.0)]),
        boundary_bytes=st.just(3.0),
    ),
    memory_limit=st.sampled_from([None, 1.0, 2.0, 3.5]),
)


def placed(schedule: Schedule, task: Task) -> Board:
    """A board on which `schedule` was placed, in the order in which its actions start."""
    board = Board(task)
    for span in sorted(simulate(schedule).spans, key=lambda span: (span.start, span.end)):
        board = board.place(span.action)
    return board


def played(task: Task, seed: int, moves: int) -> Board:
    """A board after up to `moves` random legal moves."""
    choose, board = random.Random(seed), Board(task)
    for _ in range(moves):
        legal = [action for rank in range(task.num_ranks) for action in board.moves_of(rank)]
        if not legal:
            break
        board = board.place(choose.choice(legal))
    return board


def trace_of(board: Board) -> Trace:
    assert board.trace is not None
    return board.trace


# --- the board -------------------------------------------------------------------------------------------------------


@given(any_task, st.integers(0, 99))
def test_build_model_places_only_what_can_run_and_keep_to_the_limit(task: Task, seed: int) -> None:
    board = played(task, seed, 999)
    if not board.complete:  # only memory can stop a play
        assert task.memory_limit is not None
        return
    schedule = task.schedule("the same", board.moves)
    assert trace_of(board).spans == simulate(schedule, task.costs).spans  # which also judges the order
    if task.memory_limit is not None:
        assert max(peak_activations(trace_of(board))) <= task.memory_limit + 1e-9


@given(any_task, st.integers(0, 99), st.integers(1, 20))
def test_build_model_knows_times_that_later_moves_do_not_change(task: Task, seed: int, moves: int) -> None:
    whole = played(task, seed, 999)
    early = Board(task, whole.moves[:moves])
    times = {span.action: (span.start, span.end) for span in trace_of(whole).spans}
    assert {span.action: (span.start, span.end) for span in trace_of(early).spans} == {
        action: times[action] for action in early.moves
    }


@given(any_task, st.integers(0, 99), st.integers(0, 20), st.data())
def test_build_model_takes_a_move_or_says_why_not(task: Task, seed: int, moves: int, data: st.DataObject) -> None:
    board = played(task, seed, moves)
    action = Action(data.draw(st.integers(0, 13)), data.draw(st.sampled_from("FBIWU")), data.draw(st.integers(0, 6)))
    action = Action.from_text(f"{action.stage}{action.kind}{action.microbatch}")
    rank = data.draw(st.none() | st.integers(0, 5))
    reason = board.why_not(action, rank)
    if reason is None:
        assert board.place(action, rank).moves == (*board.moves, action)
    else:
        with pytest.raises(ScheduleError, match=rf"\A{action} [^\n]*\.\Z"):
            board.place(action, rank)


LIMITED = Task(2, 3, memory_limit=2)


@pytest.mark.parametrize(
    ("task", "before", "move", "sentence"),
    [
        (
            Task(2, 2), "", "1F0",
            "1F0 needs the activation that 0F0 makes on rank 0, which is not placed yet; 0F0 can be next, and would "
            "end at 1.",
        ),
        (
            Task(3, 2), "0F0 1F0 2F0 0F1", "0B0",
            "0B0 needs the gradient that 1B0 makes on rank 1, which is not placed yet; 2B0 can be next, and would end "
            "at 5.",
        ),
        (
            Task(2, 2), "0F0", "1B0",
            "1B0 needs its own forward 1F0 on rank 1, which is not placed yet; 1F0 can be next, and would end at 2.",
        ),
        (
            Task(1, 1, split_backward=True), "0F0", "0W0",
            "0W0 needs its own input gradient 0I0 on rank 0, which is not placed yet; 0I0 can be next, and would end "
            "at 2.",
        ),
        (LIMITED, "0F0 0F1", "0F2", "0F2 would make rank 0 keep 3 micro-batches, but the memory limit is 2."),
        (Task(2, 2), "", "rank 1: 0F0", "0F0 is of stage 0, which is on rank 0, not on rank 1."),
        (Task(2, 2), "0F1 0F0", "0F0", "0F0 is on rank 0 already, at position 1."),
        (Task(2, 2), "", "2F0", "2F0 names stage 2, but there are 2 (from 0)."),
        (Task(2, 2), "", "0F2", "0F2 names micro-batch 2, but there are 2 (from 0)."),
        (Task(2, 2), "0F0", "0I0", "0I0 is no move here, where a backward is 0B0."),
        (Task(2, 2, split_backward=True), "0F0", "0B0", "0B0 is no move here, where a backward is 0I0 and 0W0."),
    ],
)  # fmt: skip
def test_build_model_says_in_a_sentence_why_a_move_is_illegal(
    task: Task, before: str, move: str, sentence: str
) -> None:
    board = Board(task)
    for action, rank in read(before):
        board = board.place(action, rank)
    ((action, rank),) = read(move)
    with pytest.raises(ScheduleError) as refused:
        board.place(action, rank)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("text", ["foo", "2X0", "F0", "0F0 bar", "rank x: 0F0", "1.5F0", "0F-1", "0F9999999"])
def test_build_model_refuses_words_that_are_no_move(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"is no move: write stage, kind and micro-batch, as in 2F0"):
        list(read(text))


def test_build_model_reads_moves_as_people_type_them() -> None:
    f, b = Action.from_text("0F0"), Action.from_text("1B12")
    assert list(read(" 0f0, 1b12 ")) == [(f, None), (b, None)]
    assert list(read("Rank 1: 0F0 1B12")) == [(f, 1), (b, 1)]
    assert list(read("1:0F0")) == [(f, 1)]
    assert list(read("  ")) == []


def test_build_model_takes_back_the_last_move() -> None:
    board = Board(Task(2, 2)).place(Action.from_text("0F0"))
    assert board.place(Action.from_text("1F0")).undo() == board
    assert board.undo() == Board(Task(2, 2))
    assert Board(Task(2, 2)).undo() == Board(Task(2, 2))


def test_build_model_offers_the_first_micro_batch_that_is_ready() -> None:
    board = Board(Task(2, 3))
    assert list(map(str, board.moves_of(0))) == ["0F0"]
    assert list(map(str, board.moves_of(1))) == []
    for move in ("0F2", "0F0", "1F2"):
        board = board.place(Action.from_text(move))
    assert list(map(str, board.moves_of(0))) == ["0F1"]
    assert list(map(str, board.moves_of(1))) == ["1F0", "1B2"]


@pytest.mark.parametrize(
    ("moves", "sentence"),
    [
        ("0F0", "0F0 runs on rank 0 from 0 to 1."),
        ("0F0 1F0 1B0 0B0", "0B0 runs on rank 0 from 4 to 6; before it the rank waits for 3. Everything is placed."),
    ],
)
def test_build_model_tells_what_a_move_does(moves: str, sentence: str) -> None:
    board = Board(Task(2, 1))
    for action, _ in read(moves):
        board = board.place(action)
    assert board.told() == sentence


def test_build_model_tells_when_memory_leaves_no_move() -> None:
    # two stages a rank count half each: two halves of different micro-batches fill rank 0, and neither can go on there
    board = Board(Task(1, 2, stages_per_rank=2, memory_limit=1))
    for action, _ in read("0F0 0F1"):
        board = board.place(action)
    assert board.told().endswith("Now the memory limit leaves no move: undo some.")


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((0, 1), SizeError, "num_ranks must be at least 1, got 0"),
        ((2, 1.5), SizeError, "num_microbatches must be a whole number, got 1.5"),
        ((2, 2, 0), SizeError, "stages_per_rank must be at least 1"),
        ((2, 2, 1, False, Costs(F=(1, 2, 3))), CostError, "F has 3 entries, but there are 2 stages"),
        ((2, 2, 1, False, Costs(), 0.5), ScheduleError, r"under memory_limit=0.5.*give at least 1"),
        ((2, 2, 1, False, Costs(), "2"), CostError, "memory_limit must be a number, got '2'"),
        ((2, 2, 1, False, 3), CostError, "costs must be Costs, as in .*, got 3"),
    ],
)
def test_build_model_refuses_tasks_that_cannot_be(
    arguments: tuple[object, ...], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Task(*arguments)  # type: ignore[arg-type]


# --- finish for me ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 5), (4, 4), (4, 8), (5, 3)])
def test_build_finish_by_two_of_its_rules_is_gpipe_and_1f1b(p: int, m: int) -> None:
    assert trace_of(finish(Board(Task(p, m)), GPIPE)).schedule == gpipe(p, m)
    assert trace_of(finish(Board(Task(p, m)), ONE_F_ONE_B)).schedule == one_f_one_b(p, m)


def test_build_finish_starts_whatever_can_start() -> None:
    # rank 0 goes on with forwards until the first gradient is back, at 10, and then turns to that
    order = trace_of(finish(Board(Task(4, 12)), SOONEST)).schedule.ranks[0]
    assert [str(action) for action in order[:11]] == [*(f"0F{k}" for k in range(10)), "0B0"]


@given(any_task, st.integers(0, 99), st.integers(0, 30), st.sampled_from(list(RULES)))
def test_build_finish_goes_on_from_any_board_or_says_that_it_is_stuck(
    task: Task, seed: int, moves: int, rule: str
) -> None:
    board = played(task, seed, moves)
    if task.memory_limit is not None:
        try:
            finish(board, rule)
        except ScheduleError:
            with pytest.raises(ScheduleError, match="cannot be finished from here under the memory limit"):
                finish(board, rule)
            return
    finished = finish(board, rule)
    assert finished.complete
    assert finished.moves[: len(board.moves)] == board.moves
    assert finished.helped == set(finished.moves) - set(board.moves)
    again = Board(task)
    for action in finished.moves:
        again = again.place(action)  # every one of them legal


# --- what it is worth ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["naive", "gpipe", "one_f_one_b", "zb_h1", "zb_h2"])
def test_build_score_recognises_published_schedules(name: str) -> None:
    schedule = SCHEDULES[name](3, 6)
    board = placed(schedule, Task(3, 6, split_backward=schedule.splits_backward))
    assert recognised(trace_of(board).schedule) == (name,)
    assert score(board)[0] == f"You built {name}."


def test_build_score_recognises_virtual_stages() -> None:
    board = placed(interleaved(2, 4, 2), Task(2, 4, stages_per_rank=2))
    assert recognised(trace_of(board).schedule) == ("interleaved",)


def test_build_score_does_not_recognise_another_order() -> None:
    board = placed(gpipe(2, 2), Task(2, 2))
    moves = [Action.from_text(text) for text in ["0F1", "0F0", "1F0", "1F1", "1B0", "1B1", "0B0", "0B1"]]
    other = replace(board, moves=tuple(moves))
    assert recognised(trace_of(other).schedule) == ()
    assert score(other)[0] == "That is none of the published schedules."


def test_build_score_compares_with_the_best_known() -> None:
    # naive: m p (F + B) = 18; the best: (m + p - 1)(F + B) = 12, with bubbles of 1/2 and (p - 1)/(m + p - 1)
    assert score(placed(naive(2, 3), Task(2, 3))) == (
        "You built naive.",
        "Makespan 18: 50 % longer than the best that is known, 12.",
        "Bubble 50.0 % of makespan × 2 ranks; in the best, 25.0 %.",
        "Micro-batches kept on the fullest rank: 1; in the best, 2.",
    )
    assert "as short as the best that is known" in score(placed(one_f_one_b(2, 3), Task(2, 3)))[1]


def test_build_score_waits_for_the_last_move() -> None:
    assert score(placed(gpipe(2, 2), Task(2, 2)).undo()) == ()


# --- the levels ------------------------------------------------------------------------------------------------------


def numbered(level: Level) -> str:
    return f"{LEVELS.index(level)}: {level.title}"


def test_build_levels_are_ten_from_one_micro_batch_to_zero_bubble() -> None:
    assert len(LEVELS) == 10
    assert (LEVELS[0].task.num_ranks, LEVELS[0].task.num_microbatches) == (2, 1)
    last = LEVELS[-1]
    trace = trace_of(finish(Board(last.task), SOONEST))
    assert last.reached(trace)
    for row in trace.by_rank:  # no rank waits between its first start and its last end
        assert row[-1].end - row[0].start == sum(span.duration for span in row)


@pytest.mark.parametrize("level", LEVELS, ids=numbered)
def test_build_levels_can_be_reached_and_ask_for_the_best_that_search_finds(level: Level) -> None:
    task = level.task
    found = search(
        task.num_ranks,
        task.num_microbatches,
        task.costs,
        memory_limit=task.num_microbatches if task.memory_limit is None else task.memory_limit,
        placement="one" if task.stages_per_rank == 1 else "loop",
        objective="makespan" if level.span is None else "span",
        split_backward=task.split_backward,
    )
    board = Board(task)
    for span in sorted(simulate(found, task.costs).spans, key=lambda span: (span.start, span.end)):
        board = board.place(span.action)  # the memory limit included
    trace = trace_of(board)
    assert level.reached(trace)
    assert level.verdict(board) == "The goal is reached, by your own moves."
    assert level.span in (None, trace.longest_rank_span)
    assert level.makespan in (None, trace.makespan)  # so a better one is not known


@pytest.mark.parametrize("level", LEVELS[1:], ids=numbered)
def test_build_levels_are_not_reached_one_micro_batch_at_a_time(level: Level) -> None:
    board = Board(level.task)
    for action in sorted(level.task.actions, key=lambda action: action.microbatch):
        board = board.place(action)
    assert board.complete
    assert level.verdict(board).startswith("The goal is not reached yet.")


@pytest.mark.parametrize("level", LEVELS[3:], ids=numbered)
def test_build_levels_are_not_reached_by_accident(level: Level) -> None:
    plays = [played(level.task, seed, 999) for seed in range(40)]
    won = [board for board in plays if board.complete and level.reached(trace_of(board))]
    assert len(won) <= 2
    assert not level.reached(trace_of(finish(Board(level.task), GPIPE)))


def test_build_levels_do_not_count_what_a_rule_has_placed() -> None:
    level = LEVELS[1]
    board = finish(Board(level.task), ONE_F_ONE_B)
    assert "but a rule has placed some of it" in level.verdict(board)
    for action in reversed(board.moves):
        board = board.undo()
        assert action not in board.helped
    assert not board.helped
    assert level.verdict(placed(one_f_one_b(2, 2), level.task)) == "The goal is reached, by your own moves."


# --- the widget ------------------------------------------------------------------------------------------------------


def press(builder: Builder, *moves: str) -> None:
    for move in moves:
        next(button for button in builder.moves.values() if button.description == move).click()


def test_build_places_by_click_and_by_typing() -> None:
    builder = build(2, 1)
    press(builder, "0F0")
    builder.typed.value = "1f0 1B0"
    assert builder.typed.value == ""
    assert list(map(str, builder.board.moves)) == ["0F0", "1F0", "1B0"]
    assert builder.picture.value.count("<rect") == 3
    assert "1B0 runs on rank 1 from 2 to 4" in builder.says.value


def test_build_marks_the_moves_that_are_legal_and_says_why_others_are_not() -> None:
    builder = build(2, 1)
    legal = {button.description: "pl-legal" in button._dom_classes for button in builder.moves.values()}
    assert legal == {"0F0": True, "0B0": False, "1F0": False, "1B0": False}
    press(builder, "1F0")
    assert "Not possible: 1F0 needs the activation that 0F0 makes on rank 0" in builder.says.value
    assert builder.board.moves == ()
    press(builder, "0F0")
    assert [b.disabled for b in builder.moves.values()] == [True, False, False, False]  # 0F is done


def test_build_stops_typing_at_the_first_illegal_move() -> None:
    builder = build(2, 1)
    builder.typed.value = "0F0 0B0 1F0"
    assert list(map(str, builder.board.moves)) == ["0F0"]
    assert "Not possible: 0B0 needs the gradient that 1B0 makes" in builder.says.value


def test_build_undoes_and_starts_again() -> None:
    builder = build(2, 2)
    assert builder.undo.disabled
    builder.place("0F0 0F1")
    builder.undo.click()
    assert list(map(str, builder.board.moves)) == ["0F0"]
    builder.again.click()
    assert builder.board.moves == ()
    assert builder.picture.value == ""


def test_build_finishes_scores_and_exports(tmp_path: Path) -> None:
    builder = build(4, 8)
    assert builder.run.disabled
    with pytest.raises(ScheduleError, match="64 moves left to place"):
        _ = builder.schedule
    builder.rule.value = ONE_F_ONE_B
    builder.finish.click()
    assert builder.schedule == one_f_one_b(4, 8)
    assert "You built one_f_one_b" in builder.score.value
    assert not builder.run.disabled
    text, csv = (part.split("</pre>")[0] for part in builder.export.value.split("<pre>")[1:])
    assert Schedule.from_text(text) == one_f_one_b(4, 8)
    one_f_one_b(4, 8).to_csv(tmp_path / "torch.csv")
    assert csv == (tmp_path / "torch.csv").read_text().strip()


def test_build_says_where_a_rule_is_stuck() -> None:
    builder = build(1, 2, stages_per_rank=2, memory_limit=1)
    builder.place("0F0 0F1")
    builder.finish.click()
    assert "Not possible: by this rule the board cannot be finished" in builder.says.value


def test_build_goes_from_level_to_level() -> None:
    builder = build(level=0)
    assert "Finish within a makespan of 6." in builder.task.value
    builder.place("0F0 1F0 1B0 0B0")
    assert "The goal is reached, by your own moves." in builder.score.value
    builder.levels.value = 6
    assert builder.board == Board(LEVELS[6].task)
    assert len(builder.moves) == 8  # F and B of two stages on two ranks
    assert builder.score.value == ""
    builder.ran.value = "what ran on the other level"
    builder.levels.value = 0
    assert builder.ran.value == ""


def test_build_goes_from_ones_own_board_to_a_level_and_back() -> None:
    builder = build(2, 3)
    assert builder.levels.label == "a board of your own"  # it stood in the list, and the field was empty
    own = builder.levels.value
    builder.levels.value = 0
    assert "Finish within a makespan of 6." in builder.task.value
    builder.levels.value = own
    assert builder.board == Board(Task(2, 3))


@pytest.mark.timeout(60)
def test_build_runs_for_real_below_its_prediction() -> None:
    builder = build(2, 2)
    builder.rule.value = GPIPE
    builder.finish.click()
    builder.run.click()
    words, predicted, paced = builder.ran.value.split("<svg")
    assert "One step ran on 2 processes that emulate accelerators: every gradient equals plain training" in words
    assert "built, 2 ranks, 2 micro-batches: simulated" in predicted
    assert "built, 2 ranks, 2 micro-batches: paced" in paced
    assert not builder.run.disabled
    builder.undo.click()
    assert builder.ran.value == ""


def test_build_stores_a_picture_and_stable_text() -> None:
    builder = build(2, 1)
    assert "image/png" not in builder._repr_mimebundle_()
    builder.place("0F0")
    assert "image/png" in builder._repr_mimebundle_()
    assert repr(builder) == "build(2, 1): 1 of 4 moves placed"


def test_build_labels_every_control() -> None:
    builder = build(2, 2)
    controls = [builder.levels, builder.typed, builder.undo, builder.again, builder.rule, builder.finish]
    labels = [control.description for control in (*controls, builder.clock, builder.run, *builder.moves.values())]
    assert all(labels)
    assert len(set(labels)) == len(labels)


def test_build_works_where_actions_take_no_time() -> None:
    builder = build(2, 1, costs=Costs(F=0, I=0, W=0))
    builder.place("0F0 1F0 1B0 0B0")
    assert "It takes no time, so there is nothing to compare." in builder.score.value
    builder.run.click()
    assert "It did not run: a trial needs actions that take time" in builder.ran.value


def test_build_refuses_half_a_size_and_a_level_beside_sizes() -> None:
    with pytest.raises(SizeError, match="needs both num_ranks and num_microbatches"):
        build(2)
    with pytest.raises(SizeError, match="level 3 brings its own task"):
        build(2, 2, level=3)
    with pytest.raises(SizeError, match="level must be a whole number from 0 to 9, got 10"):
        build(level=10)


def test_build_exports_what_torch_can_read() -> None:
    assert "0F0,0I0,0W0" in exported(Schedule.from_text("0F0 0I0 0W0"))


def test_build_best_known_keeps_to_the_limit_and_is_no_worse_than_what_is_published() -> None:
    task = Task(4, 8, split_backward=True, memory_limit=4)
    assert max(peak_activations(best_known(task))) <= 4
    assert best_known(task).makespan <= simulate(SCHEDULES["zb_h1"](4, 8)).makespan
