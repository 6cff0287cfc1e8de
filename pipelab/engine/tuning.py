"""How many micro-batches are best on this machine: measure, stop when it gets worse, keep the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from pipelab.engine import batch
from pipelab.engine.message import wrap
from pipelab.engine.pipeline import Pipeline
from pipelab.errors import EngineError, SizeError, positive_integer


@dataclass(frozen=True)
class Tried:
    """What one number of micro-batches showed: the seconds of a step, and the peak bytes where they were measured.

    `note` says why it is out of the question although it may be fast, or "".
    """

    num_microbatches: int
    step_s: float
    peak_bytes: int | None = None
    note: str = ""


@dataclass(frozen=True, repr=False)
class Tuning:
    """What was tried, in order; `best` is the fastest number of micro-batches that memory allows."""

    trials: tuple[Tried, ...]
    untried: tuple[int, ...]

    @property
    def best(self) -> int:
        """Micro-batches of the fastest trial without a note. Raises SizeError where every one needs too much memory."""
        fitting = [trial for trial in self.trials if not trial.note]
        if not fitting:
            least = min(trial.peak_bytes or 0 for trial in self.trials)
            raise SizeError(
                f"none of {', '.join(str(trial.num_microbatches) for trial in self.trials)} micro-batches fits into "
                f"memory_limit; the least that one needed is {least:,} bytes: raise it, or offer more micro-batches"
            )
        return min(fitting, key=lambda trial: trial.step_s).num_microbatches

    @property
    def sentence(self) -> str:
        """The result in words."""
        best = next(trial for trial in self.trials if trial.num_microbatches == self.best)
        others = [trial for trial in self.trials if trial is not best and not trial.note]
        text = f"{self.best} micro-batches are best: {_ms(best)} a step"
        if others:
            second = min(others, key=lambda trial: trial.step_s)
            text += f", next {second.num_microbatches} with {_ms(second)}"
        if self.untried:
            text += f"; it got worse, so {', '.join(map(str, self.untried))} were not tried"
        return text

    def __repr__(self) -> str:
        rows = _rows(self)
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join([*lines, self.sentence])

    def _repr_html_(self) -> str:
        head, *body = _rows(self)
        lines = ["".join(f"<th>{escape(cell)}</th>" for cell in head)]
        lines += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in body]
        table = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<table>{table}</table><p>{escape(self.sentence)}</p>"


def tune_microbatches(
    build: Callable[[int], Pipeline],
    inputs: Any,
    targets: Any,
    *,
    candidates: Iterable[int] | None = None,
    repeat: int = 3,
    memory_limit: int | None = None,
    tolerance: float = 0.05,
) -> Tuning:
    """Try numbers of micro-batches on one batch, rising, until a step takes longer than the best by `tolerance`.

    `build(m)` makes a Pipeline with m micro-batches, as in `lambda m: Pipeline(model, one_f_one_b(4, m), ranks=ranks,
    ...)`. Each is measured by the median of `repeat` steps after one that is dropped, and closed. Its steps compute
    gradients and update nothing, and its stages are copies, so the model, another pipeline on the same ranks and
    torch's random numbers stay as they are. `candidates` are 1, 2, 4, ... up to the samples unless given.
    `memory_limit`: bytes that no rank may exceed; the pipelines then need measure_memory=True. Fewer micro-batches are
    larger ones, so what does not fit is noted and the next number is tried.
    Raises SizeError for candidates that the batch cannot fill, EngineError where `build` makes something else.
    """
    if isinstance(build, Pipeline):
        raise EngineError(
            "a Pipeline has one schedule, so it cannot try others: give a function that makes one for m micro-batches, "
            "as in lambda m: Pipeline(model, one_f_one_b(4, m), ranks=ranks, ...); the pipeline itself may stay open"
        )
    repeat = positive_integer("repeat", repeat)
    samples = batch.rows(wrap(inputs), "inputs")
    numbers = _numbers(candidates, samples)
    trials: list[Tried] = []
    for place, number in enumerate(numbers):
        trials.append(_measure(build, number, inputs, targets, repeat, memory_limit))
        fitting = [trial.step_s for trial in trials if not trial.note]
        if fitting and not trials[-1].note and trials[-1].step_s > (1 + tolerance) * min(fitting):
            return Tuning(tuple(trials), tuple(numbers[place + 1 :]))
    return Tuning(tuple(trials), ())


def _numbers(candidates: Iterable[int] | None, samples: int) -> list[int]:
    if candidates is None:
        return [2**power for power in range(samples.bit_length()) if 2**power <= samples]
    numbers = sorted({positive_integer("candidates", number) for number in candidates})
    if not numbers or numbers[-1] > samples:
        raise SizeError(f"candidates are numbers from 1 to the {samples} samples of the batch, got {numbers}")
    return numbers


def _measure(
    build: Callable[[int], Pipeline], number: int, inputs: Any, targets: Any, repeat: int, memory_limit: int | None
) -> Tried:
    pipe = build(number)
    if not isinstance(pipe, Pipeline):
        raise EngineError(f"build({number}) must make a Pipeline, got {pipe!r}: give a function of m, not a pipeline")
    with pipe:
        if pipe.schedule.num_microbatches != number:
            found = pipe.schedule.num_microbatches
            raise SizeError(
                f"build({number}) made a pipeline with {found} micro-batches: let its schedule have m of them"
            )
        steps = [pipe.step(inputs, targets, update=False) for _ in range(repeat + 1)][1:]
    step_s = median(step.trace.makespan for step in steps)
    peaks = [peak for step in steps for peak in step.peak_bytes or ()]
    if memory_limit is None:
        return Tried(number, step_s, max(peaks, default=None))
    if not peaks:
        raise EngineError("memory_limit needs to be measured: let build make Pipeline(..., measure_memory=True)")
    note = f"needs more than {memory_limit:,} bytes" if max(peaks) > memory_limit else ""
    return Tried(number, step_s, max(peaks), note)


def _rows(tuning: Tuning) -> list[tuple[str, ...]]:
    head = ("micro-batches", "ms a step", "peak bytes", "")
    return [
        head,
        *(
            (
                str(trial.num_microbatches),
                f"{1000 * trial.step_s:.1f}",
                "" if trial.peak_bytes is None else f"{trial.peak_bytes:,}",
                trial.note or ("best" if trial.num_microbatches == tuning.best else ""),
            )
            for trial in tuning.trials
        ),
    ]


def _ms(trial: Tried) -> str:
    return f"{1000 * trial.step_s:.1f} ms"
