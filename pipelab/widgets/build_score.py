"""What a finished board is worth: which published schedule it is, and how it compares with the best that is known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache

from pipelab.captions import counted
from pipelab.errors import SizeError
from pipelab.memory import peak_activations
from pipelab.schedule import Schedule
from pipelab.schedules import SCHEDULES, search, takes_stages
from pipelab.simulate import simulate
from pipelab.trace import Trace
from pipelab.widgets.build_model import HAIR, Board, Task


def recognised(schedule: Schedule) -> tuple[str, ...]:
    """The names of the published schedules that have exactly these orders."""
    sizes = schedule.num_ranks, schedule.num_microbatches, schedule.stages_per_rank
    return tuple(name for name, published in _published(*sizes) if published == schedule)


def _published(p: int, m: int, v: int) -> Iterator[tuple[str, Schedule]]:
    """Every published schedule that comes in this size, with its name."""
    for name, build in SCHEDULES.items():
        virtual = takes_stages(name)
        if virtual and v == 1:
            continue  # with one stage a rank they are schedules that have a name of their own
        with suppress(SizeError):  # it does not come in this size
            yield name, build(p, m, stages_per_rank=v) if virtual else build(p, m)


@lru_cache(maxsize=64)
def best_known(task: Task) -> Trace:
    """The shortest schedule for `task` that the search finds or that is published; of equally short ones, the one that
    keeps least."""
    limit = task.num_microbatches if task.memory_limit is None else task.memory_limit
    found = search(
        task.num_ranks,
        task.num_microbatches,
        task.costs,
        memory_limit=limit,
        placement="one" if task.stages_per_rank == 1 else "loop",
        stages_per_rank=task.stages_per_rank,
        objective="makespan",
        split_backward=task.split_backward,
    )
    plans = [found]
    for _, plan in _published(task.num_ranks, task.num_microbatches, task.stages_per_rank):
        if (plan.placement, plan.splits_backward) == (found.placement, found.splits_backward) and not plan.has_updates:
            plans.append(plan)
    traces = [simulate(plan, task.costs) for plan in plans]
    within = [trace for trace in traces if max(peak_activations(trace)) <= limit + HAIR]
    return min(within, key=lambda trace: (round(trace.makespan, 9), max(peak_activations(trace))))


def score(board: Board) -> tuple[str, ...]:
    """How good a finished board is, in sentences; none while something is left to place."""
    trace = board.trace
    if trace is None or not board.complete:
        return ()
    names = recognised(trace.schedule)
    built = f"You built {' = '.join(names)}." if names else "That is none of the published schedules."
    if not trace.makespan:
        return (built, "It takes no time, so there is nothing to compare.")
    best = best_known(board.task)
    mine, theirs = max(peak_activations(trace)), max(peak_activations(best))
    worse = trace.makespan / best.makespan - 1
    against = "as short as the best that is known"
    if worse > HAIR:
        against = f"{100 * worse:.3g} % longer than the best that is known, {best.makespan:.4g}"
    elif worse < -HAIR:
        against = f"shorter than the best that the search knows, {best.makespan:.4g}"
    bubbles = [f"{100 * one.bubble_fraction:.1f} %" for one in (trace, best)]
    return (
        built,
        f"Makespan {trace.makespan:.4g}: {against}.",
        f"Bubble {bubbles[0]} of makespan × {counted(trace.num_ranks, 'rank')}; in the best, {bubbles[1]}.",
        f"Micro-batches kept on the fullest rank: {mine:.4g}; in the best, {theirs:.4g}.",
    )
