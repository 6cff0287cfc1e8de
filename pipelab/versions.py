"""Which weights every action uses where a schedule updates them on the way (U), rule by rule. Integers only.

Version n of a stage's weights is what n updates have made of them. PipeDream's rank 0 of 2, under weight stashing:

    order       0F0  0F1  0B0  0U0  0F2  0B1  0U1  0B2  0U2
    version      0    0    0  0→1    1    0  1→2    1  2→3
    kept         1    1    1    2    2    2    2    2    1       version 0 is kept beside 1 until 0B1 has run

An update takes the gradients of the micro-batches since the one before; so U's place says how large its group is.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from pipelab.action import Action, Kind
from pipelab.errors import ScheduleError, positive_integer
from pipelab.schedule import Schedule
from pipelab.validate import validate

RULES = ("stashing", "vertical_sync", "two_buffered", "latest")


def weight_versions(schedule: Schedule, rule: str = "stashing") -> dict[Action, int]:
    """The version of its stage's weights that every F, B, I and W of `schedule` uses, by number of updates.

    The forward of a micro-batch uses, and under all rules but the last its backward uses again:

    - "stashing": the newest version of its stage. Narayanan et al. 2019 (PipeDream), section 3.3.
    - "vertical_sync": on every stage the version that the first stage used when the micro-batch came in. The same.
    - "two_buffered": the version before the one to which its gradient is added, so that two are enough; this is 2BW,
      max(floor((k - 1) / m) - 1, 0) for micro-batch k, counted from 1, and m micro-batches an update. Narayanan et al.
      2021 (arXiv 2006.09503), section 3.1.
    - "latest": the newest, and its backward the newest of that time, so that the gradient is that of no function.

    Without updates all is 0. Raises ScheduleError for a rule that does not exist, for a schedule that cannot run or
    leaves gradients that no update takes, and where an action needs a version that is not made by then.
    """
    if rule not in RULES:
        raise ScheduleError(f"rule must be one of {', '.join(map(repr, RULES))}, got {rule!r}")
    newest = _newest(schedule)
    group = {(u.stage, k): place for u, (place, taken) in _numbered_groups(schedule).items() for k in taken}
    versions, reasons = {}, []
    for action, made in newest.items():
        stage, _, k = action
        if rule == "latest":
            version = made
        elif rule == "two_buffered":
            version = max(group.get((stage, k), 0) - 1, 0)
        else:
            version = newest[Action(stage if rule == "stashing" else 0, Kind.F, k)]
        versions[action] = version
        if version > made:
            reasons.append(f"{action} needs version {version} of its weights, but only {made} updates come before it")
    if reasons:
        raise ScheduleError(f"schedule {schedule.name!r} cannot run by the rule {rule!r}", reasons)
    return versions


def with_updates(schedule: Schedule, steps: int = 1) -> Schedule:
    """`schedule`, `steps` times in a row, each time with an update of every stage behind its own last backward.

    That is synchronous training in which nobody waits for the others: a stream of `steps` mini-batches, each of as many
    micro-batches as `schedule` has. Raises SizeError for less than one step, ScheduleError where there are updates
    already.
    """
    count = positive_integer("steps", steps)
    if schedule.has_updates:
        raise ScheduleError(f"schedule {schedule.name!r} has updates (U) already, and would have two kinds of them")
    m, ranks = schedule.num_microbatches, []
    for order in schedule.ranks:
        last = {action.stage: action for action in order}
        step = []
        for action in order:
            step += [action, Action(action.stage, Kind.U, m - 1)] if action is last[action.stage] else [action]
        ranks.append(tuple(a._replace(microbatch=a.microbatch + n * m) for n in range(count) for a in step))
    return Schedule(schedule.name, tuple(ranks), schedule.placement, count * m)


def update_groups(schedule: Schedule) -> dict[Action, tuple[int, ...]]:
    """The micro-batches whose gradients every update of `schedule` takes: those that its stage has finished since the
    update before. Raises ScheduleError where a stage that makes updates leaves some gradient over."""
    return {update: taken for update, (_, taken) in _numbered_groups(schedule).items()}


def gradient_ages(schedule: Schedule, rule: str = "stashing") -> tuple[tuple[int, ...], ...]:
    """How many updates a gradient is late: a row a stage, a number a micro-batch.

    That is the newest version of the stage's weights when the gradient is complete, less the one with which its forward
    was done. PipeDream's stage s of p has p - 1 - s in the steady state, vertical sync p - 1, 2BW 1, a flush 0.
    Raises ScheduleError as `weight_versions` does.
    """
    used, newest = weight_versions(schedule, rule), _newest(schedule)
    complete = {(a.stage, a.microbatch): made for a, made in newest.items() if a.kind is not Kind.F}  # W is behind I
    microbatches = range(schedule.num_microbatches)
    return tuple(
        tuple(complete[stage, k] - used[Action(stage, Kind.F, k)] for k in microbatches)
        for stage in range(schedule.num_stages)
    )


def stashed_versions(schedule: Schedule, rule: str = "stashing") -> tuple[int, ...]:
    """How many versions of its weights every rank has at once, at the most; one of several stages counts as one.

    A version is kept while it is the newest, and until its last use. PipeDream's rank r of p has p - r under weight
    stashing and p under vertical sync; 2BW has 2; without stashing, and without updates, it is 1.
    """
    versions = weight_versions(schedule, rule)
    uses = Counter((action.stage, version) for action, version in versions.items())
    peaks = []
    for rank, order in enumerate(schedule.ranks):
        kept, newest = {(stage, 0) for stage in schedule.stages_on(rank)}, dict.fromkeys(schedule.stages_on(rank), 0)
        peak = len(kept)
        for action in order:
            stage = action.stage
            if action.kind is Kind.U:
                newest[stage] += 1
                kept.add((stage, newest[stage]))
            else:
                uses[stage, versions[action]] -= 1
            kept = {(s, version) for s, version in kept if version == newest[s] or uses[s, version]}
            peak = max(peak, len(kept))
        peaks.append(peak)
    return tuple(peaks)


def _newest(schedule: Schedule) -> dict[Action, int]:
    """For every action but U: how many updates of its stage come before it."""
    validate(schedule)
    newest: dict[Action, int] = {}
    for order in schedule.ranks:
        made: Counter[int] = Counter()
        for action in order:
            if action.kind is Kind.U:
                made[action.stage] += 1
            else:
                newest[action] = made[action.stage]
    return newest


def _numbered_groups(schedule: Schedule) -> dict[Action, tuple[int, tuple[int, ...]]]:
    """For every update its number among those of its stage, and the micro-batches that it takes."""
    validate(schedule)
    groups: dict[Action, tuple[int, tuple[int, ...]]] = {}
    number: Counter[int] = Counter()
    finished: defaultdict[int, list[int]] = defaultdict(list)
    reasons = []
    for rank, order in enumerate(schedule.ranks):
        for position, action in enumerate(order):
            stage, kind, k = action
            if kind in (Kind.B, Kind.W):
                finished[stage].append(k)
            elif kind is Kind.U:
                if not finished[stage]:
                    reasons.append(f"rank {rank}, position {position}: {action} has no gradient to take")
                groups[action] = number[stage], tuple(finished.pop(stage, ()))
                number[stage] += 1
    for stage, left in finished.items():
        if left and number[stage]:
            batches = f"micro-batch{'es' * (len(left) > 1)} {', '.join(map(str, left))}"
            reasons.append(f"stage {stage}: no update takes the gradient of {batches}")
    if reasons:
        raise ScheduleError(f"the updates of schedule {schedule.name!r} do not take each gradient once", reasons)
    return groups
