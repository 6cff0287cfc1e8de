"""The board of the builder: what is placed, what may come next, and why something may not. No widget in here.

A move is legal where all that it needs is placed already, so whatever is on the board can run, and its times are known:
they depend on nothing that is placed later.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from pipelab.action import Action, Kind
from pipelab.costs import Costs, or_unit
from pipelab.dependencies import graph
from pipelab.errors import ScheduleError, amount, positive_integer
from pipelab.schedule import Schedule
from pipelab.simulate import simulate
from pipelab.trace import Trace

HAIR = 1e-9  # by which sums of times and of parts may be off
_MOVE = re.compile(r"\d{1,6}[FBIWU]\d{1,6}", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Task:
    """What is to be built. Stage s is on rank s % num_ranks; `costs` are those of one stage, as `simulate` takes them.

    With `split_backward` every backward is I and W, else it is B. `memory_limit` is in micro-batches of a whole rank.
    Raises a PipelabError for a size below 1, costs for another number of stages, or a limit below 1.
    """

    num_ranks: int
    num_microbatches: int
    stages_per_rank: int = 1
    split_backward: bool = False
    costs: Costs = field(default_factory=Costs)
    memory_limit: float | None = None

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches", "stages_per_rank"):
            positive_integer(name, getattr(self, name))
        or_unit(self.costs).per_stage(len(self.placement))
        self.costs.bytes_per_stage(len(self.placement))
        if self.memory_limit is not None and amount("memory_limit", self.memory_limit) < 1:
            raise ScheduleError(
                f"nothing can be built under memory_limit={self.memory_limit!r}: a rank keeps a whole micro-batch "
                "between its forward and its backward, so give at least 1, or None for no limit"
            )

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of every stage."""
        return tuple(range(self.num_ranks)) * self.stages_per_rank

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of action that there are."""
        return (Kind.F, Kind.I, Kind.W) if self.split_backward else (Kind.F, Kind.B)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All that has to be placed, in an order that can run: forwards, then backwards."""
        stages = range(len(self.placement))
        passes = [(stage, (Kind.F,)) for stage in stages] + [(stage, self.kinds[1:]) for stage in reversed(stages)]
        return tuple(
            Action(stage, kind, k) for stage, kinds in passes for k in range(self.num_microbatches) for kind in kinds
        )

    @cached_property
    def needs(self) -> dict[Action, tuple[Action, ...]]:
        """What every action needs: of its own stage, and of a neighbouring one."""
        g = graph(self.schedule("all", self.actions))
        pairs = zip(g.own, g.neighbour, strict=True)
        return {
            action: tuple(g.actions[source] for source in sources if source >= 0)
            for action, sources in zip(g.actions, pairs, strict=True)
        }

    def rank_of(self, action: Action) -> int:
        """The rank that does `action`."""
        return action.stage % self.num_ranks

    def schedule(self, name: str, moves: tuple[Action, ...]) -> Schedule:
        """The schedule whose ranks do `moves` in their order."""
        ranks: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        for action in moves:
            ranks[self.rank_of(action)].append(action)
        return Schedule(name, tuple(map(tuple, ranks)), self.placement, self.num_microbatches)


