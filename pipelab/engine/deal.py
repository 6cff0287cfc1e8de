"""A batch, dealt to the ranks of a mesh: first to the replicas, then in micro-batches, to those that read them.

    17 samples ──► 9 to replica 0 ──► 3 2 2 2      the inputs to the ranks of the first stage, the targets to those of
               └─► 8 to replica 1 ──► 2 2 2 2      the last one; the slices of a stage all get the same

Each micro-batch weighs as many samples as it has, of all there are, so the whole is the batch's loss, however uneven.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipelab.engine import batch, keywords
from pipelab.engine.message import Value, unwrap, wrap
from pipelab.errors import SizeError

Parts = Sequence[Value]  # one a micro-batch


class Hand(NamedTuple):
    """What one replica gets, an entry a micro-batch. `shares` are those of all samples."""

    inputs: Parts
    targets: Parts
    keywords: Parts
    shares: Sequence[float]

    def at(self, rank: int, placement: Sequence[int]) -> tuple[Parts, Parts, Parts, Sequence[float]]:
        """What `rank` of the replica's pipeline needs of it."""
        inputs = self.inputs if rank == placement[0] else ()
        return inputs, self.targets if rank == placement[-1] else (), self.keywords, self.shares


def deal(
    inputs: Any,
    targets: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    replicas: int,
    microbatches: int,
    taken: frozenset[str] = frozenset(),
    all_filled: bool = True,
) -> list[Hand]:
    """The batch, a hand for each replica. `taken` are the keywords that layers take.

    Raises SizeError for samples that cannot fill every micro-batch; unless `all_filled`, replicas may get fewer or
    none. Raises SizeError, too, where inputs and targets differ in rows.
    """
    samples = _samples(inputs, targets)
    if all_filled and samples < replicas * microbatches:
        each = f" on each of {replicas} replicas" if replicas > 1 else ""
        most = samples // replicas
        fewer = f"a schedule of at most {most} micro-batches, or " if most else ""
        raise SizeError(f"{samples} samples cannot fill {microbatches} micro-batches{each}: take {fewer}a larger batch")
    extras = keywords.split(kwargs, replicas, samples, taken) if kwargs else [None] * replicas
    wanted = batch.split(targets, replicas, "targets") if targets is not None else [None] * replicas
    hands = []
    for mine, goal, extra in zip(batch.split(inputs, replicas, "inputs"), wanted, extras, strict=True):
        rows = batch.rows(mine, "inputs")
        count = min(rows, microbatches)
        if not count:
            hands.append(Hand((), (), (), ()))
            continue
        parts = batch.split(unwrap(mine), count, "inputs")
        hands.append(
            Hand(
                parts,
                batch.split(unwrap(goal), count, "targets") if goal else (),
                keywords.split(unwrap(extra), count, rows, taken) if extra else (),
                [batch.rows(part, "inputs") / samples for part in parts],
            )
        )
    return hands


def _samples(inputs: Any, targets: Any) -> int:
    """How many samples there are. Raises SizeError for none, or where inputs and targets differ."""
    samples = batch.rows(wrap(inputs), "inputs")
    if samples == 0:
        raise SizeError("the batch is empty: inputs have 0 rows")
    if targets is not None and batch.rows(wrap(targets), "targets") != samples:
        found = batch.rows(wrap(targets), "targets")
        raise SizeError(f"inputs have {samples} rows, targets have {found}: every sample needs one of each")
    return samples
