"""The words around a picture, the same under matplotlib, under SVG and for a screen reader."""

from __future__ import annotations

from pipelab.trace import Trace, timed

COSTS_UNIT = "units of the costs"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """`1 rank`, `4 ranks`."""
    return f"{number} {noun}{plural if number != 1 else ''}"


def drawable(found: object) -> Trace:
    """`found`, where a picture can be made of it. Raises CostError where it is no trace, is empty or takes no time."""
    trace = timed(found)
    trace.bubble_fraction  # noqa: B018  raises
    return trace


def unit_of(trace: Trace) -> str:
    """A run's clock counts seconds; a simulation's unit is whatever its costs were in."""
    return COSTS_UNIT if trace.source == "simulated" else "s"


def time_unit(unit: str, longest: float) -> tuple[float, str]:
    """What to multiply times with, and the unit's name: seconds are written as ms or µs where they are short."""
    if unit != "s" or longest >= 1:
        return 1.0, unit
    return (1e3, "ms") if longest >= 1e-3 else (1e6, "µs")


def headline(trace: Trace, made: str | None = None) -> str:
    """Which schedule, how large, and how it was `made`: simulated, paced or measured, where nothing else is said."""
    microbatches = counted(trace.schedule.num_microbatches, "micro-batch", "es")
    virtual = f" × {trace.schedule.stages_per_rank} stages" if trace.schedule.stages_per_rank > 1 else ""
    return f"{trace.schedule.name}, {counted(trace.num_ranks, 'rank')}{virtual}, {microbatches}: {made or trace.source}"


def shares(trace: Trace, unit: str) -> str:
    """Makespan, and the bubble with its denominator. Raises CostError where the trace is empty or takes no time."""
    scale, name = time_unit(unit, trace.makespan)
    makespan = f"{trace.makespan * scale:.4g}{'' if unit == COSTS_UNIT else f' {name}'}"
    share = f"{100 * trace.bubble_fraction:.1f} %"
    return f"makespan {makespan}, bubble {share} of makespan × {counted(trace.num_ranks, 'rank')}"


def in_words(trace: Trace, unit: str) -> str:
    """What the picture of `trace` shows, for somebody who cannot see it."""
    idle = ", ".join(f"rank {r} {100 * trace.idle(r) / trace.makespan:.0f} %" for r in range(trace.num_ranks))
    return (
        f"A row for every rank, rank 0 on top; every action is a bar from its start to its end. "
        f"{shares(trace, unit).capitalize()}. Idle, as a share of the makespan: {idle}."
    )
