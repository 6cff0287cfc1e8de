"""The bridge to torch.distributed.pipelining: its plans are read, timed and compared, and it loads ours.

torch's names for this are private, so they stand here only, for the version that they were read in. No process is
started: a schedule class only asks its stages how many there are and where they are.
"""

import csv
from types import SimpleNamespace

import pytest

import pipelab as pl

torch = pytest.importorskip("torch")
if not torch.__version__.startswith("2.13."):
    pytest.skip(
        f"torch's private schedule names are known for 2.13, here is {torch.__version__}", allow_module_level=True
    )

from torch.distributed.pipelining import schedules as theirs  # noqa: E402

whole_rank = pl.Costs(F=1, I=1, W=1)
LOOPED = {
    "interleaved": theirs.ScheduleInterleaved1F1B,
    "breadth_first": theirs.ScheduleLoopedBFS,
    "interleaved_zero_bubble": theirs.ScheduleInterleavedZeroBubble,
}
V_SHAPED = {"zb_v": theirs.ScheduleZBVZeroBubble, "dualpipe_v": theirs.ScheduleDualPipeV}


def stages(placement, rank, num_ranks):
    """Stand-ins for the stages that `rank` holds."""
    return [
        SimpleNamespace(
            stage_index=stage,
            num_stages=len(placement),
            group_size=num_ranks,
            group_rank=rank,
            is_first=stage == 0,
            is_last=stage == len(placement) - 1,
            submod=None,
        )
        for stage, holder in enumerate(placement)
        if holder == rank
    ]


def torch_schedule(kind, p, m, v=1):
    """torch's own plan object, as rank 0 makes it."""
    order = tuple(range(p))
    if kind in (theirs.ScheduleGPipe, theirs.Schedule1F1B):
        return kind(stages(order, 0, p)[0], m)
    placement = order + order[::-1] if kind in V_SHAPED.values() else order * v
    return kind(stages(placement, 0, p), m)


