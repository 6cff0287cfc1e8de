"""Closed forms: what a schedule costs, as sympy expressions, each with its source and the range where it holds.

    theory.bubble_fraction("gpipe")               (p - 1)/(m + p - 1), a sympy expression
    theory.bubble_fraction("gpipe", p=4, m=8)     3/11 = 0.2727..., a number
    theory.makespan("gpipe", p=4, m=8, F=1, B=2, c=0.5)
    theory.makespan["one_f_one_b"]                the Formula itself: expression, source, holds

A value may be a number, or an expression in other letters. The delay c is 0 and the weight part w is 1 unless they
are given (`c=theory.c` keeps the letter). Numbers are exact (0.1 is 1/10), nothing is rounded before the end.
"""

from pipelab.theory.accounting import (
    activation_bytes,
    all_reduce_traffic,
    batch_time,
    best_microbatches,
    best_segments,
    boundary_bytes,
    boundary_traffic,
    global_batch,
    gpipe_memory,
    largest_stable_rate,
    model_state_bytes,
    remat_overhead,
    segment_memory,
    step_time,
    two_buffered_version,
    weight_delay,
    weight_versions,
)
from pipelab.theory.formula import Family, Formula
from pipelab.theory.letters import B, F, I, L, N, O, S, T, W, a, b, c, d, e, g, h, i, m, n, o, p, r, s, t, v, w, x
from pipelab.theory.schedules import (
    bubble_fraction,
    bubble_over_ideal,
    bubble_rate,
    dualpipe_overlapped_idle,
    longest_rank_span,
    makespan,
    messages,
    microbatches_for,
    peak_activations,
    uneven_bubble_fraction,
)

# fmt: off
__all__ = [
    "makespan", "longest_rank_span", "bubble_fraction", "bubble_rate", "bubble_over_ideal", "uneven_bubble_fraction",
    "microbatches_for", "peak_activations", "messages", "dualpipe_overlapped_idle", "step_time", "best_microbatches",
    "batch_time", "global_batch", "remat_overhead", "boundary_bytes", "boundary_traffic", "all_reduce_traffic",
    "activation_bytes", "gpipe_memory", "segment_memory", "best_segments", "model_state_bytes", "weight_versions",
    "weight_delay", "two_buffered_version", "largest_stable_rate", "Formula", "Family",
    "p", "m", "v", "r", "F", "B", "I", "W", "c", "O", "w", "x", "T", "o", "N", "b", "d", "g", "L", "n", "s", "h", "a",
    "e", "S", "i", "t",
]
# fmt: on
