"""Pictures under one another: one time axis, and one legend for all of them."""

from __future__ import annotations

import pytest
from matplotlib.axes import Axes

from pipelab.costs import Costs
from pipelab.errors import SizeError
from pipelab.memory import memory_curve
from pipelab.schedules import gpipe, one_f_one_b, zb_h1, zb_v
from pipelab.simulate import simulate
from pipelab.stacked import gantt_memory, gantt_stack


def legend(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_gantt_memory_puts_the_count_below_the_gantt_on_its_time_axis() -> None:
    trace = simulate(one_f_one_b(4, 8), Costs(F=1, B=2))
    above, below = gantt_memory(trace)
    assert above.get_xlim() == below.get_xlim() == (0, 33)
    # 1F1B keeps min(m, p - r) micro-batches: Narayanan et al. 2021, section 2.2
    assert [text.get_text() for text in below.texts] == ["peak", "4", "3", "2", "1"]
    assert above.get_legend() is None
    assert legend(below) == ["F forward", "B backward", "idle", "kept for B"]
    assert below.get_title(loc="left") == "what every rank keeps"  # the name stands above
    assert below.get_xlabel() != above.get_xlabel() == ""


def test_gantt_memory_counts_stages_of_a_rank_as_parts() -> None:
    _, below = gantt_memory(simulate(zb_v(4, 8), Costs().split(2)))
    assert below.get_title(loc="right") == "kept at the fullest moment: 4 micro-batches"  # Qi et al. 2023, ZB-V: p
    assert legend(below)[-2:] == ["kept for I", "kept for W"]


def test_gantt_memory_takes_a_curve_in_bytes() -> None:
    trace = simulate(gpipe(2, 3))
    _, below = gantt_memory(trace, memory_curve(trace, 2e6), unit="bytes")
    assert below.get_title(loc="right") == "kept at the fullest moment: 6 MB"
    with pytest.raises(SizeError, match="curve is of 2 ranks, the trace of 4"):
        gantt_memory(simulate(gpipe(4, 3)), memory_curve(trace, 1))


def test_gantt_stack_has_one_time_axis_and_one_legend() -> None:
    short, long = simulate(gpipe(4, 2)), simulate(zb_h1(4, 8))
    axes = gantt_stack({"short": short, "long": long}, unit="slots")
    assert [ax.get_title(loc="left") for ax in axes] == ["short", "long"]
    assert {ax.get_xlim() for ax in axes} == {(0, long.makespan)}
    assert [ax.get_xlabel() for ax in axes] == ["", "time (slots)"]
    assert axes[0].get_legend() is None
    assert legend(axes[1]) == ["F forward", "B backward", "I input gradient", "W weight gradient", "idle"]


def test_gantt_stack_refuses_nothing() -> None:
    with pytest.raises(SizeError, match="at least one trace"):
        gantt_stack({})
