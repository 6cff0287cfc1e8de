"""Batches, bytes and weight versions: the sums that stand beside a schedule; letters in theory/letters.py."""

from __future__ import annotations

import sympy
from sympy import Max, floor, pi, sin, sqrt

from pipelab.theory.formula import Formula, family
from pipelab.theory.letters import B, F, L, N, S, T, a, b, d, e, g, h, i, m, n, o, p, r, s, t
from pipelab.theory.schedules import DERIVED, GPIPE, KORTHIKANTI, MEGATRON

ZERO = "Rajbhandari et al. 2020, arXiv 1910.02054: 2 + 2 + 12 bytes a parameter under mixed precision and Adam"
PIPEDREAM = "Narayanan et al. 2019, PipeDream, SOSP, section 3.3"
TWO_BW = "Narayanan et al. 2021, arXiv 2006.09503, PipeDream-2BW"

# --- how long a step takes, and how large a batch is ----------------------------------------------------------------

step_time = Formula("step time with a fixed overhead a micro-batch", (m + p - 1) * (T / m + o), DERIVED)
best_microbatches = Formula("micro-batches that make step_time smallest", sqrt((p - 1) * T / o), DERIVED)
batch_time = Formula("batch time, F and B of one micro-batch", (N / (d * b) + p - 1) * (F + B), MEGATRON)
global_batch = Formula("samples in one update", d * m * b * g, MEGATRON)
remat_overhead = Formula("extra work of recomputing every forward", F / (F + B), DERIVED)

# --- what travels ---------------------------------------------------------------------------------------------------

boundary_bytes = Formula("bytes of a stage's output for one micro-batch", b * s * h * e, MEGATRON)
boundary_traffic = Formula("bytes over one boundary in one step, both directions", 2 * m * b * s * h * e, MEGATRON)
all_reduce_traffic = Formula(
    "bytes that a replica sends to average its gradients in a ring", 2 * (d - 1) / d * n * e, "ring all-reduce: derived"
)

# --- what is kept ---------------------------------------------------------------------------------------------------

activation_bytes = Formula(
    "bytes that a transformer's layers leave for one micro-batch, in half precision",
    b * s * h * L * (34 + 5 * a * s / h),
    KORTHIKANTI,
)

# in units of one layer's activation of one sample, at most at once on a rank of GPipe
gpipe_memory = family(
    "memory of gpipe",
    {
        "kept": (N * L / p, GPIPE),
        "remat": (N + (L / p) * (N / m), GPIPE),
    },
)

segment_memory = Formula(
    "layers' activations kept by a rank of L layers, m micro-batches and S recomputed segments", m * S + L / S, DERIVED
)
best_segments = Formula("segments that make segment_memory smallest", sqrt(L / m), DERIVED)

# weights, gradients and Adam's state of a rank, in bytes
model_state_bytes = family(
    "model state",
    {
        "replicated": (16 * n / p, ZERO),
        "zero_1": ((4 + sympy.Integer(12) / d) * n / p, ZERO),
        "zero_3": (16 * n / (p * d), ZERO),
    },
)

# --- which weights --------------------------------------------------------------------------------------------------

# versions of its weights that rank r keeps
weight_versions = family(
    "weight versions",
    {
        "flush": (sympy.Integer(1), DERIVED),
        "stashing": (p - r, PIPEDREAM, r < p),
        "two_buffered": (sympy.Integer(2), TWO_BW),
    },
)

# updates between the weights that rank r used and the update that its gradient goes into
weight_delay = family(
    "weight delay",
    {
        "flush": (sympy.Integer(0), DERIVED),
        "stashing": (p - 1 - r, PIPEDREAM, r < p),
        "vertical_sync": (p - 1, PIPEDREAM),
        "two_buffered": (sympy.Integer(1), TWO_BW),
    },
)

two_buffered_version = Formula("version that micro-batch i reads under 2BW", Max(floor(i / m) - 1, 0), TWO_BW)
largest_stable_rate = Formula(
    "largest stable learning rate times curvature for gradients t updates old",
    2 * sin(pi / (2 * (2 * t + 1))),
    DERIVED,
)
