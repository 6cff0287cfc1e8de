"""PipeDream-2BW: 1F1B that never drains and updates once for several micro-batches, so that two versions are enough."""

from __future__ import annotations

from pipelab.errors import SizeError, positive_integer
from pipelab.schedule import Schedule
from pipelab.schedules.one_f_one_b import one_f_one_b
from pipelab.schedules.pipedream import updating


def pipedream_2bw(num_ranks: int, num_microbatches: int, microbatches_per_update: int | None = None) -> Schedule:
    """1F1B with a weight update (U) after every group of `microbatches_per_update` backwards (default: `num_ranks`).

    Narayanan et al. 2021 (arXiv 2006.09503, "Memory-Efficient Pipeline-Parallel DNN Training"), section 3.1: a new
    version of the weights is made once a group, and the micro-batches that are on their way use the version before. The
    order says when updates are made; which version is used is the rule "two_buffered" of `pipelab.weight_versions`.
    The plan shows the first `num_microbatches` of a stream without end. Raises SizeError for a group of fewer
    micro-batches than there are ranks, and with the nearest number where `num_microbatches` is no multiple of a group.
    """
    p = positive_integer("num_ranks", num_ranks)
    m = positive_integer("num_microbatches", num_microbatches)
    group = positive_integer(
        "microbatches_per_update", p if microbatches_per_update is None else microbatches_per_update
    )
    if group < p:
        raise SizeError(
            f"2BW's two versions are enough where an update takes at least as many micro-batches as there are ranks: "
            f"got {group} for {p} ranks"
        )
    if m % group:
        nearest = max(round(m / group), 1) * group
        raise SizeError(
            f"pipedream_2bw takes a multiple of the {group} micro-batches of an update: got {m}; "
            f"the nearest is {nearest}"
        )
    ranks = (updating(order, every=group) for order in one_f_one_b(p, m).ranks)
    return Schedule("pipedream_2bw", tuple(ranks), tuple(range(p)), m)
