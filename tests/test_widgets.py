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
from pipelab.widgets.explore_model import Settings, look

SVG = "{http://www.w3.org/2000/svg}"
any_settings = st.builds(
    Settings,
    schedule=st.sampled_from(sorted(SCHEDULES)),
    num_ranks=st.integers(1, 9),
    num_microbatches=st.integers(1, 20),
    stages_per_rank=st.integers(1, 4),
    F=st.floats(0, 4),
    I=st.floats(0, 4),
    W=st.floats(0, 4),
    delay=st.floats(0, 4),
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


def test_svg_refuses_a_trace_without_spans() -> None:
    with pytest.raises(CostError, match="holds no spans"):
        gantt_svg(replace(simulate(gpipe(2, 2)), spans=()))


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


def test_explore_labels_every_control() -> None:
    labels = [control.description for control in explore().controls.values()]
    assert all(labels)
    assert len(set(labels)) == len(asdict(Settings()))


def test_explore_keeps_a_first_value_beyond_its_sliders() -> None:
    assert explore(num_ranks=20, F=9.0).settings == Settings(num_ranks=20, F=9.0)


def test_explore_refuses_what_no_control_could_say() -> None:
    with pytest.raises(ScheduleError, match="there is no schedule 'gpip'; choose one of naive, gpipe"):
        explore(schedule="gpip")
    with pytest.raises(SizeError, match="num_ranks must be at least 1, got 0"):
        explore(num_ranks=0)
    with pytest.raises(CostError, match="F must be finite and not negative, got -1"):
        explore(F=-1)
    with pytest.raises(TypeError, match="ranks"):
        explore(ranks=4)
