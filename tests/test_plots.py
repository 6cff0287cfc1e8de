"""Memory over time and bubbles over micro-batches: the drawn numbers are the given ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from matplotlib.axes import Axes

from pipelab.errors import SizeError
from pipelab.memory import memory_curve
from pipelab.plots import bar_plot, bubble_plot, line_plot, memory_plot
from pipelab.schedules import gpipe, one_f_one_b, zb_h1
from pipelab.simulate import simulate


def legend(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def heights(ax: Axes, label: str) -> list[float]:
    """How high the areas of that label reach above the floor of their rows, in rows, rank by rank."""
    areas = [c.get_paths()[0].vertices for c in ax.collections if c.get_label() == label]
    return [float(max(rank + 0.5 - area[:, 1])) for rank, area in enumerate(areas)]


def test_memory_plot_draws_every_rank_on_one_scale() -> None:
    trace = simulate(one_f_one_b(4, 8))
    ax = memory_plot(memory_curve(trace, 3e6), trace)
    # 1F1B keeps min(m, p - r) micro-batches: Narayanan et al. 2021, section 2.2
    drawn = heights(ax, "kept for B")
    assert [height / drawn[3] for height in drawn] == pytest.approx([4, 3, 2, 1])
    assert max(drawn) < 1  # no row reaches into the one above


def test_memory_plot_writes_the_peaks_with_their_unit() -> None:
    trace = simulate(one_f_one_b(4, 8))
    ax = memory_plot(memory_curve(trace, 3e6), trace)
    assert [text.get_text() for text in ax.texts] == ["peak", "12", "9", "6", "3"]
    assert ax.get_title(loc="right") == "kept at the fullest moment: 12 MB"
    ax = memory_plot(memory_curve(trace, 1), trace, unit="activations")
    assert ax.get_title(loc="right") == "kept at the fullest moment: 4 activations"


def test_memory_plot_follows_time_from_the_first_start() -> None:
    simulated = simulate(gpipe(1, 2))  # F0 from 0, F1 from 1, B0 ends at 4, B1 at 6
    spans = tuple(s._replace(start=s.start + 7, end=s.end + 7) for s in simulated.spans)
    trace = replace(simulated, spans=spans, source="measured")
    ax = memory_plot(memory_curve(trace, 1), trace)
    (area,) = [c.get_paths()[0].vertices for c in ax.collections if c.get_label() == "kept for B"]
    assert sorted({float(x) for x, y in area if y < 0.49}) == [0, 1, 4, 6]
    assert ax.get_xlim() == (0, 6)
    assert ax.get_xlabel() == "time (s)"


def test_memory_plot_shows_what_waits_for_w() -> None:
    trace = simulate(zb_h1(2, 4))
    assert legend(memory_plot(memory_curve(trace, 1), trace)) == ["kept for I", "kept for W"]
    whole = simulate(gpipe(2, 4))
    assert legend(memory_plot(memory_curve(whole, 1), whole)) == ["kept for B"]


def test_memory_plot_draws_a_limit_on_the_same_scale() -> None:
    trace = simulate(gpipe(2, 4))
    ax = memory_plot(memory_curve(trace, 1000), trace, limit=2000)
    lines = [line.get_ydata()[0] for line in ax.lines if line.get_label() == "limit 2 kB"]
    assert [rank + 0.5 - y for rank, y in enumerate(lines)] == pytest.approx(
        [height / 2 for height in heights(ax, "kept for B")]
    )
    assert "limit 2 kB" in legend(ax)


def test_memory_plot_refuses_a_curve_of_another_trace() -> None:
    curve = memory_curve(simulate(gpipe(2, 2)), 1)
    with pytest.raises(SizeError, match="the curve is of 2 ranks, the trace of 3"):
        memory_plot(curve, simulate(gpipe(3, 2)))


def test_bubble_plot_draws_the_points_in_percent() -> None:
    # (p - 1) / (m + p - 1) for p = 4: Huang et al. 2019, section 2.3
    points = {m: 3 / (m + 3) for m in (8, 1, 64)}
    ax = bubble_plot({"gpipe": points, "no bubble": {1: 0.0}})
    assert [list(line.get_xdata()) for line in ax.lines] == [[1, 8, 64], [1]]
    assert list(ax.lines[0].get_ydata()) == pytest.approx([75, 300 / 11, 300 / 67])
    assert legend(ax) == ["gpipe", "no bubble"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "8", "64"]
    assert ax.get_ylabel() == "bubble, % of makespan × ranks"


def test_bubble_plot_tells_curves_apart_without_colour() -> None:
    ax = bubble_plot({f"schedule {number}": {1: 0.5} for number in range(7)})
    assert len({(line.get_marker(), line.get_linestyle()) for line in ax.lines}) == 7


def test_bubble_plot_refuses_nothing() -> None:
    with pytest.raises(SizeError, match="at least one curve"):
        bubble_plot({"gpipe": {}})


def test_line_plot_draws_every_point_under_its_name() -> None:
    ax = line_plot({"a": {4: 1.5, 1: 3}, "b": {n: n for n in range(30)}}, xlabel="m", ylabel="units")
    short, long = ax.get_lines()
    assert (list(short.get_xdata()), list(short.get_ydata())) == ([1, 4], [3, 1.5])
    assert (short.get_marker(), long.get_marker()) == ("o", "")  # 30 marks would be a band
    assert (legend(ax), ax.get_xlabel(), ax.get_ylabel()) == (["a", "b"], "m", "units")
    assert ax.get_ylim()[0] == 0


def test_line_plot_shows_what_is_below_zero() -> None:
    assert line_plot({"a": {0: -5, 1: 5}}, xlabel="x", ylabel="y").get_ylim()[0] <= -5


@pytest.mark.parametrize("curves", [{"a": {}}, {"a": [1, 2]}, [1, 2], {}], ids=str)
def test_line_plot_refuses_what_is_no_curve(curves: object) -> None:
    with pytest.raises(SizeError, match=r"at least one point: \{name: \{x: y\}\}"):
        line_plot(curves, xlabel="x", ylabel="y")


def test_line_plot_tells_many_curves_apart_and_keeps_the_legend_inside() -> None:
    ax = line_plot({str(number): {0: number, 1: 2} for number in range(20)}, xlabel="x", ylabel="y")
    assert len({(line.get_color(), line.get_marker()) for line in ax.lines}) == 20
    ax.figure.canvas.draw()
    assert ax.get_legend().get_window_extent().height < ax.get_window_extent().height


def test_memory_plot_draws_an_empty_curve_under_an_empty_limit() -> None:
    trace = simulate(gpipe(2, 2))
    ax = memory_plot(memory_curve(trace, 0), trace, limit=0)  # divided by the fullest moment
    assert ax.get_title(loc="right") == "kept at the fullest moment: 0 bytes"


def test_line_plot_draws_a_band_around_the_curves_that_have_a_spread() -> None:
    ax = line_plot({"a": {1: 2, 2: 5}, "b": {1: 3, 2: 3}}, xlabel="x", ylabel="y", spread={"a": {1: 0.5, 2: 1}})
    (band,) = ax.collections
    assert {(1, 1.5), (1, 2.5), (2, 4), (2, 6)} <= set(map(tuple, band.get_paths()[0].vertices))


def test_bar_plot_draws_every_value_in_its_group_and_a_line_where_it_was_predicted() -> None:
    ax = bar_plot({"a": [1, 2, 3], "b": [4, 5, 6]}, ylabel="MB", predicted={"b": [4.5, 5.5, 6.5]})
    heights = [[bar.get_height() for bar in bars] for bars in ax.containers]
    assert heights == [[1, 2, 3], [4, 5, 6]]
    assert [round(bar.get_x() + bar.get_width() / 2) for bars in ax.containers for bar in bars] == [0, 1, 2] * 2
    (lines,) = ax.collections
    assert [path.vertices[0][1] for path in lines.get_paths()] == [4.5, 5.5, 6.5]
    assert sorted(legend(ax)) == ["a", "b", "predicted"]
    assert [text.get_text() for text in ax.get_xticklabels()] == ["rank 0", "rank 1", "rank 2"]


def test_bar_plot_names_its_groups() -> None:
    ax = bar_plot({"a": [1, 2]}, ylabel="MB", names=["left", "right"])
    assert [text.get_text() for text in ax.get_xticklabels()] == ["left", "right"]


def test_bar_plot_shows_what_is_below_zero_and_leaves_out_what_has_no_room() -> None:
    assert bar_plot({"a": [-1, 2]}, ylabel="y").get_ylim()[0] <= -1  # it was cut off
    ax = bar_plot({"a": list(range(64))}, ylabel="y")
    assert not ax.texts
    ax.figure.canvas.draw()
    names = [label.get_window_extent() for label in ax.get_xticklabels()]
    assert len(names) >= 8
    assert all(left.x1 < right.x0 for left, right in pairwise(names))


def test_bar_plot_refuses_names_of_other_places() -> None:
    with pytest.raises(SizeError, match="1 names for 2 groups of bars: left"):
        bar_plot({"a": [1, 2]}, ylabel="MB", names=["left"])


def test_bar_plot_refuses_rows_of_two_lengths() -> None:
    with pytest.raises(SizeError, match=r"one length.*got lengths \[1, 2\]"):
        bar_plot({"a": [1, 2]}, ylabel="MB", predicted={"a": [1]})
