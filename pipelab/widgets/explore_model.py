"""What the explorer shows for what its controls say: settings in, trace and sentences out. No widget in here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from pipelab import theory
from pipelab.action import Kind
from pipelab.captions import counted
from pipelab.costs import Costs
from pipelab.errors import FormulaError, PipelabError, ScheduleError, amount, positive_integer
from pipelab.memory import memory_curve, peak_activations
from pipelab.schedule import Schedule
from pipelab.schedules import SCHEDULES, search, takes_stages
from pipelab.simulate import simulate
from pipelab.trace import Trace

CHOICES = (*SCHEDULES, "search")
# the model that is shown, and run: Linear layers of one width, a dozen a rank or nearly, the same number in every stage
LAYERS_A_RANK, WIDTH, SAMPLES, BYTES_A_NUMBER = 12, 64, 4, 4


@dataclass(frozen=True)
class Settings:
    """What the controls say. F, I, W are the times of one whole rank (B is I + W), `delay` that of a hop between ranks.

    `stages_per_rank` counts where the schedule has a choice: see `has_virtual_stages`. With `remat` forwards run again
    before their backwards. `memory_limit` is in micro-batches of a whole rank, 0 for none; only "search" keeps to it.
    Raises a PipelabError for an unknown schedule, a size below 1, or a time that is none.
    """

    schedule: str = "one_f_one_b"
    num_ranks: int = 4
    num_microbatches: int = 8
    stages_per_rank: int = 2
    F: float = 1.0
    I: float = 1.0  # noqa: E741
    W: float = 1.0
    delay: float = 0.0
    remat: bool = False
    memory_limit: float = 0.0

    def __post_init__(self) -> None:
        if self.schedule not in CHOICES:
            raise ScheduleError(f"there is no schedule {self.schedule!r}; choose one of {', '.join(CHOICES)}")
        amount("memory_limit", self.memory_limit)
        if not isinstance(self.remat, bool):
            raise ScheduleError(f"remat must be True or False here: forwards run again or not; got {self.remat!r}")
        for name in ("num_ranks", "num_microbatches", "stages_per_rank"):
            positive_integer(name, getattr(self, name))
        self.costs  # noqa: B018  Costs judges times

    @property
    def costs(self) -> Costs:
        """The costs of one whole rank."""
        return Costs(F=self.F, I=self.I, W=self.W, comm=self.delay)


@dataclass(frozen=True)
class View:
    """What there is to see: a trace, or None and one sentence that says why not."""

    trace: Trace | None
    sentences: tuple[str, ...]


def look(settings: Settings) -> View:
    """The view of `settings`. Never raises a PipelabError: what cannot be drawn is the view's one sentence."""
    try:
        trace = predicted(settings)
        return View(trace, (_speed(trace), _formula(settings, trace.schedule), _memory(trace, settings)))
    except PipelabError as error:
        return View(None, (f"Not this way: {' '.join(str(error).split())}.",))


def predicted(settings: Settings) -> Trace:
    """The schedule of `settings`, simulated. Raises a PipelabError where there is none with these numbers."""
    schedule = build(settings)
    costs = settings.costs.split(schedule.stages_per_rank)
    return simulate(schedule, costs, remat="early" if settings.remat else False)


def has_virtual_stages(schedule: str) -> bool:
    """Whether the schedule of that name lets one choose how many stages a rank holds."""
    return schedule in SCHEDULES and takes_stages(schedule)


def build(settings: Settings) -> Schedule:
    """The schedule that `settings` name. Raises a PipelabError where there is none with these numbers."""
    if settings.schedule == "search":
        limit = settings.memory_limit or settings.num_microbatches
        return search(settings.num_ranks, settings.num_microbatches, settings.costs, memory_limit=limit)
    v = settings.stages_per_rank if has_virtual_stages(settings.schedule) else None
    return _built(settings.schedule, settings.num_ranks, settings.num_microbatches, v)


@lru_cache(maxsize=64)  # a move of F, I, W or delay leaves the order, and what was worked out for it
def _built(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None) -> Schedule:
    if stages_per_rank is None:
        return SCHEDULES[name](num_ranks, num_microbatches)
    return SCHEDULES[name](num_ranks, num_microbatches, stages_per_rank=stages_per_rank)


