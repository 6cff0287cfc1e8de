"""PipeDream: 1F1B that updates after every backward and never waits for the pipeline to drain."""

from __future__ import annotations

from pipelab.action import Action, Kind
from pipelab.errors import positive_integer
from pipelab.schedule import Schedule
from pipelab.schedules.one_f_one_b import one_f_one_b


def pipedream(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B with a weight update (U) right after each backward, so the next forward already sees newer weights.

    Narayanan et al. 2019 (SOSP, "PipeDream"), section 3.2: in the steady state every worker alternates between a
    forward and a backward, and there is no flush. The plan shows the first `num_microbatches` of a stream without end.
    Rank r's forward and backward of one micro-batch lie p - 1 - r updates apart, so it stashes p - r versions of its
    weights. Any sizes from 1; times (with U = 0) and activations are those of `one_f_one_b`.
    """
    p = positive_integer("num_ranks", num_ranks)
    m = positive_integer("num_microbatches", num_microbatches)
    ranks = (updating(order) for order in one_f_one_b(p, m).ranks)
    return Schedule("pipedream", tuple(ranks), tuple(range(p)), m)


def updating(order: tuple[Action, ...], *, every: int = 1) -> tuple[Action, ...]:
    """`order` with an update behind the backward of every micro-batch that is the last of `every`."""
    steps: list[Action] = []
    for action in order:
        steps.append(action)
        if action.kind is Kind.B and (action.microbatch + 1) % every == 0:
            steps.append(action._replace(kind=Kind.U))
    return tuple(steps)
