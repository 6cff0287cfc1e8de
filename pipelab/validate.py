"""Is a schedule complete, and can it run? Every violation at once."""

from __future__ import annotations

from collections import Counter

from pipelab.action import Action, Kind
from pipelab.dependencies import graph, waits
from pipelab.errors import ScheduleError
from pipelab.schedule import Schedule

_WHY = {
    Kind.B: "a backward needs its own forward",
    Kind.I: "a backward needs its own forward",
    Kind.W: "the weight gradient needs its own I",
    Kind.U: "an update needs the weight gradient",
}


def validate(schedule: Schedule) -> None:
    """Return None where `schedule` is complete and its order can run; otherwise raise ScheduleError with every reason.

    Complete: each stage has, for each micro-batch, one F and either one B or one I and one W, all on the rank that
    holds the stage. Can run: no action comes before one that it needs, on its own rank or around a circle of ranks.
    The verdict is kept with the schedule, so that asking again costs nothing.
    """
    if not isinstance(schedule, Schedule):
        raise ScheduleError(f"expected a Schedule, as pl.one_f_one_b(4, 8) makes one, got {schedule!r}")
    if schedule.__dict__.get("_valid"):
        return
    reasons = [*_misplaced(schedule), *_incomplete(schedule)]
    reasons += _too_early(schedule)
    if not reasons:  # with actions missing or out of order on a rank, a circle would only repeat those reasons
        reasons += _circle(schedule)
    if reasons:
        raise ScheduleError(f"schedule {schedule.name!r} cannot run", reasons)
    schedule.__dict__["_valid"] = True


def _misplaced(schedule: Schedule) -> list[str]:
    reasons = []
    stages, batches = schedule.num_stages, schedule.num_microbatches
    for rank in sorted(set(schedule.placement)):
        if rank >= schedule.num_ranks:
            stage, ranks = schedule.placement.index(rank), schedule.num_ranks
            reasons.append(f"stage {stage} is placed on rank {rank}, but there are {ranks} ranks")
    for rank, order in enumerate(schedule.ranks):
        if not order:
            reasons.append(f"rank {rank} has nothing to do")
        for position, action in enumerate(order):
            stage, _, microbatch = action
            if stage >= stages:
                reason = f"names stage {stage}, but there are {stages} (0 to {stages - 1})"
            elif microbatch >= batches:
                reason = f"names micro-batch {microbatch}, but there are {batches} (0 to {batches - 1})"
            elif schedule.placement[stage] != rank:
                reason = f"belongs to stage {stage}, which is on rank {schedule.placement[stage]}"
            else:
                continue
            reasons.append(f"rank {rank}, position {position}: {action} {reason}")
    return reasons


def _incomplete(schedule: Schedule) -> list[str]:
    """Reasons for every stage and micro-batch whose set of kinds is not F and B, or F, I and W."""
    seen = bytearray(schedule.num_stages * schedule.num_microbatches)
    doubled: Counter[Action] = Counter()
    for order in schedule.ranks:
        for action in order:
            stage, kind, microbatch = action
            if stage < schedule.num_stages and microbatch < schedule.num_microbatches:
                place = stage * schedule.num_microbatches + microbatch
                if seen[place] & _BIT[kind]:
                    doubled[action] += 1
                seen[place] |= _BIT[kind]
    reasons = [f"{action} appears {1 + more} times" for action, more in sorted(doubled.items())]
    for place, kinds in enumerate(seen):
        if kinds & ~_BIT[Kind.U] not in _COMPLETE:
            stage, microbatch = divmod(place, schedule.num_microbatches)
            has = {kind for kind in Kind if kinds & _BIT[kind]}
            where = f"rank {schedule.placement[stage]}"
            reasons += [f"{where}: {reason}" for reason in _lacks(stage, microbatch, has)]
    return reasons


_BIT = {kind: 1 << place for place, kind in enumerate(Kind)}
_COMPLETE = (_BIT[Kind.F] | _BIT[Kind.B], _BIT[Kind.F] | _BIT[Kind.I] | _BIT[Kind.W])


def _lacks(stage: int, microbatch: int, has: set[Kind]) -> list[str]:
    """What is wrong with the kinds that one stage `has` for one micro-batch."""
    reasons = [] if Kind.F in has else [f"{stage}F{microbatch} is missing"]
    halves = [kind for kind in (Kind.I, Kind.W) if kind in has]
    if Kind.B in has and halves:
        extra = " and ".join(f"{stage}{kind}{microbatch}" for kind in halves)
        reasons.append(f"{stage}B{microbatch} and {extra}: B is I and W together, so write one or the other")
    elif Kind.B not in has and not halves:
        reasons.append(f"{stage}B{microbatch} is missing")
    elif len(halves) == 1:
        (half,) = halves
        other = Kind.W if half is Kind.I else Kind.I
        why = f"{stage}{half}{microbatch} is there, so this backward is split"
        reasons.append(f"{stage}{other}{microbatch} is missing ({why})")
    return reasons


def _too_early(schedule: Schedule) -> list[str]:
    g = graph(schedule)
    reasons = []
    for index, source in enumerate(g.own):
        if source > index and g.rank_of[source] == g.rank_of[index]:
            action = g.actions[index]
            reasons.append(f"{g.place(index)}: {action} comes before {g.actions[source]} ({_WHY[action.kind]})")
    return reasons


def _circle(schedule: Schedule) -> list[str]:
    g = graph(schedule)
    return [
        f"{g.place(index)}: {g.actions[index]} waits for {g.actions[source]} at {g.place(source)}, "
        + ("later in its own order" if g.rank_of[source] == rank else "which is never reached")
        for rank, index, source in waits(schedule)
    ]
