"""One candidate: integers and three words that say how a model could be laid out over the GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import NamedTuple

from pipelab.schedule import Schedule
from pipelab.schedules import SCHEDULES

REMATS = ("none", "layer", "stage")
SHARDINGS = ("replicated", "zero_1", "zero_3")


@dataclass(frozen=True)
class Candidate:
    """`dp` replicas of a pipeline of `pp` ranks, each of them `tp` GPUs.

    A rank holds `stages_per_rank` stages and runs `schedule` over `num_microbatches` of `microbatch` samples, `rounds`
    times before each update. `remat` as in Pipeline: what is recomputed. `sharding`: what the replicas divide among
    them, as in theory.model_state_bytes. What was not yet chosen when a candidate was rejected is None.
    """

    dp: int
    tp: int
    pp: int
    microbatch: int | None = None
    rounds: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None
    remat: str | None = None
    sharding: str | None = None

    def __str__(self) -> str:
        parts = [f"dp {self.dp} × tp {self.tp} × pp {self.pp}"]
        if self.schedule is not None:
            virtual = f", {self.stages_per_rank} stages a rank" if self.stages_per_rank != 1 else ""
            parts.append(f"{self.schedule}{virtual}")
        if self.num_microbatches is not None:
            times = f"{self.rounds} × " if self.rounds != 1 else ""
            parts.append(f"{times}{self.num_microbatches} micro-batches of {self.microbatch}")
        elif self.microbatch is not None:
            parts.append(f"micro-batch {self.microbatch}")
        if self.remat is not None:
            parts.append(f"remat {self.remat}")
        if self.sharding is not None:
            parts.append(str(self.sharding))
        return ", ".join(parts)

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * (self.stages_per_rank or 1)

    def build(self) -> Schedule:
        """Its schedule, of one round."""
        assert self.schedule is not None
        assert self.num_microbatches is not None
        return build(self.schedule, self.pp, self.num_microbatches, self.stages_per_rank or 1)


class Traits(NamedTuple):
    """What the planner must know of a schedule's builder."""

    any_stages: bool  # how many stages a rank has may be chosen
    stages_per_rank: int
    v_shaped: bool
    splits: bool  # B into I and W
    updates: bool  # weights within the step, so it is not a flushed schedule


@cache
def traits(schedule: str) -> Traits:
    """The traits of a schedule, read off a small one."""
    small = SCHEDULES[schedule](2, 4)
    return Traits(
        any_stages="stages_per_rank" in signature(SCHEDULES[schedule]).parameters,
        stages_per_rank=small.stages_per_rank,
        v_shaped=small.placement[2:3] == (1,),
        splits=small.splits_backward,
        updates=small.has_updates,
    )


def build(schedule: str, pp: int, num_microbatches: int, stages_per_rank: int) -> Schedule:
    """The Schedule of one pipeline."""
    if traits(schedule).any_stages:
        return SCHEDULES[schedule](pp, num_microbatches, stages_per_rank=stages_per_rank)
    return SCHEDULES[schedule](pp, num_microbatches)


def rank_of(stage: int, pp: int, v_shaped: bool) -> int:
    """Where a stage is: round and round, or there and back again."""
    turn, place = divmod(stage, pp)
    return pp - 1 - place if v_shaped and turn % 2 else place