def layers_per_stage(schedule: Schedule) -> int:
    """How many layers of the shown model a stage of `schedule` has."""
    return max(1, LAYERS_A_RANK // schedule.stages_per_rank)


@dataclass(frozen=True)
class Place:
    """Where a micro-batch is: at a `stage` on its way forward or back, `working` or waiting; None before and after."""

    stage: int | None
    forward: bool
    working: bool


def places(trace: Trace, time: float) -> tuple[Place, ...]:
    """Where every micro-batch of `trace` is at `time`: its forwards and backwards count, W does not."""
    stages, m = trace.schedule.num_stages, trace.schedule.num_microbatches
    reached = [(-1, False)] * m  # the last station that has begun, of forwards 0 .. S - 1 and backwards S - 1 .. 0
    for span in trace.spans:
        stage, kind, k = span.action
        if span.start <= time and not span.recompute and kind in (Kind.F, Kind.B, Kind.I):
            station = stage if kind is Kind.F else 2 * stages - 1 - stage
            reached[k] = max(reached[k], (station, time < span.end))

    def place(station: int, working: bool) -> Place:
        here = station if working else station + 1  # where it works, or waits to work
        if station < 0 or here == 2 * stages:
            return Place(None, station < 0, working)
        return Place(min(here, 2 * stages - 1 - here), here < stages, working)

    return tuple(place(*one) for one in reached)


# --- sentences -------------------------------------------------------------------------------------------------------


def _speed(trace: Trace) -> str:
    ranks, bubble = counted(trace.num_ranks, "rank"), f"{100 * trace.bubble_fraction:.1f} %"
    alone = sum(map(trace.busy, range(trace.num_ranks)))
    need = f"{ranks} need {trace.makespan:.4g}, one alone would need {alone:.4g}"
    return f"{need}: {alone / trace.makespan:.2f} times as fast. The bubble is {bubble} of makespan × {ranks}."


def _formula(settings: Settings, schedule: Schedule) -> str:
    """The bubble's closed form with the numbers in it; with a delay the makespan's, which is the shorter of the two."""
    if settings.remat:
        return "There is no closed form here for a schedule that recomputes its forwards."
    quantity = "makespan" if settings.delay else "bubble"
    family = theory.makespan if settings.delay else theory.bubble_fraction
    given = {
        "p": schedule.num_ranks,
        "m": schedule.num_microbatches,
        "v": schedule.stages_per_rank,
        "F": settings.F,
        "I": settings.I,
        "W": settings.W,
        "B": settings.I + settings.W,
        "c": settings.delay,
    }
    try:
        formula = family[settings.schedule]
    except FormulaError:
        return f"There is no closed form for the {quantity} of {settings.schedule}."
    try:
        value = formula(**{letter: given[letter] for letter in formula.letters if letter in given})
    except FormulaError:
        return f"No closed form here: that of {settings.schedule} holds where {formula.holds}."
    form = _closed_form(settings.schedule, bool(settings.delay))
    numbers = re.sub(r"\b[pmvFBIWc]\b", lambda letter: f"{given[letter[0]]:g}", form)
    result = f"{value:.4g}" if settings.delay else f"{100 * value:.1f} %"
    return f"By the formula, {quantity} = {form} = {numbers} = {result}."


@lru_cache(maxsize=128)
def _closed_form(schedule: str, with_delay: bool) -> str:
    form = theory.makespan(schedule, c=theory.c) if with_delay else theory.bubble_fraction(schedule)
    return str(form).replace("*", "·")


def kept(trace: Trace, remat: bool) -> tuple[float, ...]:
    """The most that each rank keeps at once, in micro-batches of a whole rank; with `remat` inputs count too."""
    if not remat:
        return peak_activations(trace)
    # a Linear layer keeps its input, so a stage's input is one layer's share of what the stage keeps
    stage = 1 / trace.schedule.stages_per_rank
    return memory_curve(trace, stage, boundary=stage / layers_per_stage(trace.schedule), remat=True).peak


def _memory(trace: Trace, settings: Settings) -> str:
    peaks, limit = kept(trace, settings.remat), settings.memory_limit
    most, least = max(peaks), min(peaks)
    words = f"every rank keeps {most:.3g}"
    if most != least:
        words = f"rank {peaks.index(most)} keeps {most:.3g}, rank {peaks.index(least)} keeps {least:.3g}"
    sentence = f"Activations at the fullest moment: {words} (1 is what one micro-batch leaves on a whole rank)."
    if limit and most > limit + 1e-9:
        over = [str(rank) for rank, peak in enumerate(peaks) if peak > limit + 1e-9]
        sentence += f" That is over the limit of {limit:g} on rank{'s' * (len(over) > 1)} {', '.join(over)}."
    return sentence
