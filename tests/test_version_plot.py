"""The picture of versions: what stands in it is what the rule says."""

from __future__ import annotations

import re

import pytest
from matplotlib.colors import to_hex

import pipelab as pl
from pipelab import palette


def drawn(rule, schedule):
    ax = pl.version_plot(pl.simulate(schedule, pl.Costs(F=1, B=2)), rule)
    ax.figure.canvas.draw()
    return ax


def outlined(ax):
    return sum(to_hex(bar.get_edgecolor()[0]) == palette.MARK for bar in ax.collections)


@pytest.mark.parametrize(("rule", "build"), [("stashing", pl.pipedream), ("two_buffered", pl.pipedream_2bw)])
def test_version_plot_writes_every_version_below_its_action(rule, build):
    schedule = build(2, 4)
    written = [text.get_text() for text in drawn(rule, schedule).texts]
    names = [word for word in written if re.fullmatch(r"[FB]\d", word)]
    versions = pl.weight_versions(schedule, rule)
    assert [written[written.index(f"F{k}") + 1] for k in range(4)] == [
        str(versions[pl.Action(0, pl.Kind.F, k)]) for k in range(4)
    ]
    assert sorted(names) == sorted(f"{action.kind}{action.microbatch}" for action in versions)


def test_version_plot_outlines_backwards_with_other_weights():
    # p = 3: from its second micro-batch on, each backward but those of the last rank meets an update since its forward
    assert outlined(drawn("latest", pl.pipedream(3, 6))) == 2 * 5
    assert outlined(drawn("stashing", pl.pipedream(3, 6))) == 0


def test_version_plot_gives_one_version_one_colour():
    ax = drawn("vertical_sync", pl.pipedream(2, 3))
    fills = [to_hex(bar.get_facecolor()[0]) for bar in ax.collections if len(bar.get_facecolor())]
    assert len(set(fills) - {palette.INK}) == 2  # versions 0 and 1


def test_version_plot_says_how_many_versions_are_kept():
    written = [text.get_text() for text in drawn("stashing", pl.pipedream(3, 6)).texts]
    assert written[:4] == ["kept", "3", "2", "1"]


def test_version_plot_refuses_a_run_by_another_rule():
    trace = pl.simulate(pl.pipedream(3, 6))
    latest = pl.weight_versions(trace.schedule, "latest")
    spans = tuple(s._replace(version=latest.get(s.action)) for s in trace.spans)
    run = pl.Trace(trace.schedule, spans, trace.messages, "measured")
    pl.version_plot(run, "latest")
    with pytest.raises(pl.ScheduleError, match="other weights than the rule 'stashing' says"):
        pl.version_plot(run)


def test_version_map_writes_both_versions_where_they_differ():
    ax = pl.version_map(pl.pipedream(2, 3), "latest")
    # by hand: 0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2, and rank 1 updates between any two micro-batches
    assert [text.get_text() for text in ax.texts] == ["0", "0→1", "1→2", "0", "1", "2"]
    (image,) = ax.images
    assert image.get_array().tolist() == [[0, 1, 1], [0, 0, 0]]
    assert "up to 1 update late" in ax.get_title(loc="right")


def test_version_map_can_be_read_on_every_shade():
    ax = pl.version_map(pl.pipedream(4, 8), "latest")
    (image,) = ax.images
    for text in ax.texts:
        k, stage = text.get_position()
        cell = palette.luminance(to_hex(image.to_rgba(image.get_array()[stage, k])))
        light, dark = sorted((cell, palette.luminance(text.get_color())), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2.1, 1.4.3, level AA


def test_version_pictures_of_many_microbatches_write_what_has_room():
    ax = pl.version_map(pl.pipedream(2, 400))
    assert not ax.texts
    assert len(ax.get_xticklabels()) <= 32
    ax = pl.version_plot(pl.simulate(pl.one_f_one_b(2, 2)))  # no update, so nothing for a legend
    assert ax.get_legend() is None


def test_version_map_of_a_flush_is_pale():
    ax = pl.version_map(pl.one_f_one_b(2, 3))
    assert {text.get_text() for text in ax.texts} == {"0"}
    assert "no gradient is late" in ax.get_title(loc="right")
