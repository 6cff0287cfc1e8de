"""The player: at every moment it says and draws what the trace says, and its controls move through it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from base64 import b64decode
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_sizes import FLUSHED

from pipelab.action import Action
from pipelab.costs import Costs
from pipelab.errors import CostError
from pipelab.memory import peak_activations
from pipelab.schedules import SCHEDULES, gpipe, interleaved, one_f_one_b, zb_h1
from pipelab.simulate import simulate
from pipelab.trace import Trace
from pipelab.widgets import Player, play
from pipelab.widgets.play_model import Film, Kept
from pipelab.widgets.play_svg import cursor_svg, ranks_svg, reel
from pipelab.widgets.svg import Grid, styles

SVG = "{http://www.w3.org/2000/svg}"
# 0F0 0..1, 1F0 1.5..2.5, 1B0 2.5..4.5, 0B0 5..7
ONE = simulate(gpipe(2, 1), Costs(F=1, B=2, comm=0.5))
TRACES = [
    simulate(SCHEDULES[name](3, 6), Costs(F=1, I=1.5, W=0.5, comm=delay), remat=remat)
    for name in sorted(FLUSHED)
    for delay, remat in [(0.0, False), (0.3, False), (0.3, "early")]
]


def says(trace: Trace, time: float) -> str:
    return Film(trace).at(time).sentence


# --- a moment --------------------------------------------------------------------------------------------------------


@given(st.sampled_from(TRACES), st.floats(0, 1))
def test_play_model_agrees_with_the_trace_at_any_moment(trace: Trace, share: float) -> None:
    time = trace.start + share * trace.makespan
    moment = Film(trace).at(time)
    assert moment.running == tuple(next((s for s in row if s.start <= time < s.end), None) for row in trace.by_rank)
    assert len(moment.kept) == trace.num_ranks
    assert set(moment.in_flight).isdisjoint(moment.arrived)
    assert moment.sentence.startswith("At ")
    assert moment.sentence.endswith(".")


@pytest.mark.parametrize(
    "schedule", [gpipe(3, 5), one_f_one_b(4, 8), interleaved(2, 4, stages_per_rank=2), zb_h1(3, 6)], ids=str
)
def test_play_model_keeps_what_memory_counts(schedule: object) -> None:
    trace = simulate(schedule)  # type: ignore[arg-type]
    film = Film(trace)
    moments = [film.at(time) for time in film.events]
    most = [max(len(moment.kept[rank]) for moment in moments) for rank in range(trace.num_ranks)]
    # a stage of several on a rank counts 1 / stages_per_rank there; what waits for W counts as a whole one
    assert [n / trace.schedule.stages_per_rank for n in most] == list(peak_activations(trace))
    assert film.most_kept == max(most)


def test_play_model_follows_an_activation_from_forward_to_weight_gradient() -> None:
    # 0F0 0..1, 1F0 1..2, 1I0 2..3, 0I0 3..4, 1W0 3..4, 0W0 4..5
    film = Film(simulate(zb_h1(2, 1), Costs(F=1, I=1, W=1)))
    forms = [[kept.form for kept in film.at(time).kept[0]] for time in (0, 2.5, 3.5, 4.5, 5)]
    assert forms == [["whole"], ["whole"], ["whole"], ["for W"], []]


def test_play_model_keeps_inputs_until_they_are_recomputed() -> None:
    # late: 0F0 0..1, 1F0 1..2, again 2..3, 1B0 3..5, 0F0 again 5..6, 0B0 6..8
    film = Film(simulate(gpipe(2, 1), Costs(F=1, B=2), remat="late"))
    assert film.at(4).kept == ((Kept(0, 0, "input"),), (Kept(1, 0, "whole"),))
    assert film.at(5.5).kept == ((Kept(0, 0, "whole"),), ())


def test_play_model_sees_messages_under_way_and_unread() -> None:
    film = Film(ONE)
    (message,) = film.at(1.25).in_flight
    assert (message.action, message.sender, message.receiver) == (Action.from_text("0F0"), 0, 1)
    assert film.at(1.5).in_flight == ()
    # 0F1 arrives at 2.5, while rank 1 works on 1F0 until 4
    late = Film(simulate(gpipe(2, 2), Costs(F=(1, 2.5), B=2, comm=0.5)))
    assert [str(m.action) for m in late.at(3).arrived] == ["0F1"]


@pytest.mark.parametrize(
    ("time", "sentence"),
    [
        (0, "At 0, 1 of 2 ranks works; rank 1 waits for the activation of micro-batch 0 from rank 0."),
        (1.25, "At 1.25, none of 2 ranks works; rank 0 waits for the gradient of micro-batch 0 from rank 1."),
        (2, "At 2, 1 of 2 ranks works; rank 0 waits for the gradient of micro-batch 0 from rank 1."),
        (4.75, "At 4.75, none of 2 ranks works; rank 1 is done."),
        (6, "At 6, 1 of 2 ranks works; rank 1 is done."),
        (7, "At 7, everything is done."),
    ],
)
def test_play_model_narrates_the_moment(time: float, sentence: str) -> None:
    assert says(ONE, time) == sentence


def test_play_model_says_when_a_message_is_on_its_way() -> None:
    waiting = "rank 1 waits for the activation of micro-batch 0 from rank 0, which is on its way."
    assert says(simulate(gpipe(2, 2), Costs(F=1, B=2, comm=0.5)), 1.25).endswith(waiting)


def test_play_model_says_when_every_rank_works() -> None:
    assert says(simulate(gpipe(2, 2)), 1.5) == "At 1.5, every rank works."


def test_play_model_of_a_run_counts_seconds_from_its_start() -> None:
    spans = tuple(s._replace(start=9 + s.start / 100, end=9 + s.end / 100) for s in ONE.spans)
    run = replace(ONE, spans=spans, messages=(), source="measured")
    assert says(run, 9.02).startswith("At 20 ms, 1 of 2 ranks works; rank 0 waits for the gradient")


# --- its pictures ----------------------------------------------------------------------------------------------------


def test_play_draws_the_cursor_over_what_runs() -> None:
    trace = simulate(gpipe(2, 2))
    grid = Grid.of(trace)
    svg = cursor_svg(grid, Film(trace).at(1.5))
    outlines = list(ET.fromstring(svg).iter(f"{SVG}rect"))
    assert [float(outline.attrib["x"]) for outline in outlines] == [pytest.approx(grid.x(1), abs=0.1)] * 2  # 0F1, 1F0
    assert [int(outline.attrib["y"]) for outline in outlines] == [grid.y(0), grid.y(1)]
    assert f"M{grid.x(1.5):.1f} " in svg


def test_play_draws_ranks_messages_and_activations() -> None:
    moment = Film(ONE).at(1.25)
    root = ET.fromstring(ranks_svg(moment, styles(ONE), most_kept=1))
    assert root.findtext(f"{SVG}desc") == moment.sentence
    (message,) = root.iter(f"{SVG}circle")
    assert message.findtext(f"{SVG}title") == "0F0 from rank 0 to rank 1: on its way"
    assert float(message.attrib["cx"]) == pytest.approx(490)  # half of the way: in the middle of 980
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert "stage 0, micro-batch 0: whole" in titles
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts.count("idle") == 2
    assert "rank 0 keeps 1" in texts


@given(st.sampled_from(TRACES), st.floats(0, 1))
def test_play_pictures_are_well_formed_and_of_one_height(trace: Trace, share: float) -> None:
    film = Film(trace)
    first, now = film.at(trace.start), film.at(trace.start + share * trace.makespan)
    heights = {ET.fromstring(ranks_svg(m, styles(trace), film.most_kept)).attrib["viewBox"] for m in (first, now)}
    assert len(heights) == 1


# --- the widget ------------------------------------------------------------------------------------------------------


def test_play_scrubs_to_a_moment() -> None:
    player = play(ONE)
    before = player.cursor.value, player.ranks.value
    player.scrub.value = 1500
    assert player.moment.time == pytest.approx(3.5)
    assert (player.cursor.value, player.ranks.value) != before
    assert "waits for the gradient of micro-batch 0" in player.ranks.value


def test_play_steps_from_event_to_event_and_back() -> None:
    player = play(ONE)
    times = [player.moment.time]
    for _ in range(7):
        player.forward.click()
        times.append(player.moment.time)
    assert times == [0, 1, 1.5, 2.5, 4.5, 5, 7, 7]
    player.back.click()
    assert player.moment.time == 5
    player.scrub.value += 10
    player.back.click()
    assert player.moment.time == 5
    for _ in range(9):
        player.back.click()
    assert player.moment.time == 0


def test_play_reaches_the_end() -> None:
    player = play(simulate(one_f_one_b(4, 8)))
    player.scrub.value = player.scrub.max
    assert "everything is done" in player.ranks.value


def test_play_speed_changes_the_step_of_the_clock() -> None:
    player = play(ONE)
    # 30 frames a second over 10 seconds
    assert player.clock.max / player.clock.step * player.clock.interval / 1000 == pytest.approx(10, rel=0.02)
    single = player.clock.step
    player.speed.value = 4.0
    assert player.clock.step == pytest.approx(4 * single, rel=0.05)


def test_play_stores_a_picture_and_stable_text() -> None:
    stored = play(ONE)._repr_mimebundle_(include=None, exclude=None)
    assert b64decode(stored["image/png"]).startswith(b"\x89PNG")
    assert stored["text/plain"] == "play(gpipe, 2 ranks, 1 micro-batch: simulated)"


def test_play_labels_every_control() -> None:
    player = play(ONE)
    assert [c.description for c in (player.scrub, player.speed, player.back, player.forward)] == [
        *("time", "speed"),
        *("step back", "step forward"),
    ]


def test_play_refuses_an_empty_trace() -> None:
    with pytest.raises(CostError, match="holds no spans"):
        Player(replace(ONE, spans=()))


def pictures(player: Player) -> list[tuple[str, str]]:
    """When the browser shows each picture of the reel, and where its line is; no reel is one picture without a time."""
    html = player.cursor.value
    times = re.findall(r"animation: pl-shown 33ms (\d+)ms", html) or [""]
    return list(zip(times, re.findall(r'd="M([\d.]+) 24V', html), strict=True))


def test_play_draws_ahead_while_it_plays() -> None:
    player = play(simulate(one_f_one_b(2, 2), Costs(F=1, B=2)))  # 9 units in 10 s
    assert len(pictures(player)) == 1
    setattr(player.clock, player._playing, True)
    ahead = pictures(player)
    assert [int(time) for time, _ in ahead] == [33 * n for n in range(len(ahead))]
    # 0.9 units a second, up to the rounding of the slider's steps
    way = float(ahead[-1][1]) - float(ahead[0][1])
    assert way == pytest.approx(player._grid.x(0.9 * 0.033 * (len(ahead) - 1)) - player._grid.x(0), rel=0.05)
    setattr(player.clock, player._playing, False)
    assert len(pictures(player)) == 1


def test_play_sends_a_new_reel_before_the_last_one_ends() -> None:
    player = play(simulate(one_f_one_b(2, 2)))
    setattr(player.clock, player._playing, True)
    step, first = player.clock.step, player.cursor.value
    length = len(pictures(player))
    player.scrub.value = step
    assert player.cursor.value == first
    changed_after = next(n for n in range(2, length) if _moved_to(player, n * step) != first)
    assert 2 <= changed_after <= length / 2
    # whoever scrubs back while it plays sees it at once
    player.scrub.value = 0
    assert pictures(player)[0][1] == pytest.approx(str(player._grid.x(0)))


def _moved_to(player: Player, place: int) -> str:
    player.scrub.value = place
    value: str = player.cursor.value
    return value


def test_play_ends_its_last_reel_on_the_last_moment() -> None:
    player = play(ONE)
    setattr(player.clock, player._playing, True)
    player.scrub.value = player.scrub.max - player.clock.step
    assert len(pictures(player)) == 2
    assert "everything is done" in player.ranks.value.rsplit("<p", 1)[1]


def test_reel_keeps_its_last_picture() -> None:
    root = ET.fromstring(f"<html>{reel(['<i>a</i>', '<i>b</i>'], 40)}</html>")
    styles_of = [frame.attrib["style"] for frame in root.find("div")]  # type: ignore[union-attr]
    assert [style.split("animation: ")[1] for style in styles_of] == [
        "pl-shown 40ms 0ms",
        "pl-shown 40ms 40ms forwards",
    ]
    assert reel(["<i>a</i>"], 40) == "<i>a</i>"
