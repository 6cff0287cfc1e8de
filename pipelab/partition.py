"""Layer costs in, contiguous stages out, the heaviest stage as light as it can be.

The slowest stage sets the pace: with M micro-batches each direction of a pipeline takes `sum + (M - 1) * heaviest`. So
the best cut is the one whose heaviest stage is lightest, and it is found exactly, in two passes:

    how light can it be?   bisect the limit; fill the stages from the left and see whether they suffice          [1]
    which cut reaches it?  of all that do, the most even one, by dynamic programming over the stages             [2]

Costs are turned into whole numbers first (every float is one, over a power of two), so no rounding decides anything.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from numbers import Integral, Rational, Real
from typing import TypeAlias

from pipelab.errors import PartitionError, positive_integer

Number: TypeAlias = "int | float | Fraction"


class Partition(tuple[slice, ...]):
    """Layers given to stages: element s is the slice of layers of stage s, so `model[partition[s]]` is that stage.

    `costs` holds the cost of each stage, in the unit of the layer costs that it was made from. Printed, it is a table.
    """

    costs: tuple[Number, ...]

    def __new__(cls, slices: Iterable[slice], costs: Iterable[Number]) -> Partition:
        partition = super().__new__(cls, slices)
        partition.costs = tuple(costs)
        return partition

    @classmethod
    def from_sizes(cls, costs_per_layer: Iterable[Number], sizes: Iterable[int]) -> Partition:
        """The cut whose stage s holds `sizes[s]` layers: a split of your own, to lay beside the best one.

        Raises PartitionError unless the sizes are positive and add up to the number of layers.
        """
        layers = _checked(costs_per_layer)
        stages = [positive_integer(f"the size of stage {stage}", size) for stage, size in enumerate(sizes)]
        if sum(stages) != len(layers):
            raise PartitionError(f"the sizes {stages} add up to {sum(stages)} layers, but there are {len(layers)}")
        return cls._at(layers, list(accumulate(stages, initial=0)))

    @classmethod
    def _at(cls, layers: Sequence[Number], cuts: Sequence[int]) -> Partition:
        slices = [slice(start, stop) for start, stop in pairwise(cuts)]
        return cls(slices, [_sum(layers[part]) for part in slices])

    @property
    def heaviest(self) -> Number:
        """Cost of the heaviest stage, the one that sets the pace."""
        return max(self.costs)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of layers in each stage."""
        return tuple(part.stop - part.start for part in self)

    def __getnewargs__(self) -> tuple[tuple[slice, ...], tuple[Number, ...]]:  # for copy and pickle
        return tuple(self), self.costs

    def __str__(self) -> str:
        stages = f"{len(self)} stage{'s' * (len(self) != 1)}"
        lines = [f"{sum(self.sizes)} layers in {stages}, heaviest {_short(self.heaviest)}"]
        names = [f"{part.start}:{part.stop}" for part in self]
        figures = [_short(cost) for cost in self.costs]
        wide_name, wide_figure = max(6, *map(len, names)), max(4, *map(len, figures))
        lines.append(f"stage  {'layers':<{wide_name}}  {'cost':>{wide_figure}}")
        for stage, (name, figure, cost) in enumerate(zip(names, figures, self.costs, strict=True)):
            bar = "█" * (round(24 * Fraction(cost) / Fraction(self.heaviest)) if self.heaviest else 0)
            lines.append(f"{stage:>5}  {name:<{wide_name}}  {figure:>{wide_figure}}  {bar}".rstrip())
        return "\n".join(lines)

    __repr__ = __str__


def partition_layers(costs_per_layer: Iterable[Number], num_stages: int) -> Partition:
    """Cut a row of layers into `num_stages` contiguous, non-empty stages with the heaviest as light as possible.

    Costs are finite numbers of at least 0 in any one unit: seconds, FLOPs, parameters. The optimum is exact, for floats
    too. Of the cuts that reach it, taken is the most even one (the smallest sum of squared stage costs); among equals
    the last stage is as short as possible, then the one before it, and so on, so that a layer that costs nothing (an
    activation function) stays with the layer before it. Where every layer costs nothing, layers are counted instead.

    Raises SizeError where `num_stages` is no positive integer, PartitionError where there are more stages than layers,
    or no layer, or a cost that is negative, not finite or no number.
    """
    layers = _checked(costs_per_layer)
    stages = positive_integer("num_stages", num_stages)
    if stages > len(layers):
        raise PartitionError(
            f"cannot cut {len(layers)} layers into {stages} stages: a stage needs at least one layer. "
            f"Ask for at most {len(layers)} stages, or write the model as more, smaller layers"
        )
    whole = _whole_numbers(layers) if any(layers) else [1] * len(layers)
    prefix = list(accumulate(whole, initial=0))  # layers i to j - 1 cost prefix[j] - prefix[i]
    return Partition._at(layers, _most_even_cuts(prefix, stages, _lightest_limit(prefix, stages)))


# [1] ------------------------------------------------------------------------------------------------------------------


