"""The builder: place actions by hand, see what they make, and run it. What a move means stands in build_model."""

from __future__ import annotations

from functools import partial
from html import escape
from typing import Any

import ipywidgets as W

from pipelab import palette
from pipelab.action import Kind
from pipelab.captions import counted
from pipelab.costs import Costs
from pipelab.errors import ScheduleError, SizeError
from pipelab.schedule import Schedule
from pipelab.trace import Trace
from pipelab.widgets.build_finish import RULES, finish
from pipelab.widgets.build_levels import LEVELS, Level, level_of
from pipelab.widgets.build_model import Board, Task, read
from pipelab.widgets.build_score import best_known, score
from pipelab.widgets.run_it import RUNNING, run_it
from pipelab.widgets.stored import Stored
from pipelab.widgets.svg import SCROLLS, gantt_svg

_LINE = {"flex_flow": "row wrap", "align_items": "center"}
_AUTO, _HALF = {"width": "auto"}, {"width": "22em", "max_width": "98%"}
_OWN = -1  # in the list of levels; None would show nothing
_CSS = "".join(
    f".widget-button.pl-legal.pl-{kind.value} {{background: {palette.COLOURS[kind]}; "
    f"color: {palette.ink_on(palette.COLOURS[kind])}; font-weight: 600}}"
    for kind in Kind
)


def build(
    num_ranks: int | None = None,
    num_microbatches: int | None = None,
    *,
    stages_per_rank: int = 1,
    split_backward: bool = False,
    costs: Costs | None = None,
    memory_limit: float | None = None,
    level: int | None = None,
) -> Builder:
    """A board for building a schedule move by move: click a move, or type it, as in `2F0`. Make it a cell's last line.

    Stage s is on rank s % num_ranks. `costs` are those of one stage, as `simulate` takes them; `memory_limit` is in
    micro-batches of a whole rank; with `split_backward` there are I and W in place of B. `level`, 0 to 9, is a task
    with a goal, in place of all that; `build()` is level 0.
    Raises a PipelabError for sizes, costs or a limit that cannot be, and for a level beside sizes of one's own.
    """
    if num_ranks is None and num_microbatches is None:
        return Builder(level_of(0 if level is None else level).task, 0 if level is None else level)
    if level is not None:
        raise SizeError(f"level {level} brings its own task: write build(level={level}), or leave level out")
    if num_ranks is None or num_microbatches is None:
        raise SizeError("build needs both num_ranks and num_microbatches, or a level")
    task = Task(
        num_ranks, num_microbatches, stages_per_rank, split_backward, Costs() if costs is None else costs, memory_limit
    )
    return Builder(task)


