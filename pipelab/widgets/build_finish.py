"""Finish a board: place what is left, move by move, always the one that a rule likes best."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from pipelab.action import Action, Kind
from pipelab.costs import Link
from pipelab.errors import ScheduleError
from pipelab.widgets.build_model import HAIR, Board, Task

_BACK_FIRST = {Kind.B: 0, Kind.I: 0, Kind.F: 1, Kind.W: 2}
Liking = tuple[float, ...]  # the smallest is placed; none for a move that the rule forbids
Rule = Callable[["_Finish", Action], "Liking | None"]


def _forwards_first(state: _Finish, action: Action) -> Liking | None:
    """As GPipe: no backward on a rank before its last forward."""
    if action.kind is not Kind.F and state.forwards_left[state.task.rank_of(action)]:
        return None
    return (state.start(action), _BACK_FIRST[action.kind])


def _backwards_first(state: _Finish, action: Action) -> Liking | None:
    """As 1F1B: a backward as soon as there is one, and no more micro-batches under way than it takes to keep busy."""
    rank, p, v = state.task.rank_of(action), state.task.num_ranks, state.task.stages_per_rank
    enough = p - rank if v == 1 else (v - 1) * p + 2 * (p - 1 - rank) + 1
    if action.kind is Kind.F and state.under_way[rank] >= enough:
        return None
    return (state.start(action), _BACK_FIRST[action.kind], -action.stage)


def _soonest(state: _Finish, action: Action) -> Liking | None:
    """Greedy: whatever can start first, backwards before forwards where both can."""
    return (state.start(action), _BACK_FIRST[action.kind])


RULES: dict[str, Rule] = {
    "all forwards first, as GPipe": _forwards_first,
    "backwards first, as 1F1B": _backwards_first,
    "whatever can start first": _soonest,
}


def finish(board: Board, rule: str) -> Board:
    """`board` with all that was left placed by `rule`, one of RULES. Raises ScheduleError where that gets stuck."""
    return _Finish(board, RULES[rule]).run()


class _Finish:
    """What the rules look at: when ranks are free, what is ready, how much is under way."""

    def __init__(self, board: Board, rule: Rule) -> None:
        self.board, self.task, self.rule = board, board.task, rule
        self.moves = list(board.moves)
        self.hop, self.duration = _hops(self.task), self.task.costs.per_stage(len(self.task.placement))
        spans = board.trace.spans if board.trace else ()
        self.end = {span.action: span.end for span in spans}
        ranks = range(self.task.num_ranks)
        self.free = [max((span.end for span in spans if span.rank == rank), default=0.0) for rank in ranks]
        self.kept = [board.kept(rank) for rank in ranks]
        self.under_way, self.forwards_left = [0 for _ in ranks], [0 for _ in ranks]
        for action in self.task.actions:
            rank, there = self.task.rank_of(action), action in board.placed
            if action.kind is Kind.F:
                self.forwards_left[rank] += not there
            if there and action.kind is not Kind.W:
                self.under_way[rank] += 1 if action.kind is Kind.F else -1
        # what waits for how many others, and for each stage and kind what waits for none
        self.waits = {
            action: sum(source not in board.placed for source in sources)
            for action, sources in self.task.needs.items()
            if action not in board.placed
        }
        self.readers: defaultdict[Action, list[Action]] = defaultdict(list)
        self.ready: defaultdict[tuple[int, Kind], list[int]] = defaultdict(list)
        for action, count in self.waits.items():
            for source in self.task.needs[action]:
                self.readers[source].append(action)
            if not count:
                heappush(self.ready[action.stage, action.kind], action.microbatch)

    def run(self) -> Board:
        while len(self.moves) < len(self.task.actions):
            choices = list(self.choices())
            liked = [(liking, action) for action in choices if (liking := self.rule(self, action)) is not None]
            if liked:
                self.place(min(liked)[1])
            elif choices:  # the rule holds back too much to go on
                self.place(min((self.start(action), action) for action in choices)[1])
            else:
                raise ScheduleError(
                    f"by this rule the board cannot be finished from here under the memory limit of "
                    f"{self.task.memory_limit:.4g}; undo some moves, or take another rule."
                )
        placed = frozenset(self.moves) - self.board.placed
        return Board(self.task, tuple(self.moves), self.board.helped | placed)

    def choices(self) -> Iterator[Action]:
        """What may come next: of every stage and kind the first micro-batch that is ready."""
        limit = self.task.memory_limit
        for (stage, kind), microbatches in self.ready.items():
            if microbatches:
                action = Action(stage, kind, microbatches[0])
                more = self.kept[self.task.rank_of(action)] + 1 / self.task.stages_per_rank
                if kind is not Kind.F or limit is None or more <= limit + HAIR:
                    yield action

    def start(self, action: Action) -> float:
        """When `action` could start. A link's queue is left out: this decides an order, not a time."""
        rank, begin = self.task.rank_of(action), 0.0
        for source in self.task.needs[action]:
            crosses = self.task.rank_of(source) != rank
            begin = max(begin, self.end[source] + (self.hop[min(source.stage, action.stage)] if crosses else 0.0))
        return round(max(begin, self.free[rank]), 9)

    def place(self, action: Action) -> None:
        rank = self.task.rank_of(action)
        self.end[action] = self.free[rank] = self.start(action) + self.duration[action.kind][action.stage]
        heappop(self.ready[action.stage, action.kind])
        if action.kind is Kind.F:
            self.forwards_left[rank] -= 1
            self.under_way[rank] += 1
            self.kept[rank] += 1 / self.task.stages_per_rank
        if action.kind in (Kind.B, Kind.I):
            self.under_way[rank] -= 1
        if action.kind in (Kind.B, Kind.W):
            self.kept[rank] -= 1 / self.task.stages_per_rank
        self.moves.append(action)
        for reader in self.readers[action]:
            self.waits[reader] -= 1
            if not self.waits[reader]:
                heappush(self.ready[reader.stage, reader.kind], reader.microbatch)


def _hops(task: Task) -> tuple[float, ...]:
    """The delay between each stage and the next."""
    comm, weights = task.costs.comm, task.costs.bytes_per_stage(len(task.placement))
    if isinstance(comm, Link):
        return tuple(map(comm.seconds, weights))
    return (comm,) * len(weights)