def read(schedule, path, m):
    """torch's plan as ours, through the file that its own classes write (idle slots are empty cells)."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(schedule.pipeline_order[rank] for rank in sorted(schedule.pipeline_order))
    return pl.Schedule.from_csv(path, num_microbatches=m)


# --- their plans, read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 8), (4, 3)])
def test_torch_gpipe_is_our_gpipe(tmp_path, p, m):
    assert read(torch_schedule(theirs.ScheduleGPipe, p, m), tmp_path / "plan.csv", m) == pl.gpipe(p, m)


def test_torch_draws_the_last_ranks_1f1b_with_the_forwards_one_off(tmp_path):
    # The drawing begins the last rank's forwards with micro-batch 1 and ends with one that there is not. The runtime
    # does not follow it, so training is right.
    drawn = read(torch_schedule(theirs.Schedule1F1B, 4, 8), tmp_path / "plan.csv", 8)
    ours = pl.one_f_one_b(4, 8)
    assert drawn.ranks[:3] == ours.ranks[:3]
    assert [str(action) for action in drawn.ranks[3][:4]] == ["3F1", "3B0", "3F2", "3B1"]
    with pytest.raises(pl.ScheduleError, match="3F8 names micro-batch 8, but there are 8") as caught:
        pl.validate(drawn)
    assert any("3F0 is missing" in reason for reason in caught.value.reasons)
    mended = [a._replace(microbatch=a.microbatch - (a.kind is pl.Kind.F)) for a in drawn.ranks[3]]
    assert tuple(mended) == ours.ranks[3]


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 2), (2, 4, 3), (4, 8, 2), (4, 12, 3)])
def test_torch_interleaved_is_our_interleaved(tmp_path, p, m, v):
    plan = torch_schedule(LOOPED["interleaved"], p, m, v)
    assert read(plan, tmp_path / "plan.csv", m) == pl.interleaved(p, m, v)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 3, 2), (4, 8, 2), (3, 2, 4)])
def test_torch_breadth_first_is_ours_with_the_backwards_in_reverse(tmp_path, p, m, v):
    plan = read(torch_schedule(LOOPED["breadth_first"], p, m, v), tmp_path / "plan.csv", m)
    ours = pl.breadth_first(p, m, v)

    def turned(order):
        return tuple(a if a.kind is pl.Kind.F else a._replace(microbatch=m - 1 - a.microbatch) for a in order)

    assert tuple(map(turned, plan.ranks)) == ours.ranks
    assert pl.simulate(plan).makespan == pl.simulate(ours).makespan


@pytest.mark.parametrize(
    ("name", "makespan"),
    # derived at p = 4, m = 8: F = I = W = 1 for a whole rank, half for each of its two stages
    [
        *(("interleaved", 28.5), ("breadth_first", 28.5), ("interleaved_zero_bubble", 25.5)),
        *(("zb_v", 25.5), ("dualpipe_v", 25.5)),
    ],
)
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_torch_plans_are_read_lowered_or_not_and_timed(tmp_path, name, makespan, form):
    plan = torch_schedule({**LOOPED, **V_SHAPED}[name], 4, 8, 2)
    plan._dump_csv(tmp_path / "plan.csv", format=form)
    schedule = pl.Schedule.from_csv(tmp_path / "plan.csv")
    pl.validate(schedule)
    assert schedule == read(plan, tmp_path / "order.csv", 8)
    assert schedule.placement == ((0, 1, 2, 3, 3, 2, 1, 0) if name in V_SHAPED else (0, 1, 2, 3) * 2)
    assert pl.simulate(schedule, whole_rank.split(2)).makespan == makespan
    pl.validate_program(pl.lower(schedule))


@pytest.mark.parametrize("name", sorted(V_SHAPED))
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 8), (4, 8), (6, 16)])
def test_torch_v_shapes_take_and_keep_what_theory_says(tmp_path, name, p, m):
    plan = read(torch_schedule(V_SHAPED[name], p, m), tmp_path / "plan.csv", m)
    trace = pl.simulate(plan, pl.Costs(F=2, I=2, W=2).split(2))
    assert trace.makespan == pl.theory.makespan(name, p=p, m=m, F=2, I=2, W=2)
    assert max(pl.peak_activations(trace)) == pl.theory.peak_activations(name, p=p, m=m)
    assert len(trace.messages) == pl.theory.messages(name, p=p, m=m)


def test_torch_gpipe_takes_33(tmp_path):
    plan = read(torch_schedule(theirs.ScheduleGPipe, 4, 8), tmp_path / "plan.csv", 8)
    assert pl.simulate(plan, whole_rank).makespan == 33


@pytest.mark.parametrize("name", sorted(V_SHAPED))
@pytest.mark.parametrize("p", range(1, 7))
def test_torch_v_shapes_are_ours_of_the_same_name(tmp_path, name, p):
    # every m: with fewer than 2p - 1 micro-batches time and memory leave an order of ZB-V some freedom
    for m in range(2 * p if name == "dualpipe_v" else 1, 4 * p):
        plan = read(torch_schedule(V_SHAPED[name], p, m), tmp_path / "plan.csv", m)
        assert pl.SCHEDULES[name](p, m) == plan


# --- our plans, loaded ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(pl.SCHEDULES) - {"naive"}))
def test_torch_loads_our_csv_and_finds_a_place_for_every_message(tmp_path, name):
    schedule = pl.SCHEDULES[name](4, 8)
    schedule.to_csv(tmp_path / "plan.csv")
    runtime = theirs._PipelineScheduleRuntime(stages(schedule.placement, 0, 4), 8)
    runtime._load_csv(tmp_path / "plan.csv")
    assert runtime.stage_index_to_group_rank == dict(enumerate(schedule.placement))
    loaded = [[str(cell) for cell in runtime.pipeline_order[rank]] for rank in range(4)]
    assert loaded == [[str(a) for a in order if a.kind is not pl.Kind.U] for order in schedule.ranks]
    lowered = [str(cell) for rank in range(4) for cell in runtime.pipeline_order_with_comms[rank]]
    assert sum("SEND" in cell for cell in lowered) == len(pl.simulate(schedule).messages)
    # and the other way round: what torch lowered is still our plan
    runtime._dump_csv(tmp_path / "lowered.csv", format="compute_comms")
    again = pl.Schedule.from_csv(tmp_path / "lowered.csv")
    assert [list(map(str, order)) for order in again.ranks] == loaded


def test_torch_refuses_the_plan_that_validate_refuses(tmp_path):
    # rank 0 wants a gradient before its second forward, rank 1 that forward before its first backward
    circle = pl.Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(pl.ScheduleError, match="cannot run"):
        pl.validate(circle)
    circle.to_csv(tmp_path / "plan.csv")
    runtime = theirs._PipelineScheduleRuntime(stages((0, 1), 0, 2), 2)
    with pytest.raises(AssertionError, match="Malformed compute schedule"):
        runtime._load_csv(tmp_path / "plan.csv")
