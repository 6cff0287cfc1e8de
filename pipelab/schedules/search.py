"""Search: the best order that is found for given costs under a memory limit.

*Let all micro-batches follow one building block, squeeze that into the memory there is, and change the block as long as
it helps.*

    _block     when one micro-batch is where; repeated, it is what every rank would like to do
    _squeeze   what becomes of that with these costs and this limit
    _climb     which blocks to begin with, and what to change

The published schedules that keep to the limit compete too, so that what is found is never worse than they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

from pipelab.action import Action, Kind
from pipelab.costs import Costs, Link, or_unit
from pipelab.errors import ScheduleError, SizeError, amount, positive_integer
from pipelab.memory import peak_activations
from pipelab.schedule import Schedule, placed
from pipelab.schedules._climb import climb
from pipelab.schedules._task import Task
from pipelab.schedules.breadth_first import breadth_first
from pipelab.schedules.dualpipe_v import dualpipe_v
from pipelab.schedules.gpipe import gpipe
from pipelab.schedules.interleaved import interleaved
from pipelab.schedules.one_f_one_b import one_f_one_b
from pipelab.schedules.v_half import v_half
from pipelab.schedules.v_min import v_min
from pipelab.schedules.zb_h1 import zb_h1
from pipelab.schedules.zb_h2 import zb_h2
from pipelab.schedules.zb_v import zb_v
from pipelab.simulate import simulate

Placement = Literal["one", "loop", "v"]
Objective = Literal["span", "makespan"]


def search(
    num_ranks: int,
    num_microbatches: int,
    costs: Costs | None = None,
    *,
    memory_limit: float,
    weight_part: float = 1.0,
    placement: Placement = "one",
    stages_per_rank: int | None = None,
    objective: Objective = "span",
    split_backward: bool = True,
) -> Schedule:
    """The best schedule found for `costs` (default: F = I = W = 1, messages free) that keeps to `memory_limit`.

    `memory_limit` is in micro-batch activations of one whole rank, counted in the order of each rank's actions: F adds
    1, I takes 1 - weight_part away and W the rest, B takes 1 away; one of v stages on a rank counts 1 / v.
    `weight_part` is what W needs of a micro-batch's activations, M_W / M_B in the zero-bubble papers.
    `placement`: "one" stage a rank; a "loop", stage s on rank s % p; a "v", down the ranks and up again (and down, for
    more stages). `stages_per_rank` is 2 for these, unless given. `objective`: the longest "span" of one rank, first
    start to last end, which counts where the next step follows at once, or the "makespan". Without `split_backward`
    there are only F and B.

    Deterministic. Never worse than a published schedule of that placement that keeps to the limit. To search under a
    limit is the idea of Qi et al. 2023 (arXiv 2401.10241), section 3; this way of doing it is ours. Takes tenths of a
    second, and seconds from 10,000 actions on. Raises ScheduleError for a limit below 1, the smallest that any order
    keeps to.
    """
    p = positive_integer("num_ranks", num_ranks)
    m = positive_integer("num_microbatches", num_microbatches)
    costs = or_unit(costs)
    stages = _placed(p, placement, stages_per_rank)
    if objective not in ("span", "makespan"):
        raise ScheduleError(f"objective must be 'span' or 'makespan', got {objective!r}")
    part, limit = amount("weight_part", weight_part, most=1), _limit(memory_limit)
    times = costs.per_stage(len(stages))
    task = Task(
        placement=stages,
        num_microbatches=m,
        F=times[Kind.F],
        I=times[Kind.I],
        W=times[Kind.W],
        hop=_hops(costs, len(stages)),
        room=min(limit, m) * len(stages) / p,
        weight_part=part,
        split=split_backward,
        makespan=objective == "makespan",
    )

    def cost(schedule: Schedule) -> float:
        trace = simulate(schedule, costs)
        if max(peak_activations(trace, part)) > limit * (1 + 1e-9):
            return math.inf
        return trace.makespan if task.makespan else trace.longest_rank_span

    orders = [squeezed.ranks() for squeezed in climb(task)]
    orders += [
        tuple(tuple(_as_asked(order, split_backward)) for order in ranks) for ranks in _published(task, placement)
    ]
    return min((Schedule("search", ranks, stages, m) for ranks in orders), key=cost)


# --- the published schedules ------------------------------------------------------------------------------------------


def _published(task: Task, placement: Placement) -> Iterator[Sequence[tuple[Action, ...]]]:
    """The orders of the published schedules that have this placement."""
    p, m, v = len(task.work), task.num_microbatches, task.num_stages // len(task.work)
    builders: dict[Placement, Sequence[Callable[[int, int], Schedule]]] = {
        "one": (gpipe, one_f_one_b, zb_h1, zb_h2),
        "loop": (partial(interleaved, stages_per_rank=v), partial(breadth_first, stages_per_rank=v)),
        "v": (zb_v, v_half, v_min, dualpipe_v) if v == 2 else (),
    }
    for build in builders[placement]:
        try:
            yield build(p, m).ranks
        except SizeError:
            continue  # this one does not take m micro-batches


def _as_asked(order: tuple[Action, ...], split: bool) -> Iterator[Action]:
    """The same order with the backward split, B as I and W, or joined, I as B."""
    for action in order:
        if split and action.kind is Kind.B:
            yield action._replace(kind=Kind.I)
            yield action._replace(kind=Kind.W)
        elif not split and action.kind is Kind.I:
            yield action._replace(kind=Kind.B)
        elif split or action.kind is not Kind.W:
            yield action


# --- what is asked ----------------------------------------------------------------------------------------------------


def _placed(p: int, placement: str, stages_per_rank: int | None) -> tuple[int, ...]:
    """The rank of each stage."""
    if placement not in ("one", "loop", "v"):
        raise ScheduleError(f"placement must be 'one', 'loop' or 'v', got {placement!r}")
    usual = 1 if placement == "one" else 2
    v = usual if stages_per_rank is None else positive_integer("stages_per_rank", stages_per_rank)
    if placement == "one" and v != 1:
        raise SizeError(f"placement 'one' puts one stage on a rank, got stages_per_rank={v}: ask for 'loop' or 'v'")
    return placed(p, v, "v" if placement == "v" else "loop")


def _hops(costs: Costs, num_stages: int) -> tuple[float, ...]:
    """The delay between each stage and the next. Only `simulate`, which has the last word, lets messages queue."""
    if not isinstance(costs.comm, Link):
        return (costs.comm,) * (num_stages - 1)
    return tuple(map(costs.comm.seconds, costs.bytes_per_stage(num_stages)[:-1]))


def _limit(memory_limit: float) -> float:
    limit = math.inf if memory_limit == math.inf else amount("memory_limit", memory_limit)
    if limit < 1:
        raise ScheduleError(
            f"no order keeps to memory_limit={limit:g}: a rank holds one whole micro-batch between its forward and its "
            "backward, so the smallest limit that works is 1"
        )
    return limit
