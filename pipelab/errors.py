"""The errors that pipelab raises: each says what was asked, what was found, where, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterable

_SHOWN = 100  # reasons in a message


class PipelabError(Exception):
    """The parent of every error that pipelab raises on purpose."""


class SizeError(PipelabError, ValueError):
    """A count (ranks, stages, micro-batches, samples) is no integer, or not one that this can work with."""


class ScheduleError(PipelabError, ValueError):
    """A schedule is not complete, not well formed, or in an order that can never run.

    `reasons` has every reason; the message lists the first hundred.
    """

    def __init__(self, headline: str, reasons: Iterable[str] = ()) -> None:
        self.reasons = tuple(reasons)
        if self.reasons:
            count = "1 reason" if len(self.reasons) == 1 else f"{len(self.reasons)} reasons"
            headline = "\n  ".join([f"{headline}, {count}:", *self.reasons[:_SHOWN]])
        if len(self.reasons) > _SHOWN:
            headline += f"\n  and {len(self.reasons) - _SHOWN:,} more, in .reasons"
        super().__init__(headline)


class CostError(PipelabError, ValueError):
    """A time, delay or memory figure is negative, not a number, or given for the wrong number of stages."""


class FormulaError(PipelabError, ValueError):
    """A closed form was asked for a schedule or a letter that it does not have, or outside the range where it holds."""


class PlanError(PipelabError, ValueError):
    """No configuration satisfies what a plan was asked for; the message has the nearest relaxations."""


class PartitionError(PipelabError, ValueError):
    """The layers cannot be cut into the stages that were asked for."""


class EngineError(PipelabError, RuntimeError):
    """A pipeline was asked for something that it cannot run: model, data, loss, device or state."""


class CheckpointError(PipelabError, RuntimeError):
    """A file is no checkpoint of this model, or it is damaged."""


class MissingPackageError(PipelabError, ImportError):
    """Something needs a package of an extra that is not installed; the message has the command."""


class RankError(PipelabError, RuntimeError):
    """A rank raised, died or gave no answer in time.

    `rank` is the rank that is the cause (None where all of them gave no answer), `exception_type` the class name of
    what it raised (None where it died), `remote_traceback` that rank's own traceback as text.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        exception_type: str | None = None,
        remote_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exception_type = exception_type
        self.remote_traceback = remote_traceback


def positive_integer(name: str, value: object, *, minimum: int = 1) -> int:
    """`value` as an int, or a `SizeError` that names it: sizes are whole numbers of at least `minimum`."""
    try:
        number = int(value)  # type: ignore[call-overload]
        whole = not isinstance(value, (bool, str)) and number == value
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise SizeError(f"{name} must be a whole number, got {value!r}")
    if number < minimum:
        raise SizeError(f"{name} must be at least {minimum}, got {number}")
    return int(number)


def amount(name: str, value: object, *, most: float = math.inf) -> float:
    """`value` as a float, or a `CostError` that names it: times, bytes and shares are finite, and from 0 to `most`."""
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    except OverflowError:
        number = math.inf
    if math.isnan(number):
        raise CostError(f"{name} must be a number, got {value!r}")
    if not 0 <= number < math.inf:
        raise CostError(f"{name} must be finite and not negative, got {number}")
    if number > most:
        raise CostError(f"{name} must be a number from 0 to {most:g}, got {number}")
    return number
