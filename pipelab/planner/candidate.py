"""One candidate: integers and three words that say how a model could be laid out over the GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from pipelab.schedule import Schedule, Shape, placed
from pipelab.schedules import SCHEDULES, takes_stages

REMATS = ("none", "layer", "stage")
SHARDINGS = ("replicated", "zero_1", "zero_3")


@dataclass(frozen=True)
class Candidate:
    """`dp` replicas of a pipeline of `pp` ranks, each of them `tp` GPUs.

    A rank holds `stages_per_rank` stages and runs `schedule` over `num_microbatches` of `microbatch` samples, `rounds`
    times before each update. `remat` as in Pipeline: what is recomputed. `sharding`: what the replicas divide among
    them, as in theory.model_state_bytes. What was not yet chosen when a candidate was rejected is 0 or "".
    """

    dp: int
    tp: int
    pp: int
    microbatch: int = 0
    rounds: int = 1
    num_microbatches: int = 0
    schedule: str = ""
    stages_per_rank: int = 1
    remat: str = ""
    sharding: str = ""

    def __str__(self) -> str:
        parts = [self.sizes]
        if self.schedule:
            virtual = f", {self.stages_per_rank} stages a rank" if self.stages_per_rank != 1 else ""
            parts.append(f"{self.schedule}{virtual}")
        if self.num_microbatches:
            times = f"{self.rounds} × " if self.rounds != 1 else ""
            parts.append(f"{times}{self.num_microbatches} micro-batches of {self.microbatch}")
        elif self.microbatch:
            parts.append(f"micro-batch {self.microbatch}")
        if self.remat:
            parts.append(f"remat {self.remat}")
        if self.sharding:
            parts.append(self.sharding)
        return ", ".join(parts)

    @property
    def sizes(self) -> str:
        """In words: "dp 2 × tp 1 × pp 4", without what is not chosen."""
        sizes = {"dp": self.dp, "tp": self.tp, "pp": self.pp}
        return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size)

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * self.stages_per_rank

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of every stage."""
        return placed(self.pp, self.stages_per_rank, traits(self.schedule).shape)

    def build(self) -> Schedule:
        """Its schedule, of one round."""
        return build(self.schedule, self.pp, self.num_microbatches, self.stages_per_rank)


class Traits(NamedTuple):
    """What the planner must know of a schedule's builder."""

    any_stages: bool  # how many stages a rank has may be chosen
    stages_per_rank: int
    shape: Shape
    splits: bool  # B into I and W
    updates: bool  # weights within the step, so it is not a flushed schedule


@cache
def traits(schedule: str) -> Traits:
    """The traits of a schedule, read off a small one."""
    small = SCHEDULES[schedule](2, 4)
    return Traits(
        any_stages=takes_stages(schedule),
        stages_per_rank=small.stages_per_rank,
        shape="v" if small.placement[2:3] == (1,) else "loop",
        splits=small.splits_backward,
        updates=small.has_updates,
    )


def build(schedule: str, pp: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """The Schedule of one pipeline."""
    if traits(schedule).any_stages:
        return SCHEDULES[schedule](pp, num_microbatches, stages_per_rank=stages_per_rank)
    return SCHEDULES[schedule](pp, num_microbatches)
