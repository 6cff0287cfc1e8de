"""Traces become pictures: as many bars as spans, on one time axis, with the words that a reader needs."""

from __future__ import annotations

import struct
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import matplotlib
import matplotlib.pyplot as plt
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text

from pipelab import palette
from pipelab.action import Kind
from pipelab.axes import ink_on_paper
from pipelab.costs import Costs
from pipelab.errors import CostError, SizeError
from pipelab.gantt import gantt, gantt_compare, gantt_png
from pipelab.mesh import Mesh
from pipelab.mesh_plot import mesh_plot
from pipelab.plots import bar_plot, line_plot
from pipelab.schedule import Schedule
from pipelab.schedules import gpipe, interleaved, one_f_one_b, pipedream
from pipelab.simulate import simulate
from pipelab.stacked import gantt_memory
from pipelab.trace import Trace
from pipelab.version_plot import version_plot
from pipelab.widgets import play

VIRTUAL = Schedule.from_text(
    """
    virtual: 2 ranks, 2 micro-batches, stages on ranks 0 1 0 1
    rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
)
SPLIT = Schedule.from_text("rank 0: 0F0 0F1 0I0 0W0 0I1 0W1\nrank 1: 1F0 1I0 1F1 1I1 1W0 1W1", name="split")


def collection(ax: Axes, label: str) -> PolyCollection:
    (found,) = [c for c in ax.collections if c.get_label() == label]
    assert isinstance(found, PolyCollection)
    return found


def boxes(bars: PolyCollection) -> list[tuple[float, int, float]]:
    """(start, row, end) of every bar."""
    extents = [path.get_extents() for path in bars.get_paths()]
    return [(round(e.x0, 9), round((e.y0 + e.y1) / 2), round(e.x1, 9)) for e in extents]


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def one_text(ax: Axes, text: str) -> Text:
    (found,) = [child for child in ax.get_children() if isinstance(child, Text) and child.get_text() == text]
    return found


def legend(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def run_of(trace: Trace, seconds: float, late: float = 0.0) -> Trace:
    """A run that took `seconds` a unit of `trace`, and whose last span ended `late` seconds behind."""
    spans = [s._replace(start=5 + seconds * s.start, end=5 + seconds * s.end) for s in trace.spans]
    last = max(range(len(spans)), key=lambda i: spans[i].end)
    spans[last] = spans[last]._replace(end=spans[last].end + late)
    return replace(trace, spans=tuple(spans), messages=(), source="measured")


@pytest.mark.parametrize("schedule", [gpipe(2, 2), one_f_one_b(4, 8), VIRTUAL, SPLIT], ids=lambda s: s.name)
def test_gantt_draws_every_span_where_and_when_it_ran(schedule: Schedule) -> None:
    trace = simulate(schedule, Costs(F=1, I=2, W=0.5, comm=0.25))
    ax = gantt(trace)
    assert boxes(collection(ax, "actions")) == [(s.start, s.rank, s.end) for s in trace.spans]
    assert not ax.patches  # hundreds of Rectangles would take most of a second


def test_gantt_colours_actions_by_kind() -> None:
    trace = simulate(SPLIT)
    drawn = [to_hex(c) for c in collection(gantt(trace), "actions").get_facecolor()]
    assert drawn == [palette.COLOURS[span.action.kind] for span in trace.spans]


def test_gantt_tells_virtual_stages_apart_by_shade() -> None:
    trace = simulate(VIRTUAL)
    ax = gantt(trace)
    forwards = {
        span.action.stage: to_hex(colour)
        for span, colour in zip(trace.spans, collection(ax, "actions").get_facecolor(), strict=True)
        if span.action.kind is Kind.F
    }
    assert forwards[0] == forwards[1] == palette.shade(Kind.F, 0, 2)
    assert forwards[2] == forwards[3] == palette.shade(Kind.F, 1, 2) != forwards[0]
    assert "a rank's later stage" in legend(ax)


def test_gantt_puts_rank_0_on_top_and_starts_the_time_axis_at_0() -> None:
    ax = gantt(run_of(simulate(gpipe(4, 8)), seconds=0.01))
    assert ax.get_xlim() == (0, pytest.approx(0.33))
    assert ax.get_ylim() == (3.5, -0.5)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_gantt_writes_the_microbatch_into_bars_that_have_room() -> None:
    numbers = sorted(text for text in texts(gantt(simulate(gpipe(2, 3)))) if text.isdigit())
    assert numbers == sorted(str(microbatch) for microbatch in range(3) for _ in range(2 * 2))


def test_gantt_writes_large_numbers_into_large_bars_beside_narrow_ones() -> None:
    # one quick rank used to give every bar of the picture its own smallest size
    ax = gantt(simulate(gpipe(4, 8), Costs(F=(0.3, 1, 1, 1.6), B=(0.5, 2, 2, 3))))
    sizes = {(round(t.get_position()[1]), t.get_fontsize()) for t in ax.texts if t.get_text() == "7"}
    assert {(1, 9.0), (2, 9.0), (3, 9.0)} < sizes
    assert all(size < 9 for row, size in sizes if row == 0)


def test_gantt_leaves_out_numbers_where_bars_are_too_small() -> None:
    ax = gantt(simulate(one_f_one_b(16, 64)))
    assert not [text for text in texts(ax) if text.isdigit()]
    assert len(collection(ax, "actions").get_paths()) == 2 * 16 * 64


def test_gantt_says_which_schedule_what_made_it_and_how_much_is_idle() -> None:
    ax = gantt(simulate(gpipe(4, 8)))
    assert ax.get_title(loc="left") == "gpipe, 4 ranks, 8 micro-batches: simulated"
    # Huang et al. 2019: (p - 1) / (m + p - 1) = 3 / 11
    assert ax.get_title(loc="right") == "makespan 33, bubble 27.3 % of makespan × 4 ranks"
    assert texts(ax).count("27 %") == 4


def test_gantt_says_how_many_stages_a_rank_holds() -> None:
    assert gantt(simulate(VIRTUAL)).get_title(loc="left") == "virtual, 2 ranks × 2 stages, 2 micro-batches: simulated"


def test_gantt_headline_and_numbers_never_touch() -> None:
    # by an estimate of their widths, the first pair was put side by side with nothing between the two
    for schedule in (interleaved(8, 32, 2), gpipe(4, 8), one_f_one_b(16, 64)):
        ax = gantt(simulate(schedule))
        name, numbers = ax.get_title(loc="left"), ax.get_title(loc="right")
        left, right = (one_text(ax, text).get_window_extent() for text in (name, numbers))
        above = name.endswith("\n") and left.y0 + left.height / 2 >= right.y1 - 1
        assert above or left.x1 + 10 < right.x0


def test_gantt_idle_shares_are_each_ranks_own() -> None:
    # rank 0 works 3 of 9 units, rank 1 works 6 of 9
    ax = gantt(simulate(gpipe(2, 1), Costs(F=(1, 2), B=(2, 4))))
    assert [text for text in texts(ax) if "%" in text] == ["67 %", "33 %"]


@pytest.mark.parametrize(
    ("seconds", "unit"), [(1.0, "time (s)"), (0.01, "time (ms)"), (1e-5, "time (µs)")], ids=["s", "ms", "us"]
)
def test_gantt_of_a_run_has_seconds_on_the_axis(seconds: float, unit: str) -> None:
    ax = gantt(run_of(simulate(gpipe(2, 2)), seconds))
    assert ax.get_xlabel() == unit
    ax.figure.canvas.draw()
    ticks = [float(label.get_text()) for label in ax.get_xticklabels() if label.get_text()]
    assert ticks[0] == 0
    assert ticks[-1] == pytest.approx(9 * seconds * {"s": 1, "ms": 1e3, "µs": 1e6}[unit[6:-1]])


def test_gantt_of_a_simulation_has_the_unit_of_its_costs() -> None:
    assert gantt(simulate(gpipe(2, 2))).get_xlabel() == "time (units of the costs)"
    assert gantt(simulate(gpipe(2, 2)), unit="hours").get_xlabel() == "time (hours)"


def test_gantt_legend_names_the_kinds_that_are_there() -> None:
    assert legend(gantt(simulate(gpipe(2, 2)))) == ["F forward", "B backward", "idle"]
    assert legend(gantt(simulate(SPLIT))) == ["F forward", "I input gradient", "W weight gradient", "idle"]


def test_gantt_hatches_idle_time_on_every_rank() -> None:
    idle = gantt(simulate(gpipe(2, 2))).collections[0]
    assert idle.get_hatch()
    assert boxes(idle) == [(0, 0, 9), (0, 1, 9)]


def test_gantt_draws_actions_that_take_no_time_as_lines() -> None:
    trace = simulate(pipedream(2, 2))  # updates, which are free unless Costs says otherwise
    bars = collection(gantt(trace), "actions")
    edges = [to_hex(edge) for edge in bars.get_edgecolor()]
    update = palette.COLOURS[Kind.U]
    assert edges == [update if span.action.kind is Kind.U else palette.PAPER for span in trace.spans]


def test_gantt_hatches_recomputation() -> None:
    trace = simulate(gpipe(2, 2), remat=True)
    ax = gantt(trace)
    again = collection(ax, "recomputation")
    assert again.get_hatch()
    assert boxes(again) == [(s.start, s.rank, s.end) for s in trace.spans if s.recompute]
    assert "F again" in legend(ax)


def test_gantt_outlines_the_critical_path() -> None:
    trace = simulate(gpipe(2, 1))
    ax = gantt(trace, critical_path=True)
    # 0F0, 1F0, 1B0, 0B0: with one micro-batch everything waits for everything
    assert boxes(collection(ax, "critical path")) == [(0, 0, 1), (1, 1, 2), (2, 1, 4), (4, 0, 6)]
    (steps,) = [c for c in ax.collections if isinstance(c, LineCollection)]
    assert len(steps.get_segments()) == 2


def test_gantt_draws_the_messages_of_one_microbatch_and_fades_the_others() -> None:
    trace = simulate(gpipe(3, 2), Costs(comm=0.5))
    ax = gantt(trace, arrows_of=1)
    arrows = [(a.xyann, a.xy) for a in ax.texts if hasattr(a, "xyann")]
    # 0F1 ends at 2, 1F1 at 3.5, 2F1 at 5; backwards: 2B1 ends at 9, 1B1 at 11.5
    assert sorted(arrows) == [((2, 0), (2.5, 1)), ((3.5, 1), (4, 2)), ((9, 2), (9.5, 1)), ((11.5, 1), (12, 0))]
    colours = [to_hex(c) for c in collection(ax, "actions").get_facecolor()]
    for span, colour in zip(trace.spans, colours, strict=True):
        full = palette.COLOURS[span.action.kind]
        assert colour == (full if span.action.microbatch == 1 else palette.faded(full))


def test_gantt_draws_on_the_axes_that_it_is_given() -> None:
    _, ax = plt.subplots(figsize=(5, 2))
    assert gantt(simulate(gpipe(2, 2)), ax) is ax
    assert ax.get_title(loc="left").endswith("simulated\n")  # a line above the numbers: both have no room in one


def test_gantt_leaves_what_a_kernel_sets_with_its_first_figure() -> None:
    # the first figure of a notebook turns `interactive` on; restoring all of rcParams turned it off, and no later
    # picture appeared
    def first_figure(ax: Axes | None = None) -> None:
        matplotlib.interactive(True)

    assert not matplotlib.is_interactive()
    try:
        ink_on_paper(first_figure)()
        assert matplotlib.is_interactive()
    finally:
        matplotlib.interactive(False)


@pytest.mark.parametrize(
    "draw",
    [
        lambda trace: [gantt(trace)],
        lambda trace: gantt_memory(trace),
        lambda _: [line_plot({"a": {1: 2}}, xlabel="x", ylabel="y")],
        lambda _: [bar_plot({"a": [1, 2]}, ylabel="y")],
        lambda _: mesh_plot(Mesh(2, 2, 2)),
        lambda trace: [version_plot(trace)],
    ],
    ids=["gantt", "memory", "line", "bar", "mesh", "versions"],
)
def test_pictures_read_under_a_dark_style(draw: Callable[[Trace], Sequence[Axes]]) -> None:
    # plt.style.use("dark_background") wrote white words on white paper
    with plt.style.context("dark_background"):
        axes = draw(simulate(one_f_one_b(2, 4)))
        axes[0].figure.canvas.draw()
        words = [text for ax in axes for text in ax.findobj(Text) if text.get_text() and text.get_visible()]
        outside = [text for text in words if not text.get_text().isdigit()]  # numbers stand in bars as well
        assert to_hex(axes[0].figure.get_facecolor()) == to_hex(axes[0].get_facecolor()) == palette.PAPER
        assert outside
        assert max(palette.luminance(to_hex(text.get_color())) for text in outside) < 0.2


def test_gantt_leaves_the_colours_of_given_axes() -> None:
    with plt.style.context("dark_background"):
        figure, ax = plt.subplots()
        gantt(simulate(gpipe(2, 2)), ax)
        assert to_hex(ax.title.get_color()) == "#ffffff"
        assert to_hex(figure.get_facecolor()) == "#000000"
        gantt_compare(simulate(gpipe(2, 2)), simulate(gpipe(2, 2)), figure.subplots(2))


def test_gantt_changes_nothing_global() -> None:
    before = dict(matplotlib.rcParams)
    gantt(simulate(gpipe(2, 2)))
    assert dict(matplotlib.rcParams) == before


def test_gantt_refuses_what_it_cannot_draw() -> None:
    trace = simulate(gpipe(2, 2))
    with pytest.raises(SizeError, match="arrows_of names micro-batch 2, but there are 2"):
        gantt(trace, arrows_of=2)
    with pytest.raises(CostError, match="holds no spans"):
        gantt(replace(trace, spans=()))
    with pytest.raises(CostError, match="takes no time"):
        gantt(simulate(gpipe(2, 2), Costs(F=0, B=0)))
    assert not plt.get_fignums()


@pytest.mark.parametrize("draw", [gantt, gantt_memory, version_plot, lambda found: gantt_compare(found, found), play])
def test_pictures_refuse_what_has_no_times(draw: Callable[[object], object]) -> None:
    # a schedule in place of a trace is the first slip of all, and was an AttributeError
    for found, why in (
        (gpipe(2, 2), r"needs the times of a Trace, and Schedule has none: give simulate\(schedule\)"),
        (None, "and NoneType has none"),
        (replace(simulate(gpipe(2, 2)), spans=()), "holds no spans"),
        (simulate(gpipe(2, 2), Costs(F=0, B=0)), "takes no time"),
    ):
        with pytest.raises(CostError, match=why):
            draw(found)


def test_gantt_of_many_ranks_fits_on_a_screen_and_names_what_has_room() -> None:
    ax = gantt(simulate(one_f_one_b(64, 64)))
    assert ax.figure.get_size_inches()[1] < 10
    ax.figure.canvas.draw()
    names = [label.get_window_extent() for label in ax.get_yticklabels()]
    assert len(names) >= 16
    assert all(lower.y1 < upper.y0 + 2 for upper, lower in pairwise(names))
    assert len([text for text in texts(ax) if "%" in text]) == len(names)


# --- two traces ------------------------------------------------------------------------------------------------------


def test_gantt_compare_shares_one_time_axis() -> None:
    predicted = simulate(gpipe(2, 2), Costs(F=0.1, B=0.2))
    above, below = gantt_compare(predicted, run_of(predicted, seconds=1.2))
    assert above.get_xlim() == below.get_xlim() == (0, pytest.approx(0.9 * 1.2))
    above.set_xlim(0, 0.5)
    assert below.get_xlim() == (0, 0.5)
    assert above.get_position().y0 > below.get_position().y1
    assert below.get_xlabel() == "time (s)"
    assert [ax.get_title(loc="left").split(": ")[1] for ax in (above, below)] == ["simulated", "measured"]


def test_gantt_compare_carries_the_predicted_end_to_the_run() -> None:
    predicted = simulate(gpipe(2, 2), Costs(F=0.1, B=0.2))
    for ax in gantt_compare(predicted, run_of(predicted, seconds=1.2)):
        assert [line.get_xdata()[0] for line in ax.lines] == [pytest.approx(0.9)]
        assert not ax.lines[0].get_clip_on()  # half of it was cut off where the run ends with the prediction


def test_gantt_compare_marks_actions_that_end_late() -> None:
    predicted = simulate(gpipe(2, 2), Costs(F=0.1, B=0.2))
    measured = run_of(predicted, seconds=1, late=0.1)
    _, below = gantt_compare(predicted, measured)
    assert "late by over 5 % of makespan: 1 of 8" in legend(below)
    (late,) = boxes(collection(below, "late by over 5 % of makespan: 1 of 8"))
    assert late == (pytest.approx(0.7), 0, pytest.approx(1.0))
    _, below = gantt_compare(predicted, measured, tolerance=0.2)
    assert "late by over 20 % of makespan: 0 of 8" in legend(below)


def test_gantt_compare_of_two_schedules_marks_no_action() -> None:
    above, below = gantt_compare(simulate(gpipe(4, 8)), simulate(one_f_one_b(4, 8)))
    assert not [text for text in legend(below) if text.startswith("late")]
    assert below.get_xlabel() == "time (units of the costs)"
    assert above.get_title(loc="left").startswith("gpipe")


def test_gantt_compare_refuses_two_units_of_time() -> None:
    predicted = simulate(gpipe(2, 2))
    with pytest.raises(CostError, match="not in one unit of time: simulate with costs in seconds"):
        gantt_compare(predicted, run_of(predicted, seconds=0.001))


# --- a notebook's cell -----------------------------------------------------------------------------------------------


def test_gantt_png_is_the_same_every_time_and_leaves_no_figure() -> None:
    trace = simulate(one_f_one_b(4, 8))
    picture = gantt_png(trace)
    width, height = struct.unpack(">II", picture[16:24])
    assert 900 < width <= 1000
    assert 150 < height < 350
    assert picture == gantt_png(trace)
    assert not plt.get_fignums()


def test_trace_shows_itself_as_a_picture_and_text() -> None:
    trace = simulate(gpipe(2, 2))
    shown = trace._repr_mimebundle_(include=None, exclude=None)
    assert b64decode(shown["image/png"]).startswith(b"\x89PNG")
    assert shown["text/plain"] == repr(trace)


def test_trace_of_a_run_shows_text_without_times() -> None:
    trace = simulate(gpipe(2, 2))
    shown = [run_of(trace, seconds)._repr_mimebundle_()["text/plain"] for seconds in (0.01, 0.02)]
    assert shown == ["<Trace of gpipe, measured: 2 ranks, 8 spans>"] * 2


def test_trace_without_spans_shows_text_only() -> None:
    empty = replace(simulate(gpipe(2, 2)), spans=())
    assert empty._repr_mimebundle_() == {"text/plain": "<Trace of gpipe, simulated: empty>"}
    timeless = simulate(gpipe(2, 2), Costs(F=0, B=0))
    assert timeless._repr_mimebundle_() == {"text/plain": "<Trace of gpipe, simulated: takes no time>"}


def test_schedule_shows_itself_as_a_picture_and_text() -> None:
    schedule = gpipe(2, 2)
    shown = schedule._repr_mimebundle_(include=None, exclude=None)
    assert b64decode(shown["image/png"]).startswith(b"\x89PNG")
    assert shown["text/plain"] == repr(schedule)


def test_schedule_that_cannot_run_shows_text_only() -> None:
    backwards = Schedule.from_text("rank 0: 0B0 0F0")
    assert backwards._repr_mimebundle_() == {"text/plain": repr(backwards)}


def test_schedule_too_large_to_draw_shows_text_only() -> None:
    schedule = gpipe(2, 4000)
    assert schedule._repr_mimebundle_() == {"text/plain": repr(schedule)}
