"""simulate and Trace: times by hand, and the numbers that are read off a trace."""

import json
from itertools import pairwise

import pytest

from pipelab import (
    SCHEDULES,
    Action,
    CostError,
    Costs,
    Kind,
    Link,
    Schedule,
    ScheduleError,
    SizeError,
    gpipe,
    naive,
    one_f_one_b,
    pipedream,
    simulate,
)
from pipelab.simulate import in_order_of_start
from pipelab.trace import Trace

# Ranks 0 and 1, two micro-batches, F = 1, B = 2, one hop takes 0.5. Worked out with pencil and paper:
#   rank 0  0F0 0-1     0F1 1-2                      0B0 5-7       0B1 7.5-9.5
#   rank 1       1F0 1.5-2.5  1B0 2.5-4.5  1F1 4.5-5.5  1B1 5.5-7.5 ...
BY_HAND = {
    "0F0": (0, 1),
    "0F1": (1, 2),
    "1F0": (1.5, 2.5),
    "1B0": (2.5, 4.5),
    "1F1": (4.5, 5.5),
    "1B1": (5.5, 7.5),
    "0B0": (5, 7),
    "0B1": (8, 10),
}


def test_times_by_hand():
    trace = simulate(one_f_one_b(2, 2), Costs(F=1, B=2, comm=0.5))
    assert {str(s.action): (s.start, s.end) for s in trace.spans} == BY_HAND
    assert trace.makespan == 10
    assert trace.busy(0) == 6
    assert trace.idle(1) == 4
    assert trace.bubble_fraction == 8 / 20
    assert trace.longest_rank_span == 10
    assert trace.source == "simulated"


def test_messages_leave_at_the_end_and_arrive_one_hop_later():
    trace = simulate(one_f_one_b(2, 2), Costs(F=1, B=2, comm=0.5))
    told = {(str(m.action), str(m.reader), m.sender, m.receiver, m.sent, m.arrived) for m in trace.messages}
    assert told == {
        ("0F0", "1F0", 0, 1, 1.0, 1.5),
        ("0F1", "1F1", 0, 1, 2.0, 2.5),
        ("1B0", "0B0", 1, 0, 4.5, 5.0),
        ("1B1", "0B1", 1, 0, 7.5, 8.0),
    }


def test_bubble_of_1f1b_is_exact():
    assert simulate(one_f_one_b(4, 8), Costs(F=1, I=1, W=1)).bubble_fraction == 3 / 11


def test_ends_count_from_the_first_and_leave_out_lateness():
    trace = simulate(one_f_one_b(2, 2), Costs(F=1, B=2, comm=0.5))
    by_hand = {name: end - 1 for name, (_, end) in BY_HAND.items()}  # the first action, 0F0, ends at 1
    assert trace.ends() == by_hand
    late = tuple(s._replace(start=s.start + 7, end=s.end + 7.25, late=0.25) for s in trace.spans)
    assert Trace(trace.schedule, late, source="paced").ends() == trace.ends()
    assert Trace(trace.schedule, tuple(s._replace(late=0) for s in late)).ends() == trace.ends()
    one_late = (late[0]._replace(late=0.0), *late[1:])
    assert Trace(trace.schedule, one_late).ends() != trace.ends()


def test_ends_name_recomputed_forwards():
    assert simulate(gpipe(1, 1), Costs(F=1, B=2), remat="late").ends() == {"0F0": 0, "0F0 again": 1, "0B0": 3}


def test_critical_path_steps_from_cause_to_cause():
    path = simulate(one_f_one_b(2, 2), Costs(F=1, B=2, comm=0.5)).critical_path()
    assert [str(s.action) for s in path] == ["0F0", "1F0", "1B0", "1F1", "1B1", "0B1"]


@pytest.mark.parametrize("comm", [0, 0.5])
@pytest.mark.parametrize("remat", [False, "early", "late"])
@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "zb_v", "dualpipe_v"])
def test_critical_path_has_no_gap_but_messages(name, remat, comm):
    # a recomputation under "late" waits for the gradient; the path once went on over idle time, 32 of 44 under 1F1B
    trace = simulate(SCHEDULES[name](4, 8), Costs(F=1, B=2, comm=comm), remat=remat)
    path = trace.critical_path()
    assert (path[0].start, path[-1].end) == (trace.start, trace.end)
    for span, following in pairwise(path):
        assert following.start - span.end == (comm if following.rank != span.rank else 0)


def test_critical_path_through_recomputations_is_the_makespan():
    path = simulate(one_f_one_b(4, 8), Costs(F=1, B=2), remat="late").critical_path()
    assert sum(s.duration for s in path) == 44  # (m + p - 1)(F + F + B)


