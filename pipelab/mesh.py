"""Ranks in three dimensions: replicas of a pipeline, its stages, and the slices of a stage. Pure integers.

    Mesh(dp=2, pp=2, tp=2)        pipeline 0          pipeline 1        one replica of the data each        dp
                                  0  1 ── 4  5        2  3 ── 6  7      ranks 0, 1 hold the first stages    pp
                                                                        each of them a slice of the layers  tp

A group is the ranks that differ in one coordinate only: they are the ones that talk along that axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from pipelab.errors import SizeError, positive_integer

AXES = ("dp", "pp", "tp")
NAMES = {"dp": "data parallel", "pp": "pipeline parallel", "tp": "tensor parallel"}


class Coordinates(NamedTuple):
    """Where a rank stands: its replica, its place in the pipeline, its slice of every layer."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """`dp * pp * tp` ranks: `dp` replicas of a pipeline of `pp` ranks, each with its layers split over `tp`.

    `order` names the axes from the one along which rank numbers grow slowest to the one where neighbours are
    neighbours. By default the slices of a layer are next to each other, on one node, and the stages furthest apart, as
    Megatron-LM has it (Narayanan et al. 2021, section 3: tensor parallelism within a node, pipelines across nodes).
    Raises SizeError for a size that is none, or an order that does not name each axis once.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    order: tuple[str, str, str] = ("pp", "dp", "tp")

    def __post_init__(self) -> None:
        for axis in AXES:
            object.__setattr__(self, axis, positive_integer(axis, getattr(self, axis)))
        object.__setattr__(self, "order", tuple(self.order))
        if sorted(self.order) != sorted(AXES):
            raise SizeError(f"order must name {', '.join(AXES)} once each, slowest first, got {self.order!r}")

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self.dp * self.pp * self.tp

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes in the mesh's own order."""
        return tuple(self.size(axis) for axis in self.order)

    def size(self, axis: str) -> int:
        """How many ranks a group along `axis` has. Raises SizeError for an axis that does not exist."""
        if axis not in AXES:
            raise SizeError(f"axis must be {' or '.join(map(repr, AXES))}, got {axis!r}")
        size: int = getattr(self, axis)
        return size

    def rank(self, *, dp: int = 0, pp: int = 0, tp: int = 0) -> int:
        """The rank at these coordinates. Raises SizeError where one of them is outside the mesh."""
        at = {"dp": dp, "pp": pp, "tp": tp}
        for axis, place in at.items():
            if not 0 <= place < self.size(axis):
                raise SizeError(f"{axis} is {place}, but this mesh has {axis} coordinates 0 to {self.size(axis) - 1}")
        number = 0
        for axis in self.order:
            number = number * self.size(axis) + at[axis]
        return number

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands. Raises SizeError for a rank that is not in the mesh."""
        if not 0 <= rank < self.num_ranks:
            raise SizeError(f"rank {rank} is not in a mesh of ranks 0 to {self.num_ranks - 1}")
        at = {}
        for axis in reversed(self.order):
            rank, at[axis] = divmod(rank, self.size(axis))
        return Coordinates(**at)

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The groups along `axis`, each the ranks that differ in that coordinate alone, in its order."""
        self.size(axis)
        others = [other for other in self.order if other != axis]
        places = product(*(range(self.size(other)) for other in others))
        return tuple(self._line(axis, dict(zip(others, at, strict=True))) for at in places)

    def group(self, axis: str, rank: int) -> tuple[int, ...]:
        """The group along `axis` that `rank` is in."""
        return self._line(axis, self.coordinates(rank)._asdict())

    def pipelines(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """The ranks of every pipeline, first stage first, by (dp, tp)."""
        return {
            (dp, tp): tuple(self.rank(dp=dp, pp=pp, tp=tp) for pp in range(self.pp))
            for dp, tp in product(range(self.dp), range(self.tp))
        }

    def nodes(self, ranks_per_node: int) -> tuple[range, ...]:
        """The ranks on each node, where a node takes `ranks_per_node` in the order of their numbers."""
        per_node = positive_integer("ranks_per_node", ranks_per_node)
        starts = range(0, self.num_ranks, per_node)
        return tuple(range(start, min(start + per_node, self.num_ranks)) for start in starts)

    def crossings(self, axis: str, ranks_per_node: int) -> int:
        """How many groups along `axis` have ranks on more than one node, so that their talk takes the slower wire."""
        per_node = positive_integer("ranks_per_node", ranks_per_node)
        return sum(len({rank // per_node for rank in group}) > 1 for group in self.groups(axis))

    def _line(self, axis: str, at: dict[str, int]) -> tuple[int, ...]:
        return tuple(self.rank(**{**at, axis: place}) for place in range(self.size(axis)))

    def __str__(self) -> str:
        return " × ".join(f"{axis} {self.size(axis)}" for axis in AXES)
