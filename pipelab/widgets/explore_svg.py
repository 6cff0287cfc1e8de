"""The explorer's pictures beside the Gantt: the stages on their ranks, and where every micro-batch is."""

from __future__ import annotations

from collections.abc import Sequence

from pipelab import palette
from pipelab.action import Kind
from pipelab.schedule import Schedule
from pipelab.widgets.explore_model import Place
from pipelab.widgets.svg import WIDTH, opening


def stages_svg(schedule: Schedule, layers: int, description: str) -> str:
    """A column a rank, its stages below one another, and an arrow over every boundary."""
    pitch, high, step = (WIDTH - 20) / schedule.num_ranks, 40, 78
    wide = min(pitch * 0.72, 190)
    depth = {s: d for rank in range(schedule.num_ranks) for d, s in enumerate(schedule.stages_on(rank))}

    def corner(stage: int) -> tuple[float, float]:
        return 10 + pitch * (schedule.placement[stage] + 0.5) - wide / 2, 26 + step * depth[stage]

    bottom = 26 + step * (schedule.stages_per_rank - 1) + high + 6
    parts = [opening(bottom, f"The stages of {schedule.name}", description)]
    parts.append(
        '<marker id="pl-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="currentColor"/></marker>'
    )
    for rank in range(schedule.num_ranks):
        parts.append(f'<text x="{10 + pitch * (rank + 0.5):.1f}" y="16" text-anchor="middle">rank {rank}</text>')
    for stage in range(schedule.num_stages):
        x, y = corner(stage)
        fill = palette.shade(Kind.F, depth[stage], schedule.stages_per_rank)
        first, last = stage * layers, (stage + 1) * layers - 1
        span = f"{first}" if layers == 1 else f"{first}–{last}"
        long = wide > 110
        lines = (f"stage {stage}", f"layers {span}") if long else (f"{stage}", span)
        texts = "".join(
            f'<text x="{x + wide / 2:.1f}" y="{y + 16 + 15 * place}" text-anchor="middle" '
            f'font-size="{12 if long else 10}" fill="{palette.ink_on(fill)}">{line}</text>'
            for place, line in enumerate(lines)
        )
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{high}" rx="4" fill="{fill}">'
            f"<title>stage {stage}: layers {span}, rank {schedule.placement[stage]}</title></rect>{texts}"
        )
    for stage in range(schedule.num_stages - 1):
        (x, y), (to_x, to_y) = corner(stage), corner(stage + 1)
        if y == to_y:
            ends = (x + wide, to_x) if x < to_x else (x, to_x + wide)
            way = f"M{ends[0]:.1f} {y + high / 2}L{ends[1]:.1f} {y + high / 2}"
        else:
            here, there = x + wide / 2, to_x + wide / 2
            middle = (y + high + to_y) / 2
            way = f"M{here:.1f} {y + high}V{middle}H{there:.1f}V{to_y}"
        parts.append(f'<path d="{way}" fill="none" stroke="currentColor" marker-end="url(#pl-tip)"/>')
    return "".join([*parts, "</svg>"])


_LEFT, _LANE, _MOST = 128, 92, 4  # pixels before stage 0; of a lane; micro-batches drawn at one place


def places_svg(schedule: Schedule, where: Sequence[Place], description: str) -> str:
    """A column a stage; forward above, backward below; a disc works, a ring waits."""
    pitch = (WIDTH - _LEFT - 10) / schedule.num_stages
    radius = min(9.0, pitch / 2 - 1)
    parts = [opening(26 + 2 * _LANE, "Where every micro-batch is", description)]
    for row, (lane, outside) in enumerate((("forward", "not started"), ("backward", "done"))):
        top = 24 + row * _LANE
        parts.append(f'<text x="4" y="{top + 14}">{lane}</text><text x="4" y="{top + 30}">({outside})</text>')
    for stage in range(schedule.num_stages):
        x = _LEFT + pitch * stage
        label = f"stage {stage}" if pitch > 52 else str(stage)
        parts.append(
            f'<path d="M{x:.1f} 22h{pitch - 2:.1f}v{2 * _LANE}h{2 - pitch:.1f}z" fill="currentColor" fill-opacity='
            f'"{0.05 if stage % 2 else 0.1}"/><text x="{x + pitch / 2:.1f}" y="15" text-anchor="middle" font-size='
            f'"{12 if pitch > 20 else 9}">{label}</text>'
        )
    groups: dict[tuple[int | None, bool], list[int]] = {}
    for k, place in enumerate(where):
        groups.setdefault((place.stage, place.forward), []).append(k)
    for (at, forward), members in groups.items():
        x = 104.0 if at is None else _LEFT + pitch * (at + 0.5)
        top = 24 + (0 if forward else _LANE)
        for row, k in enumerate(members[:_MOST]):
            parts.append(_microbatch(k, where[k], x, top + 11 + 20 * row, radius))
        if len(members) > _MOST:
            parts.append(f'<text x="{x + radius + 2:.1f}" y="{top + 76}" font-size="10">+{len(members) - _MOST}</text>')
    return "".join([*parts, "</svg>"])


def _microbatch(k: int, place: Place, x: float, y: float, radius: float) -> str:
    colour = palette.COLOURS[Kind.F if place.forward else Kind.B]
    fill, ink = (colour, palette.ink_on(colour)) if place.working else ("none", "currentColor")
    state = "at work" if place.working else "waits"
    where = f"stage {place.stage}, {state}" if place.stage is not None else ("not started" if place.forward else "done")
    return (
        f'<circle cx="{x:.1f}" cy="{y}" r="{radius:.1f}" fill="{fill}" stroke="{colour}" stroke-width="2">'
        f'<title>micro-batch {k}: {where}</title></circle><text x="{x:.1f}" y="{y + 4}" text-anchor="middle" '
        f'font-size="{10 if radius > 7 else 8}" fill="{ink}" pointer-events="none">{k}</text>'
    )
