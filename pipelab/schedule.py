"""A schedule: for every rank, in which order it works through its actions. Pure data, no times.

Times are a result, so they stand in a Trace. A schedule may be wrong (a book needs wrong ones too): whether it can run
is the business of `pipelab.validate`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pipelab.action import Action, Kind
from pipelab.errors import ScheduleError, positive_integer

_HEADER = re.compile(
    r"(?P<name>.+): \d+ ranks?, (?P<microbatches>\d+) micro-batch(?:es)?, stages on ranks (?P<placement>[\d ]+)"
)
_ROW = re.compile(r"(?:rank\s+)?(?P<rank>\d+)\s*:\s*(?P<actions>.*)")
_OVERLAPPED = re.compile(r"\((?P<pair>[^)]*)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"\d+(?:(?:SEND|RECV)_[FB]\d+|UNSHARD\d*|RESHARD\d*|REDUCE_GRAD\d*)")
_PLAUSIBLE = 100_000  # stages times micro-batches, of a schedule that has fewer actions than that


@dataclass(frozen=True, repr=False)
class Schedule:
    """The order of actions on every rank.

    `ranks[r]` is rank r's tuple of actions; `placement[s]` is the rank that holds stage s, read off the orders where
    it is not given; `num_microbatches` is one more than the largest micro-batch named, where it is not given.
    Two schedules with the same orders are equal, whatever they are called.
    """

    name: str = field(compare=False)
    ranks: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...] = ()
    num_microbatches: int = 0

    def __post_init__(self) -> None:
        ranks = _orders(self.name, self.ranks)
        given = self.num_microbatches or 1 + max(a.microbatch for order in ranks for a in order)
        microbatches = positive_integer("num_microbatches", given)
        placement = tuple(self.placement or ())
        stages = len(placement) or 1 + max(a.stage for order in ranks for a in order)
        if stages * microbatches > max(_PLAUSIBLE, sum(map(len, ranks))):
            raise ScheduleError(
                f"schedule {self.name!r} has {sum(map(len, ranks)):,} actions for {stages:,} stages and "
                f"{microbatches:,} micro-batches: is a number mistyped?"
            )
        holders = (positive_integer(f"the rank of stage {s}", r, minimum=0) for s, r in enumerate(placement))
        object.__setattr__(self, "ranks", ranks)
        object.__setattr__(self, "placement", tuple(holders) or _placement_of(self.name, ranks))
        object.__setattr__(self, "num_microbatches", microbatches)

    @property
    def num_ranks(self) -> int:
        """How many processes the schedule needs."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into, over all ranks."""
        return len(self.placement)

    @property
    def num_actions(self) -> int:
        """Actions over all ranks."""
        return sum(map(len, self.ranks))

    @cached_property
    def stages_per_rank(self) -> int:
        """The most stages that one rank holds: 1, or more where stages are virtual."""
        return max(self.placement.count(rank) for rank in set(self.placement))

    @cached_property
    def splits_backward(self) -> bool:
        """Whether some backward runs as two actions, I and W."""
        return any(a.kind is Kind.I for order in self.ranks for a in order)

    @cached_property
    def has_updates(self) -> bool:
        """Whether weights are updated on the way, by actions U, and not once after all of them."""
        return any(a.kind is Kind.U for order in self.ranks for a in order)

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, smallest first."""
        return tuple(stage for stage, holder in enumerate(self.placement) if holder == rank)

    def is_last_stage(self, stage: int) -> bool:
        """Whether `stage` computes the loss."""
        return stage == self.num_stages - 1

    # --- text: a header, then one row a rank ------------------------------------------------------------------------

    def _header(self) -> str:
        ranks, batches = self.num_ranks, self.num_microbatches
        return (
            f"{self.name}: {ranks} rank{'s' * (ranks != 1)}, {batches} micro-batch{'es' * (batches != 1)}, "
            f"stages on ranks {' '.join(map(str, self.placement))}"
        )

    def to_text(self) -> str:
        """The schedule as text that `from_text` reads back: a header, then `rank 0: 0F0 0F1 0B0 0B1` and so on."""
        rows = (f"rank {rank}: {' '.join(map(str, order))}" for rank, order in enumerate(self.ranks))
        return "\n".join([self._header(), *rows]) + "\n"

    @classmethod
    def from_text(cls, text: str, *, name: str = "from text", num_microbatches: int = 0) -> Schedule:
        """The schedule that `text` describes: one row a rank, `rank 0: 0F0 0B0` or just `0F0 0B0`; `#` opens a comment.

        Without `to_text`'s header, stages, ranks and micro-batches are read off the actions. Raises ScheduleError, with
        line and place, on a row out of order or a word that is no action. It does not judge the order: `validate` does.
        """
        placement: tuple[int, ...] = ()
        rows: list[tuple[Action, ...]] = []
        for number, raw in enumerate(text.splitlines(), start=1):
            line = raw.split("#")[0].strip()
            if not line:
                continue
            header = _HEADER.fullmatch(line)
            if header and not rows:
                name, num_microbatches = header["name"], int(header["microbatches"])
                placement = tuple(map(int, header["placement"].split()))
                continue
            row = _ROW.fullmatch(line)
            if row and int(row["rank"]) != len(rows):
                raise ScheduleError(
                    f"line {number}: expected the row of rank {len(rows)}, found that of rank {row['rank']}"
                )
            words = (row["actions"] if row else line).replace(",", " ").split()
            rows.append(tuple(_parse(word, f"line {number}, position {i}") for i, word in enumerate(words)))
        if not rows:
            raise ScheduleError("the text holds no schedule: write one row a rank, as in 'rank 0: 0F0 0B0'")
        return cls(name, tuple(rows), placement, num_microbatches)

    # --- CSV: torch.distributed.pipelining's compute-only form ------------------------------------------------------

    def to_csv(self, path: str | Path) -> None:
        """Write one row a rank, one action a cell, as `_PipelineScheduleRuntime._load_csv` reads it; U is left out."""
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerows([str(a) for a in order if a.kind is not Kind.U] for order in self.ranks)

    @classmethod
    def from_csv(cls, path: str | Path, *, name: str | None = None, num_microbatches: int = 0) -> Schedule:
        """Read one row a rank, as torch.distributed.pipelining dumps it.

        Empty cells (idle slots) and communications of a lowered dump are dropped; an overlapped pair becomes F, then B.
        Raises ScheduleError, with row and column, on a cell that is none of these.
        """
        try:
            with Path(path).open(newline="", encoding="utf-8-sig") as file:
                grid = list(csv.reader(file))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ScheduleError(f"{path} is no CSV text: {error}") from None
        while grid and not any(cell.strip() for cell in grid[-1]):
            grid.pop()  # blank lines at the end; one in the middle is a rank without work, which validate names
        if not grid:
            raise ScheduleError(f"{path} holds no schedule: expected one row a rank, one action a cell, as in 0F0,0B0")
        rows = []
        for r, row in enumerate(grid):
            actions: list[Action] = []
            for c, cell in enumerate(row):
                actions += _parse_cell(cell.strip(), f"{path}: row {r}, column {c}")
            rows.append(tuple(actions))
        return cls(name or Path(path).stem, tuple(rows), num_microbatches=num_microbatches)

    # --- how it shows itself ----------------------------------------------------------------------------------------

    def table(self, mark: tuple[int, int] | Action | None = None) -> str:
        """The orders as aligned text, ranks from the top; `mark` (rank, position) or an action stands in [brackets]."""

        def cell(rank: int, position: int, action: Action) -> str:
            marked = mark == action if isinstance(mark, Action) else mark == (rank, position)
            return f"[{action}]" if marked else f" {action} "

        cells = [[cell(r, i, a) for i, a in enumerate(order)] for r, order in enumerate(self.ranks)]
        width = max((len(text) for row in cells for text in row), default=0)
        label = len(f"rank {self.num_ranks - 1}")
        return "\n".join(
            f"{f'rank {r}':<{label}}  {''.join(f'{text:<{width}}' for text in row)}".rstrip()
            for r, row in enumerate(cells)
        )

    def __str__(self) -> str:
        return f"{self._header()}\n{self.table()}"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """In a notebook a schedule is the picture of its orders, drawn with F = I = W = 1; text where it cannot run."""
        from pipelab.captions import headline
        from pipelab.gantt import show
        from pipelab.simulate import simulate

        try:
            trace = simulate(self)
        except ScheduleError:
            return {"text/plain": repr(self)}
        return show(trace, repr(self), title=headline(trace, "F = I = W = 1"))

    def __repr__(self) -> str:
        return f"<Schedule {self._header()}; {self.num_actions} actions>"


Shape = Literal["loop", "v"]


def placed(num_ranks: int, stages_per_rank: int, shape: Shape = "loop") -> tuple[int, ...]:
    """The rank of every stage: in a "loop" stage s is on rank s % p, in a "v" every other turn runs back up the ranks.

    Raises ScheduleError for another shape.
    """
    if shape not in ("loop", "v"):
        raise ScheduleError(f"stages are placed in a 'loop' or a 'v', got {shape!r}")
    down = range(num_ranks)
    turns = (down if shape == "loop" or turn % 2 == 0 else reversed(down) for turn in range(stages_per_rank))
    return tuple(rank for turn in turns for rank in turn)


def _orders(name: str, ranks: Iterable[Iterable[Action]]) -> tuple[tuple[Action, ...], ...]:
    """`ranks` as tuples; ScheduleError where they hold something else than actions, or nothing."""
    try:
        orders = tuple(tuple(order) for order in ranks)
    except TypeError:
        raise ScheduleError(f"schedule {name!r} takes a row of actions for every rank, got {ranks!r}") from None
    if not any(orders):
        raise ScheduleError(f"schedule {name!r} has no actions")
    for rank, order in enumerate(orders):
        for position, found in enumerate(order):
            if not _is_action(found):
                shown = tuple(found) if isinstance(found, Action) else found
                raise ScheduleError(
                    f"schedule {name!r}, rank {rank}, position {position}: expected an Action of two ints from 0 and a "
                    f"Kind, as in Action(0, Kind.F, 0), got {shown!r}; Schedule.from_text reads 0F0"
                )
    return orders


def _is_action(found: Action) -> bool:
    return (
        isinstance(found, Action)
        and isinstance(found.kind, Kind)
        and isinstance(found.stage, int)
        and isinstance(found.microbatch, int)
        and found.stage >= 0 <= found.microbatch
    )


def _placement_of(name: str, ranks: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Which rank holds each stage: the first one that names it (validate names the others)."""
    holder: dict[int, int] = {}
    for rank, order in enumerate(ranks):
        for action in order:
            holder.setdefault(action.stage, rank)
    missing = sorted(set(range(max(holder) + 1)) - set(holder))
    if missing:
        raise ScheduleError(
            f"schedule {name!r} has actions up to stage {max(holder)} but none for "
            f"stage{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}; stages count from 0 without gaps"
        )
    return tuple(holder[stage] for stage in range(len(holder)))


def _parse(word: str, where: str) -> Action:
    try:
        return Action.from_text(word)
    except ScheduleError as error:
        raise ScheduleError(f"{where}: {error}") from None


def _parse_cell(cell: str, where: str) -> Iterable[Action]:
    if not cell or _COMMUNICATION.fullmatch(cell):
        return ()
    overlapped = _OVERLAPPED.fullmatch(cell)
    words = overlapped["pair"].split(";") if overlapped else [cell]
    return tuple(_parse(word, where) for word in words)
