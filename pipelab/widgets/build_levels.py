"""The ten levels of the builder, from one micro-batch to a pipeline in which no rank waits."""

from __future__ import annotations

from dataclasses import dataclass

from pipelab.costs import Costs
from pipelab.errors import SizeError
from pipelab.trace import Trace
from pipelab.widgets.build_model import HAIR, Board, Task


@dataclass(frozen=True)
class Level:
    """A task with a goal: finish it with at most this `makespan`, or this `span` of the rank that takes longest.

    Times are in units of the task's costs; how much may be kept is the task's own limit.
    """

    title: str
    hint: str
    task: Task
    makespan: float | None = None
    span: float | None = None

    @property
    def goal(self) -> str:
        """The goal as a sentence."""
        if self.span is not None:
            return f"Let no rank take longer than {self.span:g} from its first start to its last end."
        return f"Finish within a makespan of {self.makespan:g}."

    def reached(self, trace: Trace) -> bool:
        """Whether `trace`, of a finished board of this task, is good enough."""
        in_time = self.makespan is None or trace.makespan <= self.makespan + HAIR
        return in_time and (self.span is None or trace.longest_rank_span <= self.span + HAIR)

    def verdict(self, board: Board) -> str:
        """What a finished board of this task is worth, in a sentence."""
        if board.trace is None or not board.complete or not self.reached(board.trace):
            return f"The goal is not reached yet. {self.goal}"
        if board.helped:
            return "The goal is reached, but a rule has placed some of it: undo its moves and find them yourself."
        return "The goal is reached, by your own moves."


LEVELS: tuple[Level, ...] = (
    Level(
        "There and back",
        "Forward to the last stage, then backward home: F takes 1, B takes 2.",
        Task(2, 1),
        makespan=6,
    ),
    Level(
        "Two at once",
        "One after the other, two micro-batches would take 12. While one is away, start the next.",
        Task(2, 2),
        makespan=9,
    ),
    Level(
        "Fill and drain",
        "Four ranks: somebody always waits at the start and at the end, but nobody has to wait in between.",
        Task(4, 4),
        makespan=21,
    ),
    Level(
        "Room for three",
        "No rank may keep more than three micro-batches. It costs no time, if backwards come early.",
        Task(3, 6, memory_limit=3),
        makespan=24,
    ),
    Level(
        "Room for two",
        "Now memory costs time: with room for two on four ranks, some waiting cannot be helped. Keep it short.",
        Task(4, 6, memory_limit=2),
        makespan=39,
    ),
    Level(
        "A slow wire",
        "Every message takes 1. Waiting for an answer hurts, so keep a little more under way than 1F1B does.",
        Task(3, 6, costs=Costs(comm=1), memory_limit=4),
        makespan=29,
    ),
    Level(
        "Two stages a rank",
        "Stages 0 and 2 are on rank 0, stages 1 and 3 on rank 1. Who comes first, the new micro-batch or the old one?",
        Task(2, 4, stages_per_rank=2, memory_limit=2.5),
        makespan=27,
    ),
    Level(
        "Split the backward",
        "The next rank waits for I only. W can wait for a gap, but it holds its memory until then.",
        Task(3, 6, split_backward=True, memory_limit=3),
        makespan=20,
    ),
    Level(
        "One third of the bubble",
        "1F1B would take 33. With the backward split, and no more memory than 1F1B has, it can be much less.",
        Task(4, 8, split_backward=True, memory_limit=4),
        makespan=27,
    ),
    Level(
        "Zero bubble",
        "Between its first start and its last end no rank may wait at all. There is more memory, but not without end.",
        Task(4, 8, split_backward=True, memory_limit=7),
        span=24,
    ),
)


def level_of(number: object) -> Level:
    """Level `number`. Raises SizeError where there is none."""
    if isinstance(number, bool) or not isinstance(number, int) or number not in range(len(LEVELS)):
        raise SizeError(f"level must be a whole number from 0 to {len(LEVELS) - 1}, got {number!r}")
    return LEVELS[number]