class Builder(Stored, W.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """The widget that `build` makes: `board` is what is placed, `schedule` the finished schedule."""

    def __init__(self, task: Task, level: int | None = None) -> None:
        self.board, self._own = Board(task), task
        names = [(f"{number}: {one.title}", number) for number, one in enumerate(LEVELS)]
        own = [("a board of your own", _OWN)] if level is None else []
        self.levels = W.Dropdown(
            options=own + names, value=_OWN if level is None else level, description="level", layout=_HALF
        )
        self.task, self.says, self.score = W.HTML(), W.HTML(), W.HTML()
        self.picture, self.export, self.ran = (W.HTML(layout=SCROLLS) for _ in range(3))
        for part, name in [(self.picture, "board"), (self.says, "says"), (self.score, "score"), (self.ran, "ran")]:
            part.add_class(f"pl-{name}")
        self.moves: dict[tuple[int, Kind], Any] = {}
        self.rows = W.VBox()
        self.typed = W.Text(
            description="move",
            placeholder="2F0, then Enter",
            continuous_update=False,
            layout={"width": "18em", "max_width": "98%"},
        )
        self.undo = W.Button(description="undo", icon="undo", layout=_AUTO)
        self.again = W.Button(description="start again", icon="refresh", layout=_AUTO)
        self.rule = W.Dropdown(options=list(RULES), description="rule", layout=_HALF)
        self.finish = W.Button(description="finish for me", icon="fast-forward", layout=_AUTO)
        self.clock = W.Dropdown(
            options=[("emulated accelerators", True), ("this machine's own speed", False)],
            description="run on",
            layout=_HALF,
        )
        self.run = W.Button(description="run it for real", icon="play", layout=_AUTO)
        hand = W.Box([self.typed, self.undo, self.again, self.rule, self.finish], layout=_LINE)
        after = W.Box([self.clock, self.run], layout=_LINE)
        parts = [self.levels, self.task, self.picture, self.says, self.rows, hand, self.score, after]
        super().__init__([*parts, self.ran, self.export])
        self.add_class("pl-build")
        self.levels.observe(self._choose_level, names="value")
        self.typed.observe(self._type, names="value")
        self.undo.on_click(lambda _: self._take(self.board.undo()))
        self.again.on_click(lambda _: self._take(Board(self.board.task)))
        self.finish.on_click(self._finish)
        self.run.on_click(self._run)
        self._lay_out(self.board)

    @property
    def schedule(self) -> Schedule:
        """The schedule on the board. Raises ScheduleError while something is left to place."""
        if not self.board.complete or self.board.trace is None:
            left = len(self.board.task.actions) - len(self.board.moves)
            raise ScheduleError(f"the board is not finished: {counted(left, 'move')} left to place")
        return self.board.trace.schedule

    def place(self, moves: str) -> None:
        """Place the moves that `moves` names, as typed in the widget; what is illegal is told, and ends it."""
        board = self.board
        try:
            for action, rank in read(moves):
                board = board.place(action, rank)
        except ScheduleError as error:
            self._take(board, f"Not possible: {error}")
        else:
            self._take(board)

    # --- what the controls do ----------------------------------------------------------------------------------------

    def _choose_level(self, _: Any) -> None:
        level = self._level
        self._lay_out(Board(self._own if level is None else level.task))

    def _type(self, change: Any) -> None:
        if change["new"].strip():
            self.place(change["new"])
            self.typed.value = ""

    def _click(self, stage: int, kind: Kind, _: Any) -> None:
        action = self.board.next_of(stage, kind)
        if action is not None:
            self.place(str(action))

    def _finish(self, _: Any) -> None:
        try:
            self._take(finish(self.board, self.rule.value))
        except ScheduleError as error:
            self._take(self.board, f"Not possible: {error}")

    def _run(self, _: Any) -> None:
        self.ran.value, self.run.disabled = RUNNING, True
        try:
            costs = self.board.task.costs
            self.ran.value = run_it(self.schedule, costs, paced=self.clock.value, pattern=f"i{self.ran.model_id}")
        finally:
            self.run.disabled = not self.board.complete

    # --- what they show ----------------------------------------------------------------------------------------------

    @property
    def _level(self) -> Level | None:
        return None if self.levels.value == _OWN else LEVELS[self.levels.value]

    def _lay_out(self, board: Board) -> None:
        """A row of buttons a rank: one for each of its stages and kinds."""
        task, rows = board.task, []
        for button in self.moves.values():
            button.close()
        self.moves = {}
        for rank in range(task.num_ranks):
            row: list[Any] = [W.Label(f"rank {rank}", layout={"width": "4.5em"})]
            for stage in range(rank, len(task.placement), task.num_ranks):
                for kind in task.kinds:
                    button = self.moves[stage, kind] = W.Button(layout={"width": "5em"})
                    button.add_class(f"pl-{kind.value}")
                    button.on_click(partial(self._click, stage, kind))
                    row.append(button)
            rows.append(W.Box(row, layout=_LINE))
        self.rows.children = rows
        self.task.value = f"<style>{_CSS}</style><p>{escape(self._task_in_words(task))}</p>"
        self._take(board)

    def _task_in_words(self, task: Task) -> str:
        level = self._level
        stages = f" with {task.stages_per_rank} stages each" if task.stages_per_rank > 1 else ""
        words = f"{counted(task.num_ranks, 'rank')}{stages}, {counted(task.num_microbatches, 'micro-batch', 'es')}."
        if task.memory_limit is not None:
            words += f" A rank may keep {task.memory_limit:g} of them."
        return words if level is None else f"{words} {level.hint} {level.goal}"

    def _take(self, board: Board, says: str | None = None) -> None:
        """Show `board`, and a sentence: what is wrong, or what its last move does."""
        if board is not self.board:
            self.ran.value = ""
        self.board = board
        self.says.value = f'<p role="status">{escape(board.told() if says is None else says)}</p>'
        self.picture.value = self._drawn(board)
        for (stage, kind), button in self.moves.items():
            self._show_move(button, stage, kind)
        self.undo.disabled = self.again.disabled = not board.moves
        self.finish.disabled, self.run.disabled = board.complete, not board.complete
        self.score.value, self.export.value = "", ""
        if board.complete:
            level = self._level
            lines = ([] if level is None else [level.verdict(board)]) + [" ".join(score(board))]
            self.score.value = "".join(f'<p style="line-height: 1.6">{escape(line)}</p>' for line in lines)
            self.export.value = exported(self.schedule)

    def _drawn(self, board: Board) -> str:
        """The Gantt so far, on an axis as long as the best known schedule, so that bars keep their place."""
        trace = board.trace
        if trace is None or not trace.makespan:
            return ""
        until = best_known(board.task).makespan
        return gantt_svg(trace, pattern=f"i{self.picture.model_id}", until=until)

    def _show_move(self, button: Any, stage: int, kind: Kind) -> None:
        action = self.board.next_of(stage, kind)
        reason = None if action is None else self.board.why_not(action)
        button.description = f"{stage}{kind.value} ✓" if action is None else str(action)
        button.disabled = action is None
        button.tooltip = "nothing is left" if action is None else reason or f"place {action}"
        change = button.add_class if action is not None and reason is None else button.remove_class
        change("pl-legal")

    @property
    def still(self) -> Trace | None:  # type: ignore[override]
        """What the notebook's file keeps a picture of."""
        trace = self.board.trace
        return trace if trace is not None and trace.makespan else None

    def __repr__(self) -> str:
        task = self.board.task
        sizes = f"{task.num_ranks}, {task.num_microbatches}"
        return f"build({sizes}): {len(self.board.moves)} of {len(task.actions)} moves placed"


def exported(schedule: Schedule) -> str:
    """The schedule as `Schedule.from_text` reads it, and as torch's CSV, each folded, as HTML."""
    csv = "\n".join(",".join(map(str, order)) for order in schedule.ranks)
    forms = {"as text, for Schedule.from_text": schedule.to_text(), "as CSV, for torch.distributed.pipelining": csv}
    return "".join(
        f"<details><summary>{name}</summary><pre>{escape(text)}</pre></details>" for name, text in forms.items()
    )
