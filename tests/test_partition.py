"""The cut is exact, against every cut there is and against the published cases; bad input is named."""

import copy
import math
import pickle
from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab.errors import PartitionError, SizeError
from pipelab.partition import Partition, partition_layers


def every_cut(costs, num_stages):
    """The exact stage costs of every way to cut, as {sizes: costs}: what the room must be as good as."""
    exact = [Fraction(cost) for cost in costs]
    cuts = ((0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), num_stages - 1))
    return {tuple(b - a for a, b in pairwise(cut)): [sum(exact[a:b]) for a, b in pairwise(cut)] for cut in cuts}


whole = st.integers(0, 12)
real = st.floats(0, 1e6, allow_nan=False)
few_layers = st.one_of(st.lists(whole, min_size=1, max_size=9), st.lists(real, min_size=1, max_size=9))


@given(few_layers, st.data())
def test_partition_is_as_light_and_as_even_as_the_best_of_all_cuts(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))
    found = partition_layers(costs, num_stages)
    weights = costs if any(costs) else [1] * len(costs)
    cuts = every_cut(weights, num_stages)
    lightest = min(max(stages) for stages in cuts.values())
    assert max(cuts[found.sizes]) == lightest

    reaching = {sizes: stages for sizes, stages in cuts.items() if max(stages) == lightest}
    evenness = {sizes: sum(cost**2 for cost in stages) for sizes, stages in reaching.items()}
    ties = [sizes for sizes, squares in evenness.items() if squares == min(evenness.values())]
    assert found.sizes == min(ties, key=lambda sizes: sizes[::-1])  # the last stage shortest, then the one before


@given(few_layers, st.data())
def test_partition_covers_every_layer_once_in_order(costs, data):
    found = partition_layers(costs, data.draw(st.integers(1, len(costs))))
    assert [layer for part in found for layer in range(len(costs))[part]] == list(range(len(costs)))
    assert min(found.sizes) >= 1


@pytest.mark.parametrize(
    ("costs", "num_stages", "optimum"),
    [
        ([1] * 9, 5, 2),  # torchgpipe's balancer gives 5
        ([11, 5, 4, 1, 13, 17, 5], 4, 18),  # DeepSpeed's balancer gives 22
        ([6, 1, 1, 1, 1, 1, 1, 1, 1, 5], 4, 6),
    ],
)
def test_partition_beats_the_published_balancers(costs, num_stages, optimum):
    assert partition_layers(costs, num_stages).heaviest == optimum


def test_partition_of_ten_layers_takes_122_against_150_of_an_even_count():
    costs = [6, 1, 1, 1, 1, 1, 1, 1, 1, 5]
    best, even = partition_layers(costs, 4), Partition.from_sizes(costs, (3, 3, 2, 2))
    step = [2 * (sum(cut.costs) + 7 * cut.heaviest) for cut in (best, even)]  # GPipe, M = 8, F = B
    assert (best.heaviest, even.heaviest) == (6, 8)
    assert step == [122, 150]


def test_partition_decides_floats_without_rounding():
    # Added up as floats, 1 + 1e-16 is 1: all cuts would look equally heavy, and the last stage would get one layer.
    tiny = 1e-16
    assert 1 + tiny == 1
    assert partition_layers([tiny, tiny, 1.0, tiny], 2).sizes == (2, 2)
    assert partition_layers([tiny, tiny, 1.0, tiny, tiny, tiny], 2).sizes == (3, 3)


def test_partition_prefers_a_light_heaviest_stage_to_an_even_cut():
    # 4 | 7 | 9+3 is the more even cut (209 against 211 in squares), but its heaviest stage is 12, not 11.
    assert partition_layers([4, 7, 9, 3], 3).costs == (11, 9, 3)


def test_partition_keeps_a_free_layer_with_the_layer_before_it():
    assert partition_layers([6240, 0, 9312, 0, 9312, 0, 970], 4).sizes == (2, 2, 2, 1)


def test_partition_counts_layers_where_all_cost_nothing():
    found = partition_layers([0, 0, 0, 0, 0], 2)
    assert (found.sizes, found.heaviest) == ((3, 2), 0)


