"""What the explorer shows for what its controls say: settings in, trace and sentences out. No widget in here."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import lru_cache

from pipelab import theory
from pipelab.captions import counted
from pipelab.costs import Costs
from pipelab.errors import FormulaError, PipelabError, ScheduleError, positive_integer
from pipelab.memory import peak_activations
from pipelab.schedule import Schedule
from pipelab.schedules import SCHEDULES
from pipelab.simulate import simulate
from pipelab.trace import Trace


@dataclass(frozen=True)
class Settings:
    """What the controls say. F, I, W are the times of one whole rank (B is I + W), `delay` that of a hop between ranks.

    `stages_per_rank` counts where the schedule has a choice: see `has_virtual_stages`.
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

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ScheduleError(f"there is no schedule {self.schedule!r}; choose one of {', '.join(SCHEDULES)}")
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
        schedule = build(settings)
        trace = simulate(schedule, settings.costs.split(schedule.stages_per_rank))
        return View(trace, (_speed(trace), _formula(settings, schedule), _memory(trace)))
    except PipelabError as error:
        return View(None, (f"Not this way: {' '.join(str(error).split())}.",))


def has_virtual_stages(schedule: str) -> bool:
    """Whether the schedule of that name lets one choose how many stages a rank holds."""
    return "stages_per_rank" in inspect.signature(SCHEDULES[schedule]).parameters


def build(settings: Settings) -> Schedule:
    """The schedule that `settings` name. Raises a PipelabError where there is none with these numbers."""
    more = {"stages_per_rank": settings.stages_per_rank} if has_virtual_stages(settings.schedule) else {}
    return SCHEDULES[settings.schedule](settings.num_ranks, settings.num_microbatches, **more)


# --- sentences -------------------------------------------------------------------------------------------------------


def _speed(trace: Trace) -> str:
    ranks, bubble = counted(trace.num_ranks, "rank"), f"{100 * trace.bubble_fraction:.1f} %"
    alone = sum(map(trace.busy, range(trace.num_ranks)))
    need = f"{ranks} need {trace.makespan:.4g}, one alone would need {alone:.4g}"
    return f"{need}: {alone / trace.makespan:.2f} times as fast. The bubble is {bubble} of makespan × {ranks}."


def _formula(settings: Settings, schedule: Schedule) -> str:
    """The bubble's closed form with the numbers in it; with a delay the makespan's, which is the shorter of the two."""
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


def _memory(trace: Trace) -> str:
    peaks = peak_activations(trace)
    most, least = max(peaks), min(peaks)
    kept = f"every rank keeps {most:.3g}"
    if most != least:
        kept = f"rank {peaks.index(most)} keeps {most:.3g}, rank {peaks.index(least)} keeps {least:.3g}"
    return f"Activations at the fullest moment: {kept} (1 is what one micro-batch leaves on a whole rank)."
