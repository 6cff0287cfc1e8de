"""The explorer: every setting draws or says why not, and the widget shows what its model says."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from base64 import b64decode
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pipelab import palette
from pipelab.action import Kind
from pipelab.costs import Costs
from pipelab.errors import CostError, ScheduleError, SizeError
from pipelab.schedule import Schedule
from pipelab.schedules import SCHEDULES, gpipe, one_f_one_b
from pipelab.simulate import simulate
from pipelab.widgets import Explorer, explore, gantt_svg
from pipelab.widgets.explore_model import CHOICES, Settings, kept, look, places
from pipelab.widgets.explore_modes import MODES, architecture, data, performance, state
from pipelab.widgets.play_model import Film
from pipelab.widgets.svg import compare_svg

SVG = "{http://www.w3.org/2000/svg}"
any_settings = st.builds(
    Settings,
    schedule=st.sampled_from(sorted(CHOICES)),
    num_ranks=st.integers(1, 9),
    num_microbatches=st.integers(1, 20),
    stages_per_rank=st.integers(1, 4),
    F=st.floats(0, 4),
    I=st.floats(0, 4),
    W=st.floats(0, 4),
    delay=st.floats(0, 4),
    remat=st.booleans(),
    memory_limit=st.sampled_from([0.0, 0.5, 1.0, 2.5, 8.0]),
)


def bars(svg: str) -> list[ET.Element]:
    return list(ET.fromstring(svg).iter(f"{SVG}rect"))


# --- the picture -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [gpipe(1, 1), one_f_one_b(4, 8), gpipe(12, 3)], ids=str)
def test_svg_has_one_shape_for_every_span_and_names_it(schedule: Schedule) -> None:
    trace = simulate(schedule, Costs(F=0.5, I=1, W=2, comm=0.1), remat=True)
    tooltips = [bar.findtext(f"{SVG}title") for bar in bars(gantt_svg(trace))]
    assert tooltips == [
        f"{s.action}{' again' if s.recompute else ''}, rank {s.rank}, {s.start:.4g} to {s.end:.4g}" for s in trace.spans
    ]


def test_svg_places_bars_in_proportion_to_time_and_ranks_from_the_top() -> None:
    trace = simulate(gpipe(2, 2))
    drawn = bars(gantt_svg(trace))
    first, last = float(drawn[0].attrib["x"]), max(float(bar.attrib["x"]) + float(bar.attrib["width"]) for bar in drawn)
    unit = (last - first) / 9  # F0 F1, then idle, then B0 B1 on rank 0: 1 + 1 + 3 + 2 + 2
    for bar, span in zip(drawn, trace.spans, strict=True):
        assert float(bar.attrib["x"]) == pytest.approx(first + unit * span.start, abs=1)
        assert float(bar.attrib["width"]) == pytest.approx(unit * span.duration, abs=1)
    rows = [float(bar.attrib["y"]) for bar in drawn]
    assert max(rows[:4]) < min(rows[4:])


def test_svg_has_the_palette_of_the_other_pictures() -> None:
    trace = simulate(one_f_one_b(2, 2))
    assert [bar.attrib["fill"] for bar in bars(gantt_svg(trace))] == [
        palette.COLOURS[s.action.kind] for s in trace.spans
    ]


def test_svg_lightens_virtual_stages() -> None:
    trace = simulate(SCHEDULES["interleaved"](2, 2, stages_per_rank=2))
    fills = {s.action.stage: bar.attrib["fill"] for s, bar in zip(trace.spans, bars(gantt_svg(trace)), strict=True)}
    backwards = [palette.shade(Kind.B, depth, 2) for depth in (0, 0, 1, 1)]
    assert [fills[stage] for stage in range(4)] == backwards  # the last one seen of every stage is a backward


def test_svg_can_be_read_without_seeing_it() -> None:
    root = ET.fromstring(gantt_svg(simulate(gpipe(4, 8))))
    assert root.attrib["role"] == "img"
    assert root.findtext(f"{SVG}title") == "gpipe, 4 ranks, 8 micro-batches: simulated"
    description = root.findtext(f"{SVG}desc") or ""
    assert "bubble 27.3 % of makespan × 4 ranks" in description  # (p - 1) / (m + p - 1) = 3 / 11
    assert "rank 3 27 %" in description


def test_svg_keeps_to_the_pages_text_colour() -> None:
    root = ET.fromstring(gantt_svg(simulate(gpipe(2, 2))))
    assert root.attrib["fill"] == "currentColor"
    numbers = {text.text for group in root.iter(f"{SVG}g") for text in group.iter(f"{SVG}text")}
    assert numbers == {"0", "1"}  # only what stands on a bar has a colour of its own


def test_svg_is_the_same_text_every_time() -> None:
    assert gantt_svg(simulate(one_f_one_b(3, 5))) == gantt_svg(simulate(one_f_one_b(3, 5)))


def test_svg_of_a_run_has_seconds() -> None:
    simulated = simulate(gpipe(2, 2), Costs(F=0.01, B=0.02))
    svg = gantt_svg(replace(simulated, source="paced"))
    assert "time (ms)" in svg
    assert "0F1, rank 0, 10 to 20 ms" in svg


def test_svg_escapes_a_schedules_name() -> None:
    trace = simulate(Schedule.from_text("0F0 0B0", name="<b> & co"))
    assert (ET.fromstring(gantt_svg(trace)).findtext(f"{SVG}title") or "").startswith("<b> & co, 1 rank, 1 micro-batch")


def test_svg_squeezes_a_long_name_beside_the_numbers() -> None:
    def headline_of(name: str) -> ET.Element:
        return next(
            iter(ET.fromstring(gantt_svg(simulate(Schedule.from_text("0F0 0B0", name=name)))).iter(f"{SVG}text"))
        )

    assert "textLength" not in headline_of("short").attrib
    numbers = "makespan 3, bubble 0.0 % of makespan × 1 rank"
    assert 300 < float(headline_of("long " * 30).attrib["textLength"]) < 980 - 112 - 6 * len(numbers)


def test_svg_refuses_a_trace_without_spans() -> None:
    with pytest.raises(CostError, match="holds no spans"):
        gantt_svg(replace(simulate(gpipe(2, 2)), spans=()))


def test_svg_of_two_traces_has_one_time_axis_and_a_line_where_the_first_ends() -> None:
    predicted = simulate(gpipe(2, 2), Costs(F=0.01, B=0.02))
    slower = replace(simulate(gpipe(2, 2), Costs(F=0.02, B=0.04)), source="paced")
    first, second = (
        ET.fromstring(f"<svg{part}") for part in compare_svg(predicted, slower, pattern="p").split("<svg")[1:]
    )
    ends = [
        max(float(bar.attrib["x"]) + float(bar.attrib["width"]) for bar in root.iter(f"{SVG}rect"))
        for root in (first, second)
    ]
    left = min(float(bar.attrib["x"]) for bar in first.iter(f"{SVG}rect"))
    assert ends[0] - left == pytest.approx((ends[1] - left) / 2, abs=1)
    for root in (first, second):
        (line,) = (path for path in root.iter(f"{SVG}path") if path.attrib.get("stroke") == palette.MARK)
        assert float(line.attrib["d"][1:].split()[0]) == pytest.approx(ends[0], abs=1)


# --- the model -------------------------------------------------------------------------------------------------------


@hypothesis_settings(max_examples=150, deadline=None)
@given(any_settings)
def test_explore_model_draws_or_says_why_not(settings: Settings) -> None:
    view = look(settings)
    if view.trace is None:
        (sentence,) = view.sentences
        assert sentence.startswith("Not this way: ")
        assert "\n" not in sentence
    else:
        assert len(view.sentences) == 3
        assert len(bars(gantt_svg(view.trace))) == len(view.trace.spans)


@hypothesis_settings(max_examples=100, deadline=None)
@given(any_settings, st.floats(0, 1))
def test_explore_modes_show_something_readable_at_any_time(settings: Settings, share: float) -> None:
    trace = look(settings).trace
    if trace is None:
        return
    film, time = Film(trace), trace.start + share * trace.makespan
    pictures = [architecture(trace.schedule), data(film, time), state(film, time)]
    for shown, sentences in pictures:
        root = ET.fromstring(shown[shown.index("<svg" if "<svg" in shown else "<table") :])
        assert sentences
        assert all(sentence.endswith((".", ".)")) for sentence in sentences)
        if root.tag == f"{SVG}svg":
            assert root.findtext(f"{SVG}title")
            assert root.findtext(f"{SVG}desc") == " ".join(sentences)
        else:
            assert root.findtext("caption")
            assert len(root.findall("tbody/tr")) == trace.num_ranks
    assert len(list(ET.fromstring(pictures[1][0]).iter(f"{SVG}circle"))) <= trace.schedule.num_microbatches
    assert performance(settings, trace, compare=False).count("<tr>") == 2


TWO = look(Settings("gpipe", num_ranks=2, num_microbatches=2)).trace  # 0F0 0F1, 1F0 1F1 1B0 1B1 from 1 to 7, 0B0 at 5


@pytest.mark.parametrize(
    ("time", "where"),
    [
        (-1, ["before", "before"]),
        (0.5, ["forward at 0", "before"]),
        (1.5, ["forward at 1", "forward at 0"]),
        (2.5, ["waits back 1", "forward at 1"]),
        (3.5, ["back at 1", "waits back 1"]),
        (5.5, ["back at 0", "back at 1"]),
        (8, ["after", "back at 0"]),
        (9, ["after", "after"]),
    ],
)
def test_explore_data_knows_where_every_microbatch_is(time: float, where: list[str]) -> None:
    assert TWO is not None
    named = []
    for place in places(TWO, time):
        way = "forward" if place.forward else "back"
        if place.stage is None:
            named.append("before" if place.forward else "after")
        else:
            named.append(f"{way} at {place.stage}" if place.working else f"waits {way} {place.stage}")
    assert named == where


def test_explore_data_counts_who_has_not_started_and_who_is_done() -> None:
    trace = look(Settings("one_f_one_b", 4, 8)).trace
    assert trace is not None
    film = Film(trace)
    # 0B0 ends at 12; until then rank 0 has begun F0 to F3
    assert data(film, 11.9)[1][1] == "Of 8 micro-batches, 4 not started, 4 under way, 0 done."
    assert data(film, 12)[1][1] == "Of 8 micro-batches, 3 not started, 4 under way, 1 done."
    assert data(film, trace.end)[1][1] == "Of 8 micro-batches, 0 not started, 0 under way, 8 done."


def cells(table: str) -> list[list[str]]:
    """The body of a table, row by row."""
    root = ET.fromstring(table[table.index("<table") :])
    return [[cell.text or "" for cell in row] for row in root.findall("tbody/tr")]


def test_explore_state_follows_activations_and_gradients() -> None:
    # zb_h1 on 2 ranks, 2 micro-batches, rank 0: 0F0 0F1 0I0 0W0 0I1 0W1 from 0 to 2, then from 3 to 7
    trace = look(Settings("zb_h1", num_ranks=2, num_microbatches=2)).trace
    assert trace is not None
    film = Film(trace)
    rows = {time: cells(state(film, time)[0])[0] for time in (2, 4, 5, trace.end)}
    assert rows[2] == ["rank 0", "0", "2: 0:0 0:1", "0", "0 for stage 0"]
    assert rows[4] == ["rank 0", "0", "1: 0:1", "1: 0:0", "0 for stage 0"]
    assert rows[5] == ["rank 0", "0", "1: 0:1", "0", "1 for stage 0"]
    assert rows[trace.end] == ["rank 0", "1", "0", "0", "2 for stage 0"]


def test_explore_state_counts_versions_where_ranks_update_by_themselves() -> None:
    trace = look(Settings("pipedream", num_ranks=2, num_microbatches=4)).trace
    assert trace is not None
    versions = [[row[1] for row in cells(state(Film(trace), time)[0])] for time in (0, 4, trace.end)]
    assert versions == [["0", "0"], ["0", "1"], ["4", "4"]]  # 1B0 ends at 4, 0B0 at 6


def test_explore_architecture_counts_what_crosses_between_ranks() -> None:
    schedule = SCHEDULES["zb_v"](2, 3)  # stages 0 1 2 3 on ranks 0 1 1 0: two of three boundaries lie between ranks
    picture, sentences = architecture(schedule)
    assert sentences[0].startswith("24 layers in 4 stages of 6, on 2 ranks")
    assert "1,024 bytes of activations forward" in sentences[1]  # 4 samples, 64 wide, 4 bytes
    assert sentences[2] == (
        "Boundaries between stages: 3, of them between ranks: 2. A step of 3 micro-batches sends 12 messages, "
        "12,288 bytes."
    )
    assert [bar.findtext(f"{SVG}title") for bar in bars(picture)][3] == "stage 3: layers 18–23, rank 0"


def test_explore_performance_compares_with_every_other_schedule() -> None:
    settings = Settings("one_f_one_b", num_ranks=4, num_microbatches=6)
    trace = look(settings).trace
    assert trace is not None
    rows = {row[0]: row[1:] for row in cells(performance(settings, trace, compare=True))}
    assert rows.keys() == SCHEDULES.keys()
    # (m + p - 1)(F + B) = 27; 3 of 9; 6 / 27; p; 2 m (p - 1)
    assert rows["one_f_one_b"] == ["27", "33.3 %", "0.222", "4", "36"]
    assert rows["gpipe"] == ["27", "33.3 %", "0.222", "6", "36"]
    assert rows["interleaved"] == ["not in this size", "", "", "", ""]


def test_explore_model_searches_under_the_memory_limit() -> None:
    view = look(Settings("search", num_ranks=4, num_microbatches=8, memory_limit=3))
    assert view.trace is not None
    assert max(kept(view.trace, remat=False)) <= 3
    assert "limit" not in view.sentences[2]


def test_explore_model_says_which_ranks_break_the_memory_limit() -> None:
    # 1F1B keeps 4, 3, 2, 1
    assert (
        look(Settings("one_f_one_b", 4, 8, memory_limit=2.5))
        .sentences[2]
        .endswith("That is over the limit of 2.5 on ranks 0, 1.")
    )
    assert "limit" not in look(Settings("one_f_one_b", 4, 8, memory_limit=4)).sentences[2]


def test_explore_model_keeps_inputs_only_where_forwards_run_again() -> None:
    trace = look(Settings("gpipe", num_ranks=2, num_microbatches=6, remat=True)).trace
    assert trace is not None
    assert sum(span.recompute for span in trace.spans) == 12
    # six inputs of one layer in twelve, and one whole activation
    assert kept(trace, remat=True) == pytest.approx((6 / 12 + 1, 6 / 12 + 1))
    assert kept(trace, remat=False) == (6, 6)


def test_explore_model_names_the_bubble_with_its_denominator_and_formula() -> None:
    view = look(Settings("gpipe", num_ranks=4, num_microbatches=8))
    assert view.sentences[0].endswith("The bubble is 27.3 % of makespan × 4 ranks.")
    assert view.sentences[1] == "By the formula, bubble = (p - 1)/(m + p - 1) = (4 - 1)/(8 + 4 - 1) = 27.3 %."


def test_explore_model_compares_with_one_rank() -> None:
    # Huang et al. 2019: (m + p - 1)(F + B) against p m (F + B)
    view = look(Settings("gpipe", num_ranks=4, num_microbatches=8))
    assert view.sentences[0].startswith("4 ranks need 33, one alone would need 96: 2.91 times as fast.")


def test_explore_model_counts_the_delay_in_the_formula() -> None:
    view = look(Settings("gpipe", num_ranks=4, num_microbatches=8, delay=0.5))
    assert view.trace is not None
    assert view.trace.makespan == pytest.approx(36)  # (m + p - 1)(F + B) + 2 c (p - 1)
    assert view.sentences[1].endswith("= 36.")


def test_explore_model_says_where_a_formula_does_not_hold() -> None:
    view = look(Settings("zb_h1", num_ranks=4, num_microbatches=2))
    assert view.trace is not None
    assert view.sentences[1].startswith("No closed form here: that of zb_h1 holds where ")


def test_explore_model_divides_a_ranks_time_over_its_stages() -> None:
    trace = look(Settings("interleaved", num_ranks=2, num_microbatches=4, stages_per_rank=2, F=1, I=1, W=1)).trace
    assert trace is not None
    assert [trace.busy(rank) for rank in range(2)] == [12, 12]  # 4 micro-batches of 3, however many stages


def test_explore_model_says_which_rank_keeps_most() -> None:
    # 1F1B keeps min(m, p - r) on rank r: Narayanan et al. 2021, section 2.2
    assert "rank 0 keeps 4, rank 3 keeps 1 " in look(Settings("one_f_one_b", 4, 8)).sentences[2]
    assert "every rank keeps 8 " in look(Settings("gpipe", 4, 8)).sentences[2]


def test_explore_model_passes_on_why_a_schedule_cannot_be() -> None:
    view = look(Settings("interleaved", num_ranks=4, num_microbatches=6, stages_per_rank=2))
    assert view.trace is None
    assert "multiple of its 4 ranks" in view.sentences[0]


# --- the widget ------------------------------------------------------------------------------------------------------


def shown(explorer: Explorer) -> list[str]:
    return [paragraph.text or "" for paragraph in ET.fromstring(f"<div>{explorer.words.value}</div>")]


def test_explore_shows_the_picture_and_sentences_of_its_model() -> None:
    explorer = explore(schedule="gpipe", num_ranks=3)
    view = look(Settings("gpipe", 3))
    assert view.trace is not None
    assert len(bars(explorer.picture.value)) == len(view.trace.spans)
    assert shown(explorer) == list(view.sentences)


@pytest.mark.parametrize(
    ("control", "value"),
    [
        ("schedule", "gpipe"),
        ("num_ranks", 5),
        ("num_microbatches", 9),
        ("F", 2.0),
        ("I", 2.0),
        ("W", 2.0),
        ("delay", 0.5),
        ("remat", True),
    ],
)
def test_explore_follows_every_control(control: str, value: object) -> None:
    explorer = explore()
    before = explorer.picture.value
    explorer.controls[control].value = value
    assert explorer.settings == replace(Settings(), **{control: value})  # type: ignore[arg-type]
    assert explorer.picture.value != before
    assert shown(explorer) == list(look(explorer.settings).sentences)


def test_explore_offers_stages_per_rank_only_where_there_is_a_choice() -> None:
    explorer = explore(schedule="gpipe")
    assert explorer.controls["stages_per_rank"].disabled
    explorer.controls["schedule"].value = "interleaved"
    assert not explorer.controls["stages_per_rank"].disabled
    before = explorer.picture.value
    explorer.controls["stages_per_rank"].value = 4
    assert explorer.picture.value != before


def test_explore_says_why_it_draws_nothing_and_recovers() -> None:
    explorer = explore(schedule="interleaved", num_microbatches=8)
    explorer.controls["num_microbatches"].value = 7
    assert explorer.picture.value == ""
    assert "multiple of its 4 ranks" in shown(explorer)[0]
    explorer.controls["num_microbatches"].value = 4
    assert bars(explorer.picture.value)


def test_explore_stores_a_picture_and_stable_text() -> None:
    stored = explore(schedule="gpipe", num_ranks=2)._repr_mimebundle_(include=None, exclude=None)
    assert b64decode(stored["image/png"]).startswith(b"\x89PNG")
    assert stored["text/plain"] == (
        "explore(schedule='gpipe', num_ranks=2, num_microbatches=8, stages_per_rank=2, F=1.0, I=1.0, W=1.0, delay=0.0)"
    )
    assert stored["application/vnd.jupyter.widget-view+json"]["model_id"]


def test_explore_stores_text_where_there_is_no_picture() -> None:
    stored = explore(schedule="interleaved", num_microbatches=7)._repr_mimebundle_()
    assert "image/png" not in stored


@pytest.mark.parametrize("mode", MODES)
def test_explore_shows_each_mode_and_follows_time_where_it_matters(mode: str) -> None:
    explorer = explore(mode=mode, schedule="zb_h1", num_ranks=3)
    assert explorer.mode.value == mode
    assert shown(explorer)
    assert ET.fromstring(explorer.picture.value).findtext(f"{SVG}title")
    before = explorer.panel.value + explorer.words.value + explorer.cursor.value
    explorer.time.value = explorer.time.max
    after = explorer.panel.value + explorer.words.value + explorer.cursor.value
    assert (before != after) is (mode in ("data", "state"))
    assert (explorer.time.layout.display != "none") is (mode in ("data", "state"))


@hypothesis_settings(max_examples=40, deadline=None)
@given(any_settings, st.sampled_from(MODES), st.integers(0, 200))
def test_explore_keeps_up_with_any_moves(settings: Settings, mode: str, time: int) -> None:
    moved = _EXPLORER[0] if _EXPLORER else explore()
    _EXPLORER[:] = [moved]
    moved.mode.value, moved.time.value = mode, time
    for name, value in asdict(settings).items():
        moved.controls[name].value = value
    assert shown(moved)
    drawn = look(moved.settings).trace is not None
    assert bool(moved.picture.value) is drawn
    assert moved.run.disabled is not drawn


_EXPLORER: list[Explorer] = []  # one for all examples: what one leaves must not disturb the next


@pytest.mark.timeout(60)
def test_explore_runs_exactly_what_it_shows() -> None:
    explorer = explore(schedule="gpipe", num_ranks=2, num_microbatches=2, delay=0.5, remat=True, mode="architecture")
    assert "sends 4 messages, 4,096 bytes." in explorer.words.value
    explorer.run.click()
    words, predicted, paced = explorer.ran.value.split("<svg")
    assert "every gradient equals plain training" in words
    assert "4,096 bytes" in words
    for picture in (predicted, paced):
        assert picture.count(" again, rank") == 4
    explorer.controls["F"].value = 2.0
    assert explorer.ran.value == ""


def test_explore_says_why_it_cannot_run() -> None:
    explorer = explore(schedule="pipedream")
    explorer.run.click()
    assert "It did not run: schedule &#x27;pipedream&#x27; has weight updates among its actions" in explorer.ran.value


def test_explore_labels_every_control() -> None:
    explorer = explore()
    labels = [control.description for control in explorer.controls.values()]
    assert len(set(labels)) == len(asdict(Settings()))
    labels += [control.description for control in (explorer.mode, explorer.compare, explorer.time, explorer.run)]
    assert all(labels)


def test_explore_refuses_a_mode_that_is_none() -> None:
    with pytest.raises(ScheduleError, match="there is no mode 'memory'; choose one of performance, architecture"):
        explore(mode="memory")


def test_explore_keeps_a_first_value_beyond_its_sliders() -> None:
    assert explore(num_ranks=20, F=9.0).settings == Settings(num_ranks=20, F=9.0)


def test_explore_refuses_what_no_control_could_say() -> None:
    with pytest.raises(ScheduleError, match="there is no schedule 'gpip'; choose one of naive, gpipe"):
        explore(schedule="gpip")
    with pytest.raises(SizeError, match="num_ranks must be at least 1, got 0"):
        explore(num_ranks=0)
    with pytest.raises(CostError, match="F must be finite and not negative, got -1"):
        explore(F=-1)
    with pytest.raises(CostError, match="memory_limit must be a number, got '4'"):
        explore(memory_limit="4")
    with pytest.raises(ScheduleError, match=r"remat must be True or False here.*got 'stage'"):
        explore(remat="stage")  # the engine's word
    with pytest.raises(CostError, match="memory_limit must be finite and not negative, got -1"):
        explore(memory_limit=-1)
    with pytest.raises(TypeError, match="ranks"):
        explore(ranks=4)