def test_idle_by_phase_adds_up():
    trace = simulate(one_f_one_b(4, 8))
    for rank in range(4):
        assert sum(trace.idle_by_phase(rank)) == pytest.approx(trace.idle(rank))
    # the last rank waits for the first forward, then for the others' last backwards; it never waits between
    assert trace.idle_by_phase(3) == (3.0, 0.0, 6.0)


def test_link_queues_messages_of_one_direction():
    # 100 bytes at 50 bytes a second take 2 s on the wire; three forwards end at 1, 2, 3, so the wire is the bottleneck
    costs = Costs(F=1, B=1, comm=Link(0.25, 50), boundary_bytes=100)
    trace = simulate(gpipe(2, 3), costs)
    forward = [(m.sent, m.arrived) for m in trace.messages if m.action.kind is Kind.F]
    assert forward == [(1, 3.25), (2, 5.25), (3, 7.25)]
    # gradients travel on the other direction's wire: 1B0 ends at 9.25
    assert min(m.arrived for m in trace.messages if m.action.kind is Kind.B) == 9.25 + 2 + 0.25
    assert all(m.bytes == 100 for m in trace.messages)


def test_link_carries_each_boundarys_bytes_in_both_directions():
    trace = simulate(gpipe(4, 1), Costs(boundary_bytes=[10, 20, 30]))
    # a stage's output, and later the gradient of that output, come from either side of one boundary
    assert {str(m.action): m.bytes for m in trace.messages} == {
        "0F0": 10,
        "1F0": 20,
        "2F0": 30,
        "3B0": 30,
        "2B0": 20,
        "1B0": 10,
    }


@pytest.mark.parametrize("comm", [1, Link(0.5, 20)])
def test_a_pipeline_may_end_on_rank_0(comm):
    # stage 1 is on rank 0, so the very first action of the plan reads what another rank sends
    backwards = Schedule.from_text("1F0 1B0\n0F0 0B0")
    trace = simulate(backwards, Costs(F=1, B=2, comm=comm, boundary_bytes=10))
    assert backwards.placement == (1, 0)
    assert [(str(s.action), s.start, s.end) for row in trace.by_rank for s in row] == [
        ("1F0", 2, 3),
        ("1B0", 3, 5),
        ("0F0", 0, 1),
        ("0B0", 6, 8),
    ]
    messages = sorted((m.sent, m.arrived, str(m.action), m.bytes) for m in trace.messages)
    assert messages == [(1, 2, "0F0", 10), (5, 6, "1B0", 10)]


def test_link_is_free_at_the_beginning():
    # 2 bytes at 10 a second on an idle wire: sent at 0.1, there 0.2 later
    trace = simulate(gpipe(2, 1), Costs(F=0.1, B=0.1, comm=Link(0, 10), boundary_bytes=2))
    assert trace.messages[0].arrived == pytest.approx(0.3)


def test_link_without_bytes_is_a_plain_delay():
    schedule = one_f_one_b(3, 5)
    assert simulate(schedule, Costs(comm=Link(0.5, 1))).spans == simulate(schedule, Costs(comm=0.5)).spans


def test_recomputation_late_and_early():
    # (m + p - 1)(F + R + B) = 76 with R = F = 1, B = 2; hidden in the bubble, only m of the R lie on the path: 73
    costs = Costs(F=1, B=2)
    assert simulate(gpipe(4, 16), costs, remat=True).makespan == 76
    assert simulate(gpipe(4, 16), costs, remat="late").makespan == 76
    early = simulate(gpipe(4, 16), costs, remat="early")
    assert early.makespan == 73
    again = [s for s in early.spans if s.recompute]
    assert len(again) == 4 * 16
    assert all(s.action.kind is Kind.F and s.duration == 1 for s in again)


def test_recomputation_runs_before_its_own_backward():
    trace = simulate(one_f_one_b(3, 4), Costs(F=1, B=2, comm=0.3), remat="early")
    backward = {(s.action.stage, s.action.microbatch): s.start for s in trace.spans if s.action.kind is Kind.B}
    again = {(s.action.stage, s.action.microbatch): s.end for s in trace.spans if s.recompute}
    assert again.keys() == backward.keys()
    assert all(again[key] <= backward[key] for key in again)


def test_remat_of_a_split_backward_recomputes_before_i():
    trace = simulate(Schedule.from_text("0F0 0I0 0W0"), Costs(F=1, I=2, W=4), remat=True)
    assert [(span.name, span.end) for span in trace.spans] == [("0F0", 1), ("0F0 again", 2), ("0I0", 4), ("0W0", 8)]


