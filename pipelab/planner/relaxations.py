"""Where nothing is feasible: the smallest changes of one limit or number after which something is.

Every change that is offered was judged: with it, some candidate satisfies all constraints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pipelab.planner.choice import Choice, judge
from pipelab.planner.question import MICROBATCHES, Question, divisors_of
from pipelab.planner.rejected import Rejected, candidates

_TRIES = 12  # of each direction, nearest first


def relaxations(question: Question, rejected: Sequence[Rejected]) -> tuple[str, ...]:
    """One sentence for each thing that could be changed: the sizes, batch, micro-batch, memory, bubble."""
    if all(r.constraint in ("gpus", "split", "stages") for r in rejected):
        return tuple(filter(None, (_size(question, axis) for axis in ("dp", "tp", "pp"))))
    found = (_batches(question, rejected), _microbatches(question), _memory(question), _bubble(question))
    return tuple(sentence for sentence in found if sentence)


def _size(question: Question, axis: str) -> str:
    size = _nearest(question, axis, divisors_of(question.hardware.gpus))
    return f"{axis} {size}" if size else ""


def _batches(question: Question, rejected: Sequence[Rejected]) -> str:
    units = {_unit(r) for r in rejected if r.constraint in ("batch", "microbatches")}
    below = {question.batch // unit * unit for unit in units} - {0}
    above = {-(-question.batch // unit) * unit for unit in units}
    nearest = [_first(question, sorted(below, reverse=True)), _first(question, sorted(above))]
    return " or ".join(f"batch {batch}" if n == 0 else str(batch) for n, batch in enumerate(filter(None, nearest)))


def _unit(rejected: Rejected) -> int:
    c = rejected.candidate
    unit = c.dp * c.microbatch * c.rounds
    return unit * c.pp if rejected.constraint == "microbatches" else unit


def _first(question: Question, batches: Sequence[int]) -> int | None:
    tried = (batch for batch in batches[:_TRIES] if batch != question.batch)
    return next((batch for batch in tried if feasible(replace(question, batch=batch))), None)


def _microbatches(question: Question) -> str:
    size = _nearest(question, "microbatch", {*divisors_of(question.batch), *MICROBATCHES})
    return f"micro-batch {size}" if size else ""


def _nearest(question: Question, axis: str, sizes: Iterable[int]) -> int | None:
    """The feasible one of `sizes` that is nearest to what was asked of `axis`, if anything was."""
    asked = getattr(question.choices, axis)
    if asked is None:
        return None
    others = sorted(set(sizes) - set(asked), key=lambda size: (min(abs(size - one) for one in asked), -size))
    tried = ((n, replace(question.choices, **{axis: (n,)})) for n in others[:_TRIES])  # type: ignore[arg-type]
    return next((n for n, choices in tried if feasible(replace(question, choices=choices))), None)


def _memory(question: Question) -> str:
    free = replace(question, hardware=replace(question.hardware, memory_bytes=1e30))
    need = min((choice.memory_bytes for choice in _choices(free)), default=None)
    if need is None or need <= question.hardware.memory_bytes:
        return ""
    return f"memory {need / 1e9:.1f} GB"


def _bubble(question: Question) -> str:
    least = min((choice.bubble for choice in _choices(replace(question, max_bubble=1.0))), default=None)
    if least is None or least <= question.max_bubble:
        return ""
    return f"bubble {100 * least:.1f} %"


def feasible(question: Question) -> bool:
    """Whether any candidate satisfies every constraint."""
    return next(_choices(question), None) is not None


def _choices(question: Question) -> Iterator[Choice]:
    for candidate in candidates(question):
        if not isinstance(candidate, Rejected):
            judged = judge(candidate, question)
            if isinstance(judged, Choice):
                yield judged
