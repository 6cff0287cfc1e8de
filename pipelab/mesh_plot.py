"""A mesh as a picture: which ranks lie on one node, and who talks to whom along each axis."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from pipelab import palette
from pipelab.axes import Axes, ink_on_paper, new_axes
from pipelab.errors import SizeError
from pipelab.mesh import NAMES, Mesh

_SHOWN = ("tp", "dp", "pp")  # from the axis that talks most to the one that talks least
_MOST = 256  # ranks
_SIDE = 0.72  # of a rank's square, in a grid of step 1
_BOW = 0.9  # of a line that passes over other ranks: it rises by half of that, in ranks
_MIDDLE: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 4, "linespacing": 1.05}
_GROUPS = ("#cfe3f3", "#fbe0c3", "#c9e9da", "#f0d4e4", "#e3e3e6", "#fbf3bd", "#d9d3ee", "#d3eef0")  # light, for text


@ink_on_paper
def mesh_plot(mesh: Mesh, ranks_per_node: int | None = None) -> list[Axes]:
    """Draw `mesh` once for each axis: a row a node, a square a rank with its coordinates, a colour and a line a group.

    Lines that leave a node are marked, since they take the slower wire. Without `ranks_per_node` all is one node.
    Gives the axes, for tp, dp and pp. Raises SizeError for a number of ranks that is none, or over 256.
    """
    if mesh.num_ranks > _MOST:
        raise SizeError(f"a picture of {mesh.num_ranks:,} ranks could not be read: draw a mesh of at most {_MOST}")
    per_node = mesh.num_ranks if ranks_per_node is None else ranks_per_node
    nodes = mesh.nodes(per_node)
    (whole,) = new_axes([(4 if per_node <= 4 else 2) * len(nodes)])
    figure: Any = whole.figure
    whole.remove()
    axes: list[Axes] = list(figure.subplots(1, len(_SHOWN)))
    wide = min(per_node, mesh.num_ranks)
    for ax, axis in zip(axes, _SHOWN, strict=True):
        _panel(ax, mesh, axis, per_node, wide, len(nodes))
    figure.subplots_adjust(left=0.06, right=0.99, top=0.82, bottom=0.02, wspace=0.12)
    axes[0].set_yticks(range(len(nodes)), [f"node {node}" for node in range(len(nodes))], fontsize=9.5)
    return axes


def _panel(ax: Axes, mesh: Mesh, axis: str, per_node: int, wide: int, nodes: int) -> None:
    named = wide <= 4
    for node in range(nodes):
        there = min(per_node, mesh.num_ranks - node * per_node)
        ax.barh(node, there, 0.92, left=-0.5, color=palette.IDLE, edgecolor=palette.IDLE_HATCH, linewidth=1, zorder=0)
    for number, group in enumerate(mesh.groups(axis)):
        for one, other in pairwise(group):
            _line(ax, one, other, per_node)
        for rank in group:
            at, (node, place) = mesh.coordinates(rank), divmod(rank, per_node)
            colour = _GROUPS[number % len(_GROUPS)]
            ax.barh(
                node, _SIDE, _SIDE, left=place - _SIDE / 2, color=colour, edgecolor=palette.INK, linewidth=0.8, zorder=3
            )
            ax.text(place, node - (0.2 if named else 0), f"{rank}", fontweight="bold", fontsize=9, **_MIDDLE)
            if named:
                ax.text(place, node + 0.1, f"dp {at.dp}\npp {at.pp}\ntp {at.tp}", fontsize=7, **_MIDDLE)
    groups, across = len(mesh.groups(axis)), mesh.crossings(axis, per_node)
    ax.set_title(f"{axis}: {NAMES[axis]}", loc="left", fontsize=11, fontweight="bold", pad=18)
    held = f"{groups} {'group' if groups == 1 else 'groups'} of {mesh.size(axis)}, "
    held += f"{across} between nodes" if across else "none between nodes"
    ax.text(0, 1.02, held, transform=ax.transAxes, fontsize=9.5, color=palette.MARK if across else palette.INK)
    ax.set_xlim(-0.6, wide - 0.4)
    ax.set_ylim(nodes - 0.45, -0.55)
    ax.set_aspect("equal")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)


def _line(ax: Axes, one: int, other: int, per_node: int) -> None:
    """From rank to rank: straight to a neighbour, in a bow over others, marked between nodes."""
    (above, left), (below, right) = divmod(one, per_node), divmod(other, per_node)
    leaves = above != below
    far = abs(right - left) > 1 if not leaves else abs(below - above) > 1 and left == right
    style: dict[str, Any] = {
        "arrowstyle": "-",
        "color": palette.MARK if leaves else palette.INK,
        "linewidth": 2 if leaves else 1.4,
        "connectionstyle": f"arc3,rad={-_BOW / (abs(right - left) + abs(below - above)) if far else 0}",
    }
    ax.annotate("", (right, below), (left, above), arrowprops=style, zorder=2)