def test_link_to_one_neighbour_is_not_held_up_by_the_other():
    # every message takes 5 on a wire of its direction; rank 1 sends a gradient up and an output down at once
    trace = simulate(one_f_one_b(3, 4), Costs(F=1, B=2, comm=Link(0, 1), boundary_bytes=5))
    free = {}
    for message in sorted(trace.messages, key=lambda message: message.sent):
        wire = message.sender, message.receiver
        assert message.arrived == max(message.sent, free.get(wire, 0)) + 5
        free[wire] = message.arrived
    up, down = ([m for m in trace.messages if (m.sender, m.receiver) == wire] for wire in ((1, 0), (1, 2)))
    assert any(a.sent < b.arrived and b.sent < a.arrived for a in up for b in down)


def test_remat_refuses_other_words():
    with pytest.raises(CostError, match="remat must be False, True, 'early' or 'late', got 'always'"):
        simulate(gpipe(2, 2), remat="always")


def test_a_schedule_that_cannot_run_is_not_simulated():
    with pytest.raises(ScheduleError, match="1F0 is missing"):
        simulate(Schedule.from_text("0F0 0B0\n1B0"))
    with pytest.raises(ScheduleError, match="waits for"):
        simulate(Schedule.from_text("0F1 0B1 0F0 0B0\n1F0 1B0 1F1 1B1"))


def test_a_value_for_the_own_rank_costs_no_hop():
    # a V: stages 1 and 2 are on rank 1
    schedule = Schedule.from_text("0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0")
    trace = simulate(schedule, Costs(F=1, B=1, comm=10))
    assert trace.makespan == 8 + 4 * 10
    assert len(trace.messages) == 4


def test_empty_trace_says_so():
    empty = Trace(naive(2), ())
    with pytest.raises(CostError, match="holds no spans"):
        _ = empty.makespan
    with pytest.raises(CostError, match="takes no time"):
        _ = simulate(naive(2), Costs(F=0, I=0, W=0)).bubble_fraction
    with pytest.raises(CostError, match="holds no spans"):
        _ = empty.longest_rank_span
    assert "empty" in repr(empty)


@pytest.mark.parametrize("rank", [2, -1, "0"])
def test_trace_knows_its_ranks(rank):
    trace = simulate(naive(2))
    for ask in (trace.busy, trace.idle, trace.idle_by_phase):
        with pytest.raises(SizeError, match="the trace of 'naive' has ranks 0 to 1, got"):
            ask(rank)


def test_times_that_overflow_are_refused():
    with pytest.raises(CostError, match="'naive' add up to more than a float can hold: take a larger unit"):
        simulate(naive(2), Costs(F=1e308, B=1e308))


def test_order_of_start_has_every_maker_before_its_readers():
    # by hand, with F = U = 1 and B = 2; an update without a time would begin with the forward that reads its weights
    order = " ".join(map(str, in_order_of_start(pipedream(2, 2))))
    assert order == "0F0 0F1 1F0 1B0 0B0 1U0 1F1 0U0 1B1 0B1 1U1 0U1"


def test_repr_gives_the_denominator():
    assert repr(simulate(gpipe(4, 8), Costs(F=1, B=1))) == (
        "<Trace of gpipe, simulated: 4 ranks, makespan 22, bubble 27.3% of makespan x ranks>"
    )


def test_chrome_trace_has_a_row_a_rank_and_an_arrow_a_message(tmp_path):
    trace = simulate(one_f_one_b(2, 2), Costs(F=1, B=2, comm=0.5))
    trace.to_chrome(tmp_path / "trace.json", counters={"held": [[(0.0, 1.0)], [(1.0, 2.0)]]})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = {e["name"]: e for e in events if e["ph"] == "X"}
    assert {n: (e["ts"], e["ts"] + e["dur"]) for n, e in slices.items()} == {
        name: (start * 1e6, end * 1e6) for name, (start, end) in BY_HAND.items()
    }
    assert {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"} == {"rank 0", "rank 1"}
    leaves = {e["id"]: e for e in events if e["ph"] == "s"}
    lands = {e["id"]: e for e in events if e["ph"] == "f"}
    assert leaves.keys() == lands.keys()
    assert len(leaves) == 4
    for number, event in leaves.items():  # both ends lie inside a slice of their own row, or Perfetto drops the arrow
        sender = slices[event["name"]]
        assert sender["tid"] == event["tid"]
        assert sender["ts"] <= event["ts"] <= sender["ts"] + sender["dur"]
        assert any(s["tid"] == lands[number]["tid"] and s["ts"] == lands[number]["ts"] for s in slices.values())
    assert [e["args"] for e in events if e["ph"] == "C"] == [{"held": 1.0}, {"held": 2.0}]


def test_span_order_and_lookup():
    trace = simulate(one_f_one_b(2, 2))
    assert [s.rank for s in trace.spans] == [0] * 4 + [1] * 4
    assert trace.by_rank[1][0].action == Action(1, Kind.F, 0)
