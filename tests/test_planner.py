"""The planner against papers, formulas and an independent recomputation of every limit."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipelab as pl
from pipelab.costs import Costs, Link
from pipelab.errors import CostError, PlanError, SizeError
from pipelab.planner import Hardware, Measured, Transformer, plan
from pipelab.planner.duration import makespan
from pipelab.planner.footprint import in_flight, state_bytes
from pipelab.planner.presets import PRESETS, gpipe_transformer
from pipelab.planner.rejected import CONSTRAINTS
from pipelab.schedules import SCHEDULES

FREE = Link(0.0, float("inf"))
SEVEN = Transformer(32, 4096, 32, sequence=1024, vocabulary=32000, fused_attention=True, name="7b")
EIGHT = Hardware(8, inside=FREE, between=FREE)
FIXED = {"dp": 2, "tp": 1, "pp": 4, "schedule": "one_f_one_b", "remat": "none", "sharding": "replicated"}

# arXiv 2104.04473, table 1: billions of parameters, tensor- and pipeline-parallel size, GPUs, batch
MEGATRON = {
    "megatron-1.7b": (1.7, 1, 1, 32, 512),
    "megatron-3.6b": (3.6, 2, 1, 64, 512),
    "megatron-7.5b": (7.5, 4, 1, 128, 512),
    "megatron-18b": (18.4, 8, 1, 256, 1024),
    "megatron-39b": (39.1, 8, 2, 512, 1536),
    "megatron-76b": (76.1, 8, 4, 1024, 1792),
    "megatron-145b": (145.6, 8, 8, 1536, 2304),
    "megatron-310b": (310.1, 8, 16, 1920, 2160),
    "megatron-530b": (529.6, 8, 35, 2520, 2520),
    "megatron-1t": (1008.0, 8, 64, 3072, 3072),
}


# --- the numbers of a model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEGATRON)
def test_planner_parameters_are_those_of_the_paper(name: str) -> None:
    assert PRESETS[name].parameters / 1e9 == pytest.approx(MEGATRON[name][0], abs=0.0501)


def test_planner_gpt3_has_its_174_6_billion_parameters() -> None:
    assert round(PRESETS["gpt3-175b"].parameters / 1e9, 1) == 174.6  # arXiv 2104.04473, table 2


# arXiv 1811.06965, table 1
@pytest.mark.parametrize(("layers", "billions"), [(3, 0.2822), (13, 0.7858), (103, 5.3), (415, 21.0), (1663, 83.9)])
def test_planner_parameters_are_those_of_gpipe(layers: int, billions: float) -> None:
    assert gpipe_transformer(layers).parameters / 1e9 == pytest.approx(billions, rel=4e-3)


def test_planner_a_layer_keeps_what_korthikanti_says() -> None:
    gpt3 = PRESETS["gpt3-175b"]
    s, h, a, t = 2048, 12288, 96, 8
    assert gpt3.kept_bytes() == s * h * (34 + 5 * a * s / h)
    assert gpt3.kept_bytes(t) == pytest.approx(s * h * (10 + 24 / t + 5 * a * s / (h * t)))
    assert replace(gpt3, sequence_parallel=True).kept_bytes(t) == pytest.approx(gpt3.kept_bytes() / t)
    assert replace(gpt3, fused_attention=True).kept_bytes() == 34 * s * h


def test_planner_model_state_of_7e9_parameters_on_4_stages_and_2_replicas() -> None:
    adam = (2, 2, 12)
    found = [state_bytes(7e9 / 4, adam, sharding, 2) for sharding in ("replicated", "zero_1", "zero_3")]
    assert found == [28e9, 17.5e9, 14e9]


# --- a worked example: P = 4, k = 2, local batch 512, micro-batch 2, bubble at most 15 % -----------


def test_planner_finds_the_four_whole_solutions_and_the_one_without_extra_flushes_first() -> None:
    found = plan(SEVEN, EIGHT, batch=1024, max_bubble=0.15, microbatch=2, rounds=None, simulate=0, **FIXED)
    solutions = [(c.candidate.num_microbatches, c.candidate.rounds) for c in found]
    assert solutions == [(256, 1), (128, 2), (64, 4), (32, 8)]
    assert [c.bubble for c in found] == pytest.approx([3 / 259, 3 / 131, 3 / 67, 3 / 35])
    assert found.reasons == {"bubble": 5}
    reason = "the bubble is 15.8 % of the makespan, the limit is 15.0 %"  # 3 / 19
    assert [r.reason for r in found.rejected if r.candidate.num_microbatches == 16] == [reason]


def test_planner_activations_of_the_worked_example() -> None:
    best = plan(SEVEN, EIGHT, batch=1024, microbatch=2, **FIXED).best
    # 34 bytes x 8 layers x 4096 x (4 - r) micro-batches of 2 x 1024 tokens; the last rank also keeps the scores
    expected = [8 * 34 * 4096 * 2048 * n for n in (4, 3, 2)]
    assert [rank.activations for rank in best.ranks[:3]] == expected
    assert round(expected[0] / 2**30, 1) == 8.5
    assert best.ranks[3].activations == 8 * 34 * 4096 * 2048 + 2048 * (2 * 4096 + 4 * 32000)


def test_planner_gpipe_keeps_34_gib_at_16_microbatches() -> None:
    best = plan(SEVEN, EIGHT, batch=64, microbatch=2, **{**FIXED, "schedule": "gpipe"}).best
    assert best.candidate.num_microbatches == 16
    assert best.ranks[0].activations / 2**30 == 34


def test_planner_offers_the_nearest_relaxations_where_no_whole_numbers_fit() -> None:
    found = plan(SEVEN, EIGHT, batch=1004, microbatch=4, **FIXED)  # 502 a replica
    assert len(found) == 0
    assert found.relaxations == ("batch 1000 or 1008", "micro-batch 2")
    assert len(plan(SEVEN, EIGHT, batch=1000, microbatch=4, **FIXED)) == 1
    assert len(plan(SEVEN, EIGHT, batch=1004, microbatch=2, **FIXED)) == 1
    with pytest.raises(PlanError, match="nearest relaxations: batch 1000 or 1008, or micro-batch 2"):
        _ = found.best


def test_planner_offers_batches_in_groups_for_interleaving() -> None:
    fixed = {**FIXED, "schedule": "interleaved", "stages_per_rank": 2, "dp": 1, "tp": 2}
    found = plan(SEVEN, EIGHT, batch=502, microbatch=1, **fixed)
    assert found.reasons == {"microbatches": 1}
    assert found.relaxations[0] == "batch 500 or 504"


def test_planner_offers_the_memory_and_the_bubble_that_would_do() -> None:
    tight = plan(SEVEN, EIGHT, batch=1024, memory=20e9, microbatch=2, **FIXED)
    need = plan(SEVEN, EIGHT, batch=1024, microbatch=2, **FIXED).best.memory_bytes
    assert tight.relaxations == (f"memory {need / 1e9:.1f} GB",)
    short = plan(SEVEN, EIGHT, batch=32, max_bubble=0.05, microbatch=2, **FIXED)
    assert short.relaxations == ("bubble 27.3 %",)  # 3 / 11


# --- papers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEGATRON)
def test_planner_parallel_sizes_of_megatron_are_feasible(name: str) -> None:
    _, tp, pp, gpus, batch = MEGATRON[name]
    asked = {"tp": tp, "pp": pp, "microbatch": 1, "remat": "layer", "schedule": "one_f_one_b", "simulate": 0}
    assert len(plan(name, gpus, batch=batch, **asked))


def test_planner_parallel_sizes_of_gpt3_are_feasible() -> None:
    # arXiv 2104.04473, table 2: 96 GPUs a replica, micro-batch 1
    for gpus in (384, 768, 1536):
        assert len(plan("gpt3-175b", gpus, batch=1536, tp=8, pp=12, microbatch=1, simulate=0))


@pytest.mark.parametrize(("name", "gpus", "batch"), [("gpt3-175b", 1536, 1536), ("megatron-1t", 3072, 3072)])
def test_planner_puts_tensors_inside_the_node_and_the_pipeline_across(name: str, gpus: int, batch: int) -> None:
    best = plan(name, gpus, batch=batch).best.candidate
    assert best.tp == 8  # as in the paper; nothing in the planner says so but the two links
    assert best.pp > 1


def test_planner_tensor_parallelism_crosses_nodes_where_that_is_free() -> None:
    near = Link(5e-6, 300e9)
    flat = Hardware(384, inside=near, between=near)
    wide = plan("gpt3-175b", flat, batch=1536, tp=16, pp=12, microbatch=1, simulate=0).best.step_s
    with_nodes = plan("gpt3-175b", 384, batch=1536, tp=16, pp=12, microbatch=1, simulate=0).best.step_s
    assert wide < 0.7 * with_nodes


# arXiv 1811.06965, table 1: 16 GB, batch 32, micro-batch 1, recomputation of each partition
@pytest.mark.parametrize(("gpus", "layers"), [(1, 13), (8, 103), (32, 415), (128, 1663)])
def test_planner_capacity_of_gpipe(gpus: int, layers: int) -> None:
    accelerators = Hardware(gpus, memory_bytes=16e9)
    settings = {"batch": 32, "dp": 1, "tp": 1, "pp": gpus, "microbatch": 1, "schedule": "gpipe", "remat": "stage"}
    assert len(plan(gpipe_transformer(layers), accelerators, **settings)) == 1
    deeper = plan(gpipe_transformer(layers + layers // 10), accelerators, **settings)
    assert deeper.reasons == {"memory": 1}


@pytest.mark.timeout(60)
def test_planner_plans_and_simulates_16384_gpus() -> None:
    found = plan("megatron-1t", 16384, batch=8192)
    assert found.best.source == "simulated"
    assert len(found) + len(found.rejected) > 5000


# --- time -----------------------------------------------------------------------------------------------------------

ONE_STAGE = ("gpipe", "one_f_one_b", "zb_h1", "zb_h2")
LOOPED = ("interleaved", "breadth_first")
V_SHAPED = ("zb_v", "v_half")


@settings(max_examples=150, deadline=None)
@given(
    schedule=st.sampled_from([*ONE_STAGE, *LOOPED, *V_SHAPED]),
    p=st.integers(2, 6),
    groups=st.integers(1, 4),
    v=st.integers(2, 3),
    forward=st.integers(1, 9),
    backward=st.integers(1, 18),
    delay=st.sampled_from([0.0, 0.01, 0.1, 0.5, 2.0, 20.0]),
)
def test_planner_makespan_is_that_of_the_simulator_or_a_bound(
    schedule: str, p: int, groups: int, v: int, forward: int, backward: int, delay: float
) -> None:
    m = groups * p
    v = v if schedule in LOOPED else 1 if schedule in ONE_STAGE else 2
    found, source = makespan(schedule, p, m, v, float(forward), float(backward), delay)
    builder = SCHEDULES[schedule]
    order = builder(p, m, stages_per_rank=v) if schedule in LOOPED else builder(p, m)
    exact = pl.simulate(order, Costs(F=forward / v, B=backward / v, comm=delay)).makespan
    if source == "bound":
        assert found >= exact * (1 - 1e-9)
    else:
        assert found == pytest.approx(exact)


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_h2", "breadth_first", "zb_v"])
@pytest.mark.parametrize("p", [2, 3, 5])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_planner_in_flight_is_counted_in_the_order(name: str, p: int, groups: int) -> None:
    m = groups * p
    v = 2 if name in ("interleaved", "breadth_first", "zb_v") else 1
    order = SCHEDULES[name](p, m)
    assert order.stages_per_rank == v
    assert in_flight(name, p, m, v) == pytest.approx(pl.peak_activations(pl.simulate(order)))


def test_planner_all_reduce_and_hop_are_in_the_step() -> None:
    fixed = {"batch": 16, "tp": 1, "pp": 2, "microbatch": 1, "schedule": "gpipe", "remat": "none"}

    def step_s(link: Link) -> float:
        nodes = Hardware(4, gpus_per_node=1, inside=FREE, between=link)
        return plan(replace(SEVEN, layers=2), nodes, sharding="replicated", simulate=0, **fixed).best.step_s

    # the first rank has the words, the positions and one layer of 12 h^2 + 13 h
    parameters = 32000 * 4096 + 1024 * 4096 + 12 * 4096**2 + 13 * 4096
    all_reduce_s = 2 * (2 - 1) / 2 * 2 * parameters / 1e10
    hops_s = 2 * (2 - 1) * 2 * 1024 * 4096 / 1e10  # gpipe: 2 c (p - 1)
    assert step_s(Link(0.0, 1e10)) - step_s(FREE) == pytest.approx(all_reduce_s + hops_s)


def test_planner_simulated_step_is_no_longer_than_the_closed_form() -> None:
    closed = {c.candidate: c.step_s for c in plan(SEVEN, 64, batch=256, simulate=0)}
    best = list(plan(SEVEN, 64, batch=256, simulate=10))[:5]
    assert {c.source for c in best} == {"simulated"}
    assert all(c.step_s <= closed[c.candidate] * 1.001 for c in best)


# --- every limit, recomputed ----------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    layers=st.integers(2, 12),
    heads=st.sampled_from([2, 3, 4, 8]),
    gpus=st.sampled_from([4, 6, 8]),
    batch=st.integers(1, 40),
    memory=st.sampled_from([2e8, 5e8, 1e9, 4e9]),
    max_bubble=st.sampled_from([0.1, 0.3, 1.0]),
)
def test_planner_feasible_plans_keep_every_limit_and_rejected_ones_break_the_named_one(
    layers: int, heads: int, gpus: int, batch: int, memory: float, max_bubble: float
) -> None:
    model = Transformer(layers, 64 * heads, heads, sequence=256, vocabulary=5000)
    found = plan(model, Hardware(gpus, gpus_per_node=4), batch=batch, memory=memory, max_bubble=max_bubble, simulate=0)
    assert len(found) + len(found.rejected) > 0
    for choice in found:
        c = choice.candidate
        assert c.dp * c.tp * c.pp == gpus
        assert heads % c.tp == 0
        assert c.pp * c.stages_per_rank <= layers + 2
        assert c.dp * c.rounds * c.num_microbatches * c.microbatch == batch
        assert c.schedule != "interleaved" or c.num_microbatches % c.pp == 0
        assert choice.bubble <= max_bubble
        state = {"replicated": 16, "zero_1": 4 + 12 / c.dp, "zero_3": 16 / c.dp}[c.sharding]
        assert memory >= choice.memory_bytes >= state * model.parameters / (c.tp * c.pp) * 0.999  # as if spread evenly
        if c.pp == c.tp == 1 and c.remat == "none" and c.sharding != "zero_3":  # all of one micro-batch on one rank
            s, h = 256, 64 * heads
            kept = c.microbatch * s * (layers * (34 * h + 5 * heads * s) + 2 * h + 4 * 5000)
            assert choice.memory_bytes == pytest.approx(state * model.parameters + kept)
    for rejected in found.rejected:
        c = rejected.candidate
        broken = {
            "gpus": gpus % (c.tp * c.pp) != 0,
            "split": heads % c.tp != 0,
            "stages": c.num_stages > layers + 2,
            "batch": batch % (c.dp * c.microbatch * c.rounds if c.microbatch else 1) != 0,
            "microbatches": bool(c.num_microbatches) and c.num_microbatches % c.pp != 0,
            "remat": c.schedule == "zb_h1" and c.remat != "none",
            "memory": rejected.found > rejected.limit == memory,
            "bubble": rejected.found > rejected.limit == max_bubble,
        }
        assert set(broken) == set(CONSTRAINTS)
        assert broken[rejected.constraint], rejected


def test_planner_pareto_choices_are_beaten_by_none() -> None:
    found = plan(SEVEN, 16, batch=64)
    front = found.pareto
    assert found.best in front
    for choice in front:
        assert not any(c.memory_bytes < choice.memory_bytes and c.step_s <= choice.step_s for c in found)


# --- the result and the door ----------------------------------------------------------------------------------------


def test_planner_result_reads_as_a_table() -> None:
    found = plan(SEVEN, EIGHT, batch=1024, max_bubble=0.15, microbatch=2, rounds=None, **FIXED)
    lines = repr(found).splitlines()
    assert lines[0] == "7b on 8 GPUs, batch 1024, 80 GB a GPU, bubble at most 15 %"
    assert "256 × 2" in lines[2]
    assert lines[-1] == "rejected 5: 5 because of bubble"
    assert found._repr_html_().count("<tr>") == 5


def test_planner_choice_is_a_schedule_that_can_be_simulated() -> None:
    choice = plan(SEVEN, 8, batch=32, pp=4, tp=1, schedule="one_f_one_b", microbatch=2).best
    assert choice.schedule() == pl.one_f_one_b(4, 8)
    assert choice.simulate().makespan == pytest.approx(pl.simulate(choice.schedule(), choice.costs()).makespan)


def test_planner_measures_a_module() -> None:
    import torch

    model = pl.models.mlp((64, 96, 96, 96, 10))
    found = plan(model, Hardware(4, memory_bytes=1e9), batch=64, example=torch.randn(16, 64))
    assert all(choice.candidate.tp == 1 for choice in found)
    assert {r.candidate.tp for r in found.rejected if r.constraint == "split"} == {2, 4}
    parameters = sum(weight.numel() for weight in model.parameters())
    alone = plan(model, Hardware(1, memory_bytes=1e9), batch=64, example=torch.randn(16, 64)).best
    assert alone.ranks[0].state == 16 * parameters


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ({"batch": 0}, SizeError, "batch must be at least 1, got 0"),
        ({"max_bubble": 15}, CostError, "max_bubble must be a number from 0 to 1, got 15"),
        ({"max_bubble": "15"}, CostError, "max_bubble must be a number, got '15'"),
        ({"memory": -1.0}, CostError, "memory_bytes must be finite and not negative, got -1.0"),
        ({"memory": 0}, CostError, "memory_bytes must be more than 0"),
        ({"link": 25e9}, CostError, r"between must be a Link\(latency_s, bytes_per_s\), got 25000000000.0"),
        ({"simulate": 0.5}, SizeError, "simulate must be a whole number, got 0.5"),
        ({"schedule": "1f1b"}, SizeError, "schedule is one of naive, gpipe"),
        ({"pipeline": 4}, SizeError, "plan has no axis 'pipeline'; it has dp, tp, pp"),
        ({"pp": ()}, SizeError, "pp has no value to try"),
    ],
)
def test_planner_says_what_was_asked(asked: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan(SEVEN, 8, **{"batch": 64, **asked})


@pytest.mark.parametrize("state", [(2, 2), None, (2, -1, 12), (2, float("nan"), 12)])
def test_planner_says_what_a_state_is(state: object) -> None:
    message = r"state is \(weight, gradient, optimizer\) in bytes|bytes a parameter of the (gradient|weight) must"
    with pytest.raises(CostError, match=message):
        replace(SEVEN, state=state)
    with pytest.raises(CostError, match=message):
        Measured((), 4, state)


def test_planner_says_that_samples_are_a_count() -> None:
    with pytest.raises(SizeError, match="samples must be at least 1, got 0"):
        Measured((), 0)


def test_planner_takes_whole_floats_as_counts() -> None:
    assert repr(plan(SEVEN, 8.0, batch=64.0)) == repr(plan(SEVEN, 8, batch=64))


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"pipedream", "pipedream_2bw"}))
def test_planner_plans_every_flushed_schedule(name: str) -> None:
    # DualPipeV, which needs two micro-batches a rank, once ended the plan with its own error
    found = plan("megatron-1.7b", 8, batch=12, schedule=name)
    assert {choice.candidate.schedule for choice in found} == {name}
    for rejected in found.rejected:
        if rejected.constraint == "microbatches":
            with pytest.raises(SizeError, match="the nearest is"):
                rejected.candidate.build()


def test_planner_plans_a_schedule_that_has_no_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    # docs/add-a-schedule.md: a file and a line in the table; once the plan ended for want of a formula
    monkeypatch.setitem(SCHEDULES, "mine", lambda p, m: pl.Schedule("mine", pl.one_f_one_b(p, m).ranks))
    fixed = {"batch": 32, "pp": 4, "microbatch": 1, "simulate": 0}
    mine, usual = (list(plan(SEVEN, EIGHT, schedule=name, **fixed)) for name in ("mine", "one_f_one_b"))
    assert [choice.step_s for choice in mine] == pytest.approx([choice.step_s for choice in usual])
    assert [choice.ranks for choice in mine] == [choice.ranks for choice in usual]


def test_planner_says_what_it_needs_of_a_model() -> None:
    with pytest.raises(SizeError, match="no preset is called 'gpt5'; there are gpt3-175b, megatron-"):
        plan("gpt5", 8, batch=8)
    with pytest.raises(SizeError, match="to profile a Sequential, plan needs example="):
        plan(pl.models.mlp(), 8, batch=8)


@pytest.mark.parametrize(
    ("fixed", "reason", "ways_out"),
    [
        # one size alone once vanished: no choice, nothing rejected, and "no change of one number" would do
        ({"tp": 3}, "tp 3 does not divide 8 GPUs; the nearest divisors are 2 and 4", ("tp 4",)),
        ({"dp": 3}, "dp 3 does not divide 8 GPUs; the nearest divisors are 2 and 4", ("dp 4",)),
        ({"pp": 3}, "pp 3 does not divide 8 GPUs; the nearest divisors are 2 and 4", ("pp 4",)),
        ({"pp": 16}, "pp 16 does not divide 8 GPUs; the nearest divisor is 8", ("pp 8",)),
        ({"tp": 2, "pp": 3}, "tp 2 × pp 3 = 6 does not divide 8 GPUs; the nearest divisors are 4 and 8", ("pp 4",)),
        ({"dp": 1, "tp": 1, "pp": 4}, "dp 1 × tp 1 × pp 4 = 4 is not 8 GPUs", ("dp 2", "tp 2", "pp 8")),
        ({"tp": 3, "pp": 3}, "tp 3 × pp 3 = 9 does not divide 8 GPUs; the nearest divisor is 8", ()),
    ],
)
def test_planner_says_which_sizes_do_not_fit_the_gpus(
    fixed: dict[str, int], reason: str, ways_out: tuple[str, ...]
) -> None:
    found = plan(SEVEN, 8, batch=64, **fixed)
    assert len(found) == 0
    assert [(r.constraint, r.reason) for r in found.rejected] == [("gpus", reason)]
    assert found.relaxations == ways_out
    for axis, size in map(str.split, ways_out):
        assert len(plan(SEVEN, 8, batch=64, simulate=0, **{**fixed, axis: int(size)}))
    with pytest.raises(PlanError, match=re.escape(reason)):
        _ = found.best


def test_planner_rejects_a_size_that_leaves_more_ranks_than_layers() -> None:
    found = plan(replace(SEVEN, layers=2), 8, batch=64, dp=1, tp=1)
    assert [r.reason for r in found.rejected] == ["8 stages need as many layers, and the model has 4"]
    assert found.relaxations == ("dp 2", "tp 2")


def test_planner_needs_no_torch() -> None:
    code = "import sys, pipelab; pipelab.plan('megatron-1.7b', 4, batch=8); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_planner_formula_compiled_is_the_formula() -> None:
    formula = pl.theory.makespan["interleaved"]
    fast = formula.compiled()
    at = {"p": 4, "m": 8, "v": 2, "F": 3, "B": 5, "c": 0}
    assert fast(**at) == formula(**at) == (8 + 3 / 2) * 8
    assert fast(**{**at, "m": 9}) is None  # no multiple of p


def test_planner_command_prints_the_table(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    from pipelab.cli import main

    picture = tmp_path / "plan.png"
    asked = ["plan", "megatron-1.7b", "--gpus", "4", "--batch", "16", "--top", "2", "--picture", str(picture)]
    assert main(asked) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "megatron-1.7b on 4 GPUs, batch 16, 80 GB a GPU"
    assert out[4].startswith("and ")
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_planner_command_says_why_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    from pipelab.cli import main

    assert main(["plan", "megatron-1t", "--gpus", "8", "--batch", "16", "--tp", "8"]) == 1
    assert "the fullest rank fits: dp 1 × tp 8 × pp 1" in capsys.readouterr().out
    assert main(["plan", "--layers", "4"]) == 1
    assert "or also --hidden, --heads, --sequence, --vocabulary" in capsys.readouterr().err


def test_planner_picture_shows_every_choice_and_the_limit() -> None:

    found = plan(SEVEN, 16, batch=64, memory=60e9)
    ax = pl.pareto_plot(found)
    drawn = sum(len(line.get_xdata()) for line in ax.lines if line.get_marker() not in ("None", ""))
    assert drawn == len(found) + 2  # the leanest and the fastest have a mark of their own on top
    assert ax.get_legend().get_texts()[-1].get_text() == "limit 60 GB"