def test_partition_is_a_tuple_of_slices_that_cut_a_list():
    found = partition_layers([5, 5, 5, 5], 2)
    assert found == (slice(0, 2), slice(2, 4))
    assert ["a", "b", "c", "d"][found[1]] == ["c", "d"]
    assert (found.costs, found.heaviest, found.sizes) == ((10, 10), 10, (2, 2))


def test_partition_prints_stages_layers_and_costs():
    assert str(partition_layers([6, 1, 1, 4], 2)) == (
        "4 layers in 2 stages, heaviest 6\n"
        "stage  layers  cost\n"
        "    0  0:1        6  ████████████████████████\n"
        "    1  1:4        6  ████████████████████████"
    )


def test_partition_prints_long_costs_short_and_no_bars_where_nothing_costs():
    assert str(partition_layers([12345, 1], 2)).endswith(" 12,345  ████████████████████████\n    1  1:2          1")
    assert str(partition_layers([1 / 3, 0], 2)).startswith("2 layers in 2 stages, heaviest 0.3333\n")
    assert "█" not in str(partition_layers([0, 0], 2))


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda cut: pickle.loads(pickle.dumps(cut))])
def test_partition_survives_copy_and_pickle(clone):
    found = partition_layers([3, 1, 2], 2)
    again = clone(found)
    assert type(again) is Partition
    assert (again, again.costs) == (found, found.costs)


@pytest.mark.parametrize(
    ("costs", "kind", "heaviest"),
    [
        ([1, 2, 3], int, 3),
        ([1, 2.5, 3], float, 3.5),
        ([Fraction(1, 3), Fraction(2, 3), 1], Fraction, 1),
        (np.array([1, 2, 3]), int, 3),
        (np.array([1, 2, 3], dtype=np.float32), float, 3.0),
        ([10**400, 1, 1], int, 10**400),
    ],
)
def test_partition_takes_every_kind_of_real_number(costs, kind, heaviest):
    found = partition_layers(costs, 2)
    assert found.heaviest == heaviest
    assert type(found.heaviest) is kind


@pytest.mark.timeout(60)
def test_partition_of_ten_thousand_layers_in_64_stages_ends():
    # a tenth of a second; hours if every cut were tried for every layer
    found = partition_layers([1 + math.sin(layer) ** 2 for layer in range(10_000)], 64)
    assert sum(found.sizes) == 10_000


@pytest.mark.parametrize("num_stages", [0, -1, True, 1.5, "2", None, math.nan])
def test_partition_refuses_a_number_of_stages_that_is_no_count(num_stages):
    with pytest.raises(SizeError, match="num_stages must be"):
        partition_layers([1, 2, 3], num_stages)


def test_partition_refuses_more_stages_than_layers():
    with pytest.raises(PartitionError, match=r"cannot cut 3 layers into 4 stages.*at most 3 stages"):
        partition_layers([1, 2, 3], 4)


@pytest.mark.parametrize("costs", [12, None])
def test_partition_refuses_a_number_in_place_of_costs(costs):
    with pytest.raises(PartitionError, match=r"expected the cost of every layer, as in \[3, 1, 2\], got (12|None)"):
        partition_layers(costs, 4)


def test_partition_refuses_an_empty_row():
    with pytest.raises(PartitionError, match="no layer to cut"):
        partition_layers([], 1)


def test_partition_names_every_cost_that_is_unusable():
    with pytest.raises(PartitionError, match="at least 0") as caught:
        partition_layers([1, -2, math.nan, math.inf, True, "3"], 2)
    assert str(caught.value).splitlines()[1:] == [
        "  layer 1: -2 is negative",
        "  layer 2: nan is not finite",
        "  layer 3: inf is not finite",
        "  layer 4: True is no number",
        "  layer 5: '3' is no number",
    ]


def test_partition_refuses_costs_whose_sum_no_float_can_hold():
    with pytest.raises(PartitionError, match="larger unit"):
        partition_layers([1e308, 1e308], 1)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [((2, 2), PartitionError, "add up to 4 layers, but there are 3"), ((3, 0), SizeError, "the size of stage 1")],
)
def test_partition_from_sizes_refuses_sizes_that_do_not_fit(sizes, error, message):
    with pytest.raises(error, match=message):
        Partition.from_sizes([1, 2, 3], sizes)
