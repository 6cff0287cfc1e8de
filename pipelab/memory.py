"""Activations alive over a trace: what every rank keeps, from when to when.

F ────────────────► B             an activation is kept from the start of F to the end of B
F ────────────────► I ·······► W  with a split backward to the end of I, and weight_part of it to the end of W
f ─ ─ ─ ─► f again ─► B           with remat only the stage's input is kept, the whole only from the second F on
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipelab.action import Action, Kind
from pipelab.costs import one_per_stage
from pipelab.errors import CostError, amount
from pipelab.trace import Span, Trace, timed

Curve = tuple[float, ...]


def peak_activations(trace: Trace, weight_part: float = 1.0) -> Curve:
    """The most that each rank keeps at once, in units of what one micro-batch leaves on the whole rank.

    Counted in the order of the rank's actions: a forward adds 1 as it starts, B takes 1 away as it ends; I leaves
    `weight_part` (the zero-bubble papers' M_W / M_B), which W takes away. One of several stages on a rank counts
    1 / stages_per_rank, so the stages are taken to be equal. 1F1B keeps min(m, p - r) on rank r.
    Recomputed forwards do not count. Raises CostError for a weight_part that is negative or no number.
    """
    part = amount("weight_part", weight_part)
    kinds = ([span.action.kind for span in row if not span.recompute] for row in timed(trace).by_rank)
    return tuple(_peak(row, part) / trace.schedule.stages_per_rank for row in kinds)


def _peak(kinds: list[Kind], weight_part: float) -> float:
    whole = part = 0  # how many are kept whole, until B or I, and how many in part, until W
    peak = 0.0
    for kind in kinds:
        if kind is Kind.F:
            whole += 1
        elif kind is Kind.W:
            part -= 1
        elif kind in (Kind.B, Kind.I):
            whole -= 1
            part += kind is Kind.I
        peak = max(peak, whole + part * weight_part)
    return peak


@dataclass(frozen=True, repr=False)
class MemoryCurve:
    """Bytes that each rank keeps: rank r keeps `total[r][i]` from `times[r][i]` until the next time.

    `until_input[r]` is the part that the input gradient (B or I) still needs, `until_weight[r]` what is left for W.
    """

    times: tuple[Curve, ...]
    until_input: tuple[Curve, ...]
    until_weight: tuple[Curve, ...]

    @cached_property
    def total(self) -> tuple[Curve, ...]:
        """Both parts together, in bytes."""
        rows = zip(self.until_input, self.until_weight, strict=True)
        return tuple(tuple(a + b for a, b in zip(*row, strict=True)) for row in rows)

    @property
    def peak(self) -> Curve:
        """The most bytes that each rank keeps at once."""
        return tuple(max(row, default=0.0) for row in self.total)

    @classmethod
    def measured(cls, trace: Trace, held: Sequence[Sequence[float]]) -> MemoryCurve:
        """What a run has counted: `held[r][i]` bytes from the end of `trace.by_rank[r][i]` on, as in `StepResult`.

        How much of it waits for W alone is not known; it stands in `until_input`, too.
        Raises CostError where `held` has not one number for every span of the trace.
        """
        spans, numbers = ([len(row) for row in rows] for rows in (trace.by_rank, held))
        if spans != numbers:
            raise CostError(f"the ranks of {trace.schedule.name!r} ran {spans} spans, but held has {numbers} numbers")
        times = tuple(tuple(span.end for span in row) for row in trace.by_rank)
        return cls(times, tuple(map(tuple, held)), tuple((0.0,) * count for count in spans))

    def pairs(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """The total as (time, bytes) pairs, one tuple a rank, as `Trace.to_chrome` takes its counters."""
        return tuple(tuple(zip(*row, strict=True)) for row in zip(self.times, self.total, strict=True))

    def __repr__(self) -> str:
        return f"<MemoryCurve of {len(self.times)} ranks, peak {', '.join(f'{peak:.6g}' for peak in self.peak)}>"


def memory_curve(
    trace: Trace,
    activation: object,
    weight_part: float = 1.0,
    boundary: object = 0,
    remat: bool = False,
) -> MemoryCurve:
    """Bytes alive over the time of `trace`, per rank.

    `activation`: what a forward leaves, in bytes, one number or one a stage; `weight_part` of it stays from I to W.
    With `remat` a stage keeps only its input (`boundary` bytes, one number or one a stage) and has the whole activation
    from the start of its recomputation to the end of B or I. Where two actions meet, the first has let go already.
    Messages are not in it: an output is taken to be gone once it is made, though a sender has it until it has arrived.
    Raises CostError where a number is negative or for another number of stages, and where the trace recomputes but
    `remat` is False.
    """
    part = amount("weight_part", weight_part)
    whole = one_per_stage("activation", activation, timed(trace).schedule.num_stages)
    inputs = one_per_stage("boundary", boundary, trace.schedule.num_stages)
    if not remat and any(span.recompute for span in trace.spans):
        raise CostError(
            f"the trace of {trace.schedule.name!r} recomputes forwards: give remat=True, and boundary in bytes"
        )
    curves = [_curve(row, whole, part, inputs, remat) for row in trace.by_rank]
    return MemoryCurve(*zip(*curves, strict=True))


def _curve(
    row: tuple[Span, ...], whole: Curve, weight_part: float, inputs: Curve, remat: bool
) -> tuple[Curve, Curve, Curve]:
    recomputed = {span.action: span.start for span in row if span.recompute}
    # (time, which, stage, +1 or -1): counts, so that nothing is left over from rounding
    changes: list[tuple[float, str, int, int]] = []
    for span in row:
        stage, kind, microbatch = span.action
        if span.recompute or kind is Kind.U:
            continue
        if kind is Kind.F:
            changes.append((span.start, "input" if remat else "whole", stage, +1))
        elif kind is Kind.W:
            changes.append((span.end, "part", stage, -1))
        else:
            changes.append((span.end, "whole", stage, -1))
            if remat:
                begins = recomputed.get(Action(stage, Kind.F, microbatch), span.start)
                changes += [(begins, "whole", stage, +1), (span.end, "input", stage, -1)]
            if kind is Kind.I:
                changes.append((span.end, "part", stage, +1))
    held: Counter[tuple[str, int]] = Counter()
    until_input: dict[float, float] = {}
    until_weight: dict[float, float] = {}
    for time, which, stage, change in sorted(changes):
        held[which, stage] += change
        until_input[time] = sum(
            n * (whole[s] if kept == "whole" else inputs[s]) for (kept, s), n in held.items() if kept != "part"
        )
        until_weight[time] = sum(n * whole[s] * weight_part for (kept, s), n in held.items() if kept == "part")
    return tuple(until_input), tuple(until_input.values()), tuple(until_weight.values())