def _lightest_limit(prefix: Sequence[int], num_stages: int) -> int:
    """The smallest limit under which `num_stages` stages hold all layers, by bisection over whole numbers."""
    num_layers, total = len(prefix) - 1, prefix[-1]
    largest = max(stop - start for start, stop in pairwise(prefix))
    low, high = max(largest, -(-total // num_stages)), total // num_stages + largest  # high always suffices
    while low < high:
        limit = (low + high) // 2
        low, high = (low, limit) if _furthest(prefix, num_stages, limit)[-1] == num_layers else (limit + 1, high)
    return low


def _furthest(prefix: Sequence[int], num_stages: int, limit: int) -> list[int]:
    """Entry s is how many layers the first s stages can hold when none may cost more than `limit`."""
    reach = [0]
    for _ in range(num_stages):
        reach.append(bisect_right(prefix, prefix[reach[-1]] + limit) - 1)
    return reach


# [2] ------------------------------------------------------------------------------------------------------------------


def _most_even_cuts(prefix: Sequence[int], num_stages: int, limit: int) -> list[int]:
    """The cuts 0 = c[0] < c[1] < ... = layers with the smallest sum of squared stage costs under `limit`.

    `best[j]` is that sum for the first j layers in the stages so far. A best cut never moves left when a layer is
    added, so the middle one halves the range for all others: layers x stages x log(layers) steps in all.
    """
    num_layers = len(prefix) - 1
    # The first s stages hold least[s] to most[s] layers: more break the limit, fewer leave too much for the others.
    reaches = enumerate(_furthest(prefix, num_stages, limit))
    most = [min(reach, num_layers - num_stages + stage) for stage, reach in reaches]
    backwards = _furthest([prefix[-1] - cost for cost in reversed(prefix)], num_stages, limit)
    least = [max(stage, num_layers - reach) for stage, reach in enumerate(reversed(backwards))]

    best = {0: 0}
    history: list[dict[int, int]] = []
    for stage in range(1, num_stages + 1):
        before, best, cut = best, {}, {}
        spans = [(least[stage], most[stage], least[stage - 1], most[stage - 1])]
        while spans:
            first, last, low, high = spans.pop()
            if first > last:
                continue
            stop = (first + last) // 2
            low_start = max(low, bisect_left(prefix, prefix[stop] - limit))
            best[stop], negative_start = min(
                (before[start] + (prefix[stop] - prefix[start]) ** 2, -start)
                for start in range(low_start, min(high, stop - 1) + 1)
            )
            cut[stop] = -negative_start
            spans += [(first, stop - 1, low, cut[stop]), (stop + 1, last, cut[stop], high)]
        history.append(cut)
    cuts = [num_layers]
    for cut in reversed(history):
        cuts.append(cut[cuts[-1]])
    return cuts[::-1]


# Numbers -------------------------------------------------------------------------------------------------------------


def _checked(costs_per_layer: Iterable[Number]) -> list[Number]:
    """The costs as plain ints, fractions and floats; PartitionError with every layer whose cost is not usable."""
    if not isinstance(costs_per_layer, Iterable):
        raise PartitionError(f"expected the cost of every layer, as in [3, 1, 2], got {costs_per_layer!r}")
    layers: list[Number] = []
    wrong: list[str] = []
    for layer, given in enumerate(costs_per_layer):
        cost = _plain(given)
        if cost is None:
            wrong.append(f"layer {layer}: {given!r} is no number")
        elif isinstance(cost, float) and not math.isfinite(cost):
            wrong.append(f"layer {layer}: {cost} is not finite")
        elif cost < 0:
            wrong.append(f"layer {layer}: {cost} is negative")
        else:
            layers.append(cost)
    if wrong:
        raise PartitionError("a layer's cost is a finite number of at least 0:\n  " + "\n  ".join(wrong))
    if not layers:
        raise PartitionError("there is no layer to cut: costs_per_layer is empty")
    try:
        _sum(layers)
    except OverflowError:
        raise PartitionError("the costs add up to more than a float can hold: give them in a larger unit") from None
    return layers


def _plain(cost: object) -> Number | None:
    """The same number as an int, a Fraction or a float (numpy's too), or None where it is no real number."""
    if isinstance(cost, bool) or not isinstance(cost, Real):
        return None
    if isinstance(cost, Integral):
        return int(cost)
    return Fraction(cost) if isinstance(cost, Rational) else float(cost)


def _whole_numbers(layers: Sequence[Number]) -> list[int]:
    exact = [Fraction(cost) for cost in layers]
    scale = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * scale) for cost in exact]


def _sum(layers: Sequence[Number]) -> Number:
    """The exact sum, rounded once where a float takes part."""
    total = sum((Fraction(cost) for cost in layers), Fraction(0))
    if any(isinstance(cost, float) for cost in layers):
        return float(total)
    return total if any(isinstance(cost, Fraction) for cost in layers) else int(total)


def _short(cost: Number) -> str:
    return f"{cost:,}" if isinstance(cost, int) else f"{float(cost):.4g}"