@dataclass(frozen=True)
class Board:
    """What is placed so far, in the order in which it was placed; `helped` are the moves that a rule has placed."""

    task: Task
    moves: tuple[Action, ...] = ()
    helped: frozenset[Action] = frozenset()

    @cached_property
    def placed(self) -> frozenset[Action]:
        """The moves, for looking up."""
        return frozenset(self.moves)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to place."""
        return len(self.moves) == len(self.task.actions)

    @cached_property
    def trace(self) -> Trace | None:
        """The moves with their times; None where there are none yet."""
        if not self.moves:
            return None
        rest = tuple(action for action in self.task.actions if action not in self.placed)
        whole = simulate(self.task.schedule("built", self.moves + rest), self.task.costs)
        if self.complete:
            return whole
        return Trace(
            self.task.schedule("built so far", self.moves),
            tuple(span for span in whole.spans if span.action in self.placed),
            tuple(message for message in whole.messages if message.reader in self.placed),
        )

    def kept(self, rank: int) -> float:
        """The activations that `rank` keeps after its last move, in micro-batches of a whole rank."""
        kinds = Counter(action.kind for action in self.moves if self.task.rank_of(action) == rank)
        return (kinds[Kind.F] - kinds[Kind.B] - kinds[Kind.W]) / self.task.stages_per_rank

    def next_of(self, stage: int, kind: Kind) -> Action | None:
        """The first micro-batch that `stage` can do `kind` for, else the first that is left; None after the last."""
        left = [a for k in range(self.task.num_microbatches) if (a := Action(stage, kind, k)) not in self.placed]
        return next((action for action in left if not self._missing(action)), left[0] if left else None)

    def moves_of(self, rank: int) -> tuple[Action, ...]:
        """The legal next moves of `rank`, one for each of its stages and kinds that has one."""
        stages = range(rank, len(self.task.placement), self.task.num_ranks)
        found = (self.next_of(stage, kind) for stage in stages for kind in self.task.kinds)
        return tuple(action for action in found if action is not None and self.why_not(action) is None)

    def place(self, action: Action, rank: int | None = None) -> Board:
        """The board with one more move. Raises ScheduleError, in one sentence, where it is illegal."""
        reason = self.why_not(action, rank)
        if reason is not None:
            raise ScheduleError(f"{reason}{self._way_out(action)}.")
        return Board(self.task, (*self.moves, action), self.helped)

    def undo(self) -> Board:
        """The board without its last move."""
        return Board(self.task, self.moves[:-1], self.helped - set(self.moves[-1:]))

    def told(self) -> str:
        """What the last move does, and what can still be done, in words."""
        if self.trace is None:
            return "Nothing is placed yet."
        action = self.moves[-1]
        row = self.trace.by_rank[self.task.rank_of(action)]
        waited = row[-1].start - (row[-2].end if len(row) > 1 else self.trace.start)
        sentence = f"{action} runs on rank {row[-1].rank} from {row[-1].start:.4g} to {row[-1].end:.4g}"
        if waited > HAIR:
            sentence += f"; before it the rank waits for {waited:.4g}"
        if self.complete:
            return f"{sentence}. Everything is placed."
        if not any(map(self.moves_of, range(self.task.num_ranks))):
            return f"{sentence}. Now the memory limit leaves no move: undo some."
        return f"{sentence}."

    # --- why not -----------------------------------------------------------------------------------------------------

    def why_not(self, action: Action, rank: int | None = None) -> str | None:
        """Why `action` may not come next (on `rank`, where one was named); None where it may."""
        task, (stage, kind, microbatch) = self.task, action
        if stage >= len(task.placement):
            return f"{action} names stage {stage}, but there are {len(task.placement)} (from 0)"
        if microbatch >= task.num_microbatches:
            return f"{action} names micro-batch {microbatch}, but there are {task.num_microbatches} (from 0)"
        here = task.rank_of(action)
        if rank not in (None, here):
            return f"{action} is of stage {stage}, which is on rank {here}, not on rank {rank}"
        if kind not in task.kinds:
            instead = " and ".join(f"{stage}{kind}{microbatch}" for kind in task.kinds[1:])
            return f"{action} is no move here, where a backward is {instead}"
        if action in self.placed:
            order = [move for move in self.moves if task.rank_of(move) == here]
            return f"{action} is on rank {here} already, at position {order.index(action)}"
        missing = self._missing(action)
        if missing:
            return f"{action} needs {self._described(action, missing[0])}, which is not placed yet"
        limit, more = task.memory_limit, 1 / task.stages_per_rank
        if kind is Kind.F and limit is not None and self.kept(here) + more > limit + HAIR:
            return (
                f"{action} would make rank {here} keep {self.kept(here) + more:.4g} micro-batches, "
                f"but the memory limit is {limit:.4g}"
            )
        return None

    def _missing(self, action: Action) -> tuple[Action, ...]:
        return tuple(source for source in self.task.needs[action] if source not in self.placed)

    def _described(self, action: Action, source: Action) -> str:
        """`source` as what `action` needs it for."""
        rank = self.task.rank_of(source)
        if source.stage == action.stage:
            what = "forward" if source.kind is Kind.F else "input gradient"
            return f"its own {what} {source} on rank {rank}"
        what = "activation" if source.kind is Kind.F else "gradient"
        return f"the {what} that {source} makes on rank {rank}"

    def _way_out(self, action: Action) -> str:
        """What to do first, and when that would be done."""
        if action not in self.task.needs or action in self.placed:
            return ""
        first = action
        while missing := self._missing(first):
            first = missing[0]
        if first == action or self.why_not(first) is not None:
            return ""
        board = Board(self.task, (*self.moves, first))
        assert board.trace is not None
        end = next(span.end for span in board.trace.spans if span.action == first)
        return f"; {first} can be next, and would end at {end:.4g}"


def read(text: str) -> Iterator[tuple[Action, int | None]]:
    """The moves that `text` names, each with its rank where that is named: `2F0`, `2F0 2F1`, or `rank 2: 2F0 2F1`.

    Raises ScheduleError for a word that is no move, when it comes to it.
    """
    row, colon, words = text.rpartition(":")
    name = row.lower().removeprefix("rank").strip()
    for word in words.replace(",", " ").split():
        if not _MOVE.fullmatch(word) or (colon and not name.isdecimal()):
            raise ScheduleError(
                f"{text.strip() if colon else word!r} is no move: write stage, kind and micro-batch, as in 2F0; "
                "or several, with their rank, as in rank 2: 2F0 2F1."
            )
        yield Action.from_text(word.upper()), int(name) if colon else None
