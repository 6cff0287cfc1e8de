"""The four looks at what the explorer shows: architecture, data, state, performance. A view in, SVG or a table out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from itertools import pairwise

from pipelab.action import Kind
from pipelab.captions import counted
from pipelab.errors import PipelabError
from pipelab.schedule import Schedule
from pipelab.schedules import SCHEDULES
from pipelab.trace import Trace
from pipelab.widgets.explore_model import (
    BYTES_A_NUMBER,
    SAMPLES,
    WIDTH,
    Settings,
    kept,
    layers_per_stage,
    places,
    predicted,
)
from pipelab.widgets.explore_svg import places_svg, stages_svg
from pipelab.widgets.play_model import Film

MODES = ("performance", "architecture", "data", "state")
MESSAGE_BYTES = SAMPLES * WIDTH * BYTES_A_NUMBER
_PARAMETERS_A_LAYER = WIDTH * WIDTH + WIDTH

# --- architecture ----------------------------------------------------------------------------------------------------


def architecture(schedule: Schedule) -> tuple[str, tuple[str, ...]]:
    """Which layers are in which stage on which rank, and what crosses the boundaries: a picture and sentences."""
    layers, v, m = layers_per_stage(schedule), schedule.stages_per_rank, schedule.num_microbatches
    crossing = sum(a != b for a, b in pairwise(schedule.placement))
    parameters = layers * v * _PARAMETERS_A_LAYER
    sentences = (
        f"{counted(layers * schedule.num_stages, 'layer')} in {counted(schedule.num_stages, 'stage')} of {layers}, "
        f"on {counted(schedule.num_ranks, 'rank')}; a rank holds {parameters:,} parameters. "
        f"(The layers are Linear, {WIDTH} wide; it is the model that runs when you press run it.)",
        f"A micro-batch is {SAMPLES} samples, so a boundary is {SAMPLES} × {WIDTH} numbers of {BYTES_A_NUMBER} bytes: "
        f"{MESSAGE_BYTES:,} bytes of activations forward, as many of gradients back.",
        f"Boundaries between stages: {schedule.num_stages - 1}, of them between ranks: {crossing}. A step of "
        f"{counted(m, 'micro-batch', 'es')} sends {2 * m * crossing:,} messages, "
        f"{2 * m * crossing * MESSAGE_BYTES:,} bytes.",
    )
    return stages_svg(schedule, layers, " ".join(sentences)), sentences


# --- data ------------------------------------------------------------------------------------------------------------


def data(film: Film, time: float) -> tuple[str, tuple[str, ...]]:
    """Which micro-batch is where at `time`, forward above, backward below: a picture and sentences."""
    where = places(film.trace, time)
    before, after = (sum(p.stage is None and p.forward is way for p in where) for way in (True, False))
    under_way = len(where) - before - after
    sentences = (
        film.at(time).sentence,
        f"Of {counted(len(where), 'micro-batch', 'es')}, {before} not started, {under_way} under way, {after} done.",
    )
    return places_svg(film.trace.schedule, where, " ".join(sentences)), sentences


# --- state -----------------------------------------------------------------------------------------------------------


def state(film: Film, time: float) -> tuple[str, tuple[str, ...]]:
    """What every rank holds at `time`: version of its weights, activations, gradients so far; a table and sentences."""
    trace, moment = film.trace, film.at(time)
    m, done = trace.schedule.num_microbatches, time >= trace.end
    updates = trace.schedule.has_updates
    rows = []
    for rank, row in enumerate(trace.by_rank):
        ended = [span.action for span in row if span.end <= time and not span.recompute]
        version = sum(action.kind is Kind.U for action in ended) if updates else int(done)
        sums = dict.fromkeys(trace.schedule.stages_on(rank), 0)
        for action in ended:
            sums[action.stage] += action.kind in (Kind.B, Kind.W)
        holds = moment.kept[rank]
        whole, inputs, late = (
            [f"{one.stage}:{one.microbatch}" for one in holds if one.form == form]
            for form in ("whole", "input", "for W")
        )
        gradients = ", ".join(f"{count} for stage {stage}" for stage, count in sums.items())
        rows.append([f"rank {rank}", str(version), _listed(whole + inputs), _listed(late), gradients])
    head = ["", "weights' version", "activations kept", "kept for W", f"gradients summed, of {m}"]
    if updates:
        rule = "Ranks update between two micro-batches, so at one time they have weights of different versions."
    elif done:
        rule = "All gradients are there: every rank updates, and its weights are of version 1."
    else:
        rule = "Weights stay at version 0 until the whole batch is done: that is the flush at the end of the step."
    return table("What every rank holds (stage:micro-batch)", head, rows), (moment.sentence, rule)


def _listed(items: Sequence[str], most: int = 6) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return f"{len(items)}" + (f": {' '.join(items[:most])}{more}" if items else "")


# --- performance -----------------------------------------------------------------------------------------------------


def performance(settings: Settings, trace: Trace, *, compare: bool) -> str:
    """Makespan, bubble, throughput, memory and messages as a table; with `compare` also those of other schedules."""
    rows = [_figures(settings.schedule, trace, settings)]
    if compare:
        rows += _others(settings)
    head = ["schedule", "makespan", "bubble", "micro-batches per time", "kept at most", "messages"]
    return table("The step in numbers", head, rows)


def _others(settings: Settings) -> Iterator[list[str]]:
    for name in SCHEDULES:
        if name == settings.schedule:
            continue
        other = replace(settings, schedule=name)
        try:
            yield _figures(name, predicted(other), other)
        except PipelabError:
            yield [name, "not in this size", "", "", "", ""]


def _figures(name: str, trace: Trace, settings: Settings) -> list[str]:
    bubble = f"{100 * trace.bubble_fraction:.1f} %"
    rate, most = trace.schedule.num_microbatches / trace.makespan, max(kept(trace, settings.remat))
    return [name, f"{trace.makespan:.4g}", bubble, f"{rate:.3g}", f"{most:.3g}", f"{len(trace.messages)}"]


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table whose rows begin with their name."""
    top = "".join(f'<th scope="col">{escape(text)}</th>' for text in head)
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(text)}</td>" for text in row[1:]) + "</tr>"
        for row in rows
    )
    return (
        f"<style>{_CELLS}</style><table><caption>{escape(caption)}</caption>"
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    )


_CELLS = (
    ".pl-panel table {line-height: 1.5} .pl-panel caption {text-align: left; opacity: .75} "
    ".pl-panel td, .pl-panel th {padding: .1em 1.2em .1em 0; text-align: left}"
)
