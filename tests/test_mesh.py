"""The mesh: coordinates, groups and nodes, as integers."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipelab as pl

MESHES = st.builds(
    pl.Mesh,
    *[st.integers(1, 4)] * 3,
    order=st.sampled_from(list(permutations(("dp", "pp", "tp")))),
)


@given(MESHES)
def test_mesh_gives_every_rank_coordinates_of_its_own(mesh: pl.Mesh) -> None:
    everywhere = [mesh.coordinates(rank) for rank in range(mesh.num_ranks)]
    assert len(set(everywhere)) == mesh.num_ranks == mesh.dp * mesh.pp * mesh.tp
    assert [mesh.rank(**at._asdict()) for at in everywhere] == list(range(mesh.num_ranks))


@given(MESHES, st.sampled_from(("dp", "pp", "tp")))
def test_mesh_groups_differ_in_one_coordinate_and_hold_every_rank_once(mesh: pl.Mesh, axis: str) -> None:
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.num_ranks))
    for group in groups:
        at = [mesh.coordinates(rank)._asdict() for rank in group]
        assert [place.pop(axis) for place in at] == list(range(mesh.size(axis)))
        assert all(place == at[0] for place in at)
        assert all(mesh.group(axis, rank) == group for rank in group)


@given(MESHES)
def test_mesh_pipelines_are_the_groups_along_pp(mesh: pl.Mesh) -> None:
    assert sorted(mesh.pipelines().values()) == sorted(mesh.groups("pp"))


def test_mesh_by_default_keeps_a_layer_s_slices_together_and_stages_apart() -> None:
    """Megatron-LM 2021, section 3: tensor parallelism within a node, pipelines across nodes."""
    mesh = pl.Mesh(dp=2, pp=2, tp=2)
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert mesh.groups("dp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert mesh.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert [mesh.crossings(axis, 2) for axis in ("tp", "dp", "pp")] == [0, 4, 4]
    assert [mesh.crossings(axis, 4) for axis in ("tp", "dp", "pp")] == [0, 0, 4]


def test_mesh_another_order_sends_slices_over_the_slower_wire() -> None:
    mesh = pl.Mesh(dp=2, pp=2, tp=2, order=("tp", "dp", "pp"))
    assert mesh.groups("tp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert [mesh.crossings(axis, 4) for axis in ("tp", "dp", "pp")] == [4, 0, 0]
    assert mesh.nodes(3) == (range(3), range(3, 6), range(6, 8))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: pl.Mesh(dp=0), "dp must be at least 1, got 0"),
        (lambda: pl.Mesh(tp=1.5), "tp must be a whole number, got 1.5"),
        (lambda: pl.Mesh(order=("pp", "dp", "dp")), "order must name dp, pp, tp once each"),
        (lambda: pl.Mesh(dp=2).rank(dp=2), "dp is 2, but this mesh has dp coordinates 0 to 1"),
        (lambda: pl.Mesh(dp=2).coordinates(-1), "rank -1 is not in a mesh of ranks 0 to 1"),
        (lambda: pl.Mesh().groups("cp"), "axis must be 'dp' or 'pp' or 'tp', got 'cp'"),
        (lambda: pl.Mesh().nodes(0), "ranks_per_node must be at least 1"),
        (
            lambda: pl.mesh_plot(pl.Mesh(16, 16, 16), 8),
            "a picture of 4,096 ranks could not be read",
        ),  # took two minutes
    ],
)
def test_mesh_says_what_is_wrong(wrong: object, sentence: str) -> None:
    with pytest.raises(pl.SizeError, match=sentence):
        wrong()  # type: ignore[operator]


def test_mesh_plot_marks_what_leaves_a_node() -> None:
    from pipelab import palette

    axes = pl.mesh_plot(pl.Mesh(dp=2, pp=2, tp=2), ranks_per_node=4)
    for ax, marked in zip(axes, (0, 0, 4), strict=True):
        lines = [text.arrow_patch for text in ax.texts if getattr(text, "arrow_patch", None)]
        assert len(lines) == 4
        assert sum(line.get_edgecolor()[:3] == pytest.approx(_rgb(palette.MARK)) for line in lines) == marked
    written = [text.get_text() for text in axes[0].texts]
    assert "4 groups of 2, none between nodes" in written
    assert "dp 1\npp 0\ntp 1" in written  # rank 3


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
