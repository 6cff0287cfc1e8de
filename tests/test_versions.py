"""Which weights every action uses: the papers' closed forms, and small plans worked by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipelab as pl
from pipelab import theory
from pipelab.versions import RULES

counts = st.integers(1, 7)


def microbatches(versions, stage, kind):
    """The versions of one stage, micro-batch after micro-batch."""
    mine = {action.microbatch: version for action, version in versions.items() if action[:2] == (stage, kind)}
    return [mine[k] for k in sorted(mine)]


@given(counts, st.integers(1, 20))
def test_versions_of_stashing_are_pipedreams_formula(p, m):
    # w(t+1) = w(t) - lr * grad f(w_1(t-n+1), w_2(t-n+2), ..., w_n(t)): stage i of n, counted from 1, uses t - n + i
    versions = pl.weight_versions(pl.pipedream(p, m), "stashing")
    for stage in range(p):
        wanted = [max(t - p + (stage + 1), 0) for t in range(m)]
        assert microbatches(versions, stage, "F") == microbatches(versions, stage, "B") == wanted


@given(counts, st.integers(1, 20))
def test_versions_of_vertical_sync_are_pipedreams_formula(p, m):
    # w(t+1) = w(t) - lr * grad f(w_1(t-n+1), w_2(t-n+1), ..., w_n(t-n+1))
    versions = pl.weight_versions(pl.pipedream(p, m), "vertical_sync")
    for stage in range(p):
        wanted = [max(t - p + 1, 0) for t in range(m)]
        assert microbatches(versions, stage, "F") == microbatches(versions, stage, "B") == wanted


@given(st.integers(1, 6), st.integers(0, 3), st.integers(1, 5))
def test_versions_of_two_buffers_are_2bws_formula(p, more, updates):
    # micro-batch k, counted from 1, with m to a batch: max(floor((k - 1) / m) - 1, 0), on every stage
    group = p + more
    versions = pl.weight_versions(pl.pipedream_2bw(p, group * updates, group), "two_buffered")
    wanted = [max((k - 1) // group - 1, 0) for k in range(1, group * updates + 1)]
    for stage in range(p):
        assert microbatches(versions, stage, "F") == microbatches(versions, stage, "B") == wanted


@given(counts, st.integers(1, 20))
def test_versions_without_stashing_are_the_newest(p, m):
    versions = pl.weight_versions(pl.pipedream(p, m), "latest")
    for stage in range(p):
        assert microbatches(versions, stage, "B") == list(range(m))  # all earlier micro-batches have updated by then
        assert microbatches(versions, stage, "F") == [max(t - p + stage + 1, 0) for t in range(m)]


def test_versions_of_a_small_plan_by_hand():
    # rank 0: 0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2        rank 1: 1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2
    schedule = pl.pipedream(2, 3)
    by_hand = {
        "stashing": "0F0:0 0F1:0 0F2:1 0B0:0 0B1:0 0B2:1 1F0:0 1F1:1 1F2:2 1B0:0 1B1:1 1B2:2",
        "vertical_sync": "0F0:0 0F1:0 0F2:1 0B0:0 0B1:0 0B2:1 1F0:0 1F1:0 1F2:1 1B0:0 1B1:0 1B2:1",
        "latest": "0F0:0 0F1:0 0F2:1 0B0:0 0B1:1 0B2:2 1F0:0 1F1:1 1F2:2 1B0:0 1B1:1 1B2:2",
    }
    for rule, text in by_hand.items():
        wanted = {pl.Action.from_text(word): int(n) for word, n in (pair.split(":") for pair in text.split())}
        assert pl.weight_versions(schedule, rule) == wanted
    assert {rule: pl.stashed_versions(schedule, rule) for rule in by_hand} == {
        "stashing": (2, 1),
        "vertical_sync": (2, 2),
        "latest": (1, 1),
    }


@given(counts, st.integers(0, 9))
def test_versions_kept_are_those_of_the_papers(p, more):
    m = 2 * p + more  # long enough for a steady state
    schedule = pl.pipedream(p, m)
    assert pl.stashed_versions(schedule, "stashing") == tuple(
        theory.weight_versions("stashing", p=p, r=r) for r in range(p)
    )
    assert pl.stashed_versions(schedule) == pl.stashed_versions(schedule, "stashing")
    assert pl.stashed_versions(schedule, "vertical_sync") == (p,) * p
    assert pl.stashed_versions(schedule, "latest") == (1,) * p
    two = pl.pipedream_2bw(p, 4 * p, p)
    assert pl.stashed_versions(two, "two_buffered") == (theory.weight_versions("two_buffered"),) * p


@pytest.mark.parametrize("rule", RULES)
def test_versions_without_updates_are_all_the_first(rule):
    schedule = pl.interleaved(2, 4, stages_per_rank=2)
    assert set(pl.weight_versions(schedule, rule).values()) == {0}
    assert pl.stashed_versions(schedule, rule) == (2, 2)  # one for each of a rank's two stages
    assert pl.update_groups(schedule) == {}


def test_versions_cover_the_halves_of_a_split_backward():
    schedule = pl.Schedule.from_text("0F0 0F1 0I0 0W0 0U0 0I1 0W1 0U1")
    names = {str(action): version for action, version in pl.weight_versions(schedule, "stashing").items()}
    assert names == {"0F0": 0, "0F1": 0, "0I0": 0, "0W0": 0, "0I1": 0, "0W1": 0}
    assert pl.weight_versions(schedule, "latest")[pl.Action.from_text("0W1")] == 1


def test_versions_update_groups_are_what_lies_between():
    groups = {str(u): taken for u, taken in pl.update_groups(pl.pipedream_2bw(2, 6, 3)).items()}
    assert groups == {"0U2": (0, 1, 2), "0U5": (3, 4, 5), "1U2": (0, 1, 2), "1U5": (3, 4, 5)}


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda: pl.weight_versions(pl.pipedream(2, 2), "newest"), "rule must be one of 'stashing', .*got 'newest'"),
        (
            lambda: pl.weight_versions(pl.pipedream(3, 4), "two_buffered"),
            "0F2 needs version 1 of its weights, but only 0 updates come before it",
        ),
        (
            lambda: pl.update_groups(pl.Schedule.from_text("0F0 0B0 0U0 0F1 0B1 0F2 0B2")),
            "stage 0: no update takes the gradient of micro-batches 1, 2",
        ),
        (
            lambda: (
                pl.Schedule.from_text("0F0 0F1 0B0 0B1 0U0 0U1")
                and pl.update_groups(pl.Schedule.from_text("0F0 0F1 0B0 0B1 0U0 0U1"))
            ),
            "rank 0, position 5: 0U1 has no gradient to take",
        ),
        (lambda: pl.weight_versions(pl.Schedule.from_text("0B0 0F0 0U0")), "cannot run"),
    ],
)
def test_versions_refuse_what_has_no_answer(ask, sentence):
    with pytest.raises(pl.ScheduleError, match=sentence):
        ask()


def test_versions_2bw_is_1f1b_with_an_update_a_group():
    assert pl.pipedream_2bw(2, 4).to_text().splitlines() == [
        "pipedream_2bw: 2 ranks, 4 micro-batches, stages on ranks 0 1",
        "rank 0: 0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0B3 0U3",
        "rank 1: 1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U3",
    ]
    pl.validate_program(pl.lower(pl.pipedream_2bw(4, 8)))


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ((4, 8, 3), "as many micro-batches as there are ranks: got 3 for 4 ranks"),
        ((2, 7, 3), "a multiple of the 3 micro-batches of an update: got 7; the nearest is 6"),
        ((4, 1), "the nearest is 4"),
    ],
)
def test_versions_2bw_refuses_groups_that_do_not_fit(sizes, sentence):
    with pytest.raises(pl.SizeError, match=sentence):
        pl.pipedream_2bw(*sizes)


def test_with_updates_puts_one_behind_the_last_backward_of_each_stage():
    text = "rank 0: 0F0 0F1 0B0 0B1 0U1 0F2 0F3 0B2 0B3 0U3\nrank 1: 1F0 1F1 1B0 1B1 1U1 1F2 1F3 1B2 1B3 1U3"
    assert pl.with_updates(pl.gpipe(2, 2), steps=2) == pl.Schedule.from_text(text)
    halves = pl.with_updates(pl.zb_h1(1, 1))
    assert " ".join(map(str, halves.ranks[0])) == "0F0 0I0 0W0 0U0"


@given(st.sampled_from(["gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v"]), st.integers(1, 3))
def test_with_updates_every_step_has_one_version_without_stashing(name, steps):
    stream = pl.with_updates(pl.SCHEDULES[name](4, 8), steps)
    assert set(pl.update_groups(stream).values()) == {tuple(range(8 * n, 8 * n + 8)) for n in range(steps)}
    versions = pl.weight_versions(stream, "latest")
    assert all(version == action.microbatch // 8 for action, version in versions.items())


def test_with_updates_refuses_updates_that_are_there_and_no_steps():
    with pytest.raises(pl.ScheduleError, match=r"'pipedream' has updates \(U\) already"):
        pl.with_updates(pl.pipedream(2, 3))
    with pytest.raises(pl.SizeError, match="steps"):
        pl.with_updates(pl.gpipe(2, 2), steps=0)


@given(counts, st.integers(1, 5))
def test_gradient_ages_are_those_of_the_papers(p, more):
    m = 2 * p + more
    ages = {rule: pl.gradient_ages(pl.pipedream(p, m), rule) for rule in ("latest", "stashing", "vertical_sync")}
    steady = [[p - 1 - stage] * (m - p) for stage in range(p)]  # PipeDream's t - n + i: n - i updates ago
    assert [list(row[p:]) for row in ages["latest"]] == [list(row[p:]) for row in ages["stashing"]] == steady
    assert {age for row in ages["vertical_sync"] for age in row[p:]} == {p - 1}
    two = pl.gradient_ages(pl.pipedream_2bw(p, 3 * p), "two_buffered")
    assert list(two) == [(0,) * p + (1,) * (2 * p)] * p


def test_gradient_ages_count_to_the_weight_half_of_a_split_backward():
    assert pl.gradient_ages(pl.Schedule.from_text("0F0 0F1 0I0 0W0 0U0 0I1 0W1 0U1")) == ((0, 1),)
    assert pl.gradient_ages(pl.gpipe(2, 3)) == ((0, 0, 0), (0, 0, 0))
