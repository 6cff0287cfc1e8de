"""Why a candidate is no plan: the constraint that it violates, what was found, the limit, and a sentence with both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product, starmap
from math import prod

from pipelab.errors import SizeError
from pipelab.planner.candidate import Candidate, traits
from pipelab.planner.footprint import Footprint, in_flight
from pipelab.planner.question import Question, divisors_of

CONSTRAINTS = {
    "gpus": "dp × tp × pp is the number of GPUs",
    "split": "tensor parallelism can cut the layers",
    "stages": "every stage has a layer",
    "batch": "the batch divides into whole micro-batches",
    "microbatches": "the schedule takes that many micro-batches",
    "remat": "recomputation frees what a schedule keeps until W",
    "memory": "the fullest rank fits",
    "bubble": "the bubble is small enough",
}


@dataclass(frozen=True)
class Rejected:
    """A candidate, the name of the first constraint that it violates (a key of CONSTRAINTS), and the sentence why.

    `found` and `limit` are the numbers of the sentence: bytes for "memory", a part of the makespan for "bubble".
    """

    candidate: Candidate
    constraint: str
    found: float
    limit: float
    reason: str

    def __str__(self) -> str:
        return f"{self.candidate}: {self.reason}"


def candidates(question: Question) -> Iterator[Candidate | Rejected]:
    """Every candidate in whole numbers; what has none is rejected here, before any byte or second is computed."""
    yield from _misfits(question)
    for shape in starmap(Candidate, question.shapes()):
        if wrong := _wrong_shape(shape, question):
            yield wrong
        else:
            for microbatch in question.microbatches(shape.dp):
                for rounds in question.rounds(shape.dp, microbatch):
                    yield from _filled(replace(shape, microbatch=microbatch, rounds=rounds), question)


def _misfits(question: Question) -> Iterator[Rejected]:
    """The fixed sizes that no others complete to the number of GPUs; what is not fixed is 0."""
    gpus, asked = question.hardware.gpus, question.choices
    for sizes in product(asked.dp or (0,), asked.tp or (0,), asked.pp or (0,)):
        chosen = [size for size in sizes if size]
        c, found = Candidate(*sizes), prod(chosen)
        words = c.sizes if len(chosen) == 1 else f"{c.sizes} = {found}"
        if gpus % found:
            below, above = ([d for d in divisors_of(gpus) if (d > found) is side] for side in (False, True))
            nearest = " and ".join(map(str, below[-1:] + above[:1]))
            divisors = "divisors are" if above else "divisor is"
            reason = f"{words} does not divide {gpus} GPUs; the nearest {divisors} {nearest}"
            yield Rejected(c, "gpus", found, gpus, reason)
        elif all(sizes) and found != gpus:
            yield Rejected(c, "gpus", found, gpus, f"{words} is not {gpus} GPUs")


def _wrong_shape(c: Candidate, question: Question) -> Rejected | None:
    layers = len(question.model.weights)
    if reason := question.model.cannot_split(c.tp):
        return Rejected(c, "split", c.tp, 1, reason)
    if c.pp > layers:
        return Rejected(c, "stages", c.pp, layers, f"{c.pp} stages need as many layers, and the model has {layers}")
    return None


def _filled(shape: Candidate, question: Question) -> Iterator[Candidate | Rejected]:
    unit = shape.dp * shape.microbatch * shape.rounds
    if question.batch % unit:
        times = f" × {shape.rounds} rounds" if shape.rounds > 1 else ""
        factors = f"dp {shape.dp} × micro-batch {shape.microbatch}{times}"
        reason = f"a batch of {question.batch} is no multiple of {unit}, {factors}"
        yield Rejected(shape, "batch", question.batch, unit, reason)
        return
    filled = replace(shape, num_microbatches=question.batch // unit)
    for schedule, stages_per_rank in question.schedules(shape.pp):
        arranged = replace(filled, schedule=schedule, stages_per_rank=stages_per_rank)
        if wrong := _wrong_arrangement(arranged, question):
            yield wrong
            continue
        for remat, sharding in question.keeping(shape.dp):
            whole = replace(arranged, remat=remat, sharding=sharding)
            yield _wrong_remat(whole) or whole


def _wrong_arrangement(c: Candidate, question: Question) -> Rejected | None:
    layers = len(question.model.weights)
    if c.num_stages > layers:
        reason = f"{c.pp} ranks × {c.stages_per_rank} = {c.num_stages} stages, and the model has {layers} layers"
        return Rejected(c, "stages", c.num_stages, layers, reason)
    try:
        in_flight(c.schedule, c.pp, c.num_microbatches, c.stages_per_rank)
    except SizeError as refusal:  # the schedule's own builder knows
        return Rejected(c, "microbatches", c.num_microbatches, c.pp, str(refusal))
    return None


def _wrong_remat(c: Candidate) -> Rejected | None:
    if c.remat == "none" or not traits(c.schedule).splits:
        return None
    reason = f"{c.schedule} keeps activations until W, so with remat {c.remat} they would be recomputed and still kept"
    return Rejected(c, "remat", 1, 0, reason)


def too_large(c: Candidate, ranks: tuple[Footprint, ...], limit: float) -> Rejected | None:
    """Rejects a candidate whose fullest rank needs more than `limit` bytes."""
    rank = max(range(len(ranks)), key=lambda r: ranks[r].total)
    need = ranks[rank]
    if need.total <= limit:
        return None
    parts = f"state {need.state / 1e9:.1f}, activations {need.activations / 1e9:.1f}, working {need.working / 1e9:.1f}"
    reason = f"rank {rank} needs {need.total / 1e9:.1f} GB ({parts}), the limit is {limit / 1e9:.1f} GB"
    return Rejected(c, "memory", need.total, limit, reason)


def too_idle(c: Candidate, bubble: float, limit: float) -> Rejected | None:
    """Rejects a candidate whose bubble is larger than `limit`."""
    if bubble <= limit:
        return None
    reason = f"the bubble is {100 * bubble:.1f} % of the makespan, the limit is {100 * limit:.1f} %"
    return Rejected(c, "bubble", bubble, limit, reason)
